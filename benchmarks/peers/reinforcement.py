"""Reinforcement learning by TrueShard and by TRL: the same model, prompts, reward, settings and number of samples."""

from __future__ import annotations

import contextlib
import json
import runpy
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.peers.environment import environment
from benchmarks.peers.trainers import clock, is_sharded, silent, train_with_fsdp2

ROOT = Path(__file__).parents[2] / "examples"
ANSWERS = 128
"""Of a step, over all ranks; 8 to each prompt."""
LONGEST = 64
"""Tokens of an answer at most, where lengths are uneven: a model without training ends an answer at any token."""
MICROBATCHES = 4
"""Of a step of a rank, where lengths are uneven."""
FIELDS = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
"""Of the model without training."""


@dataclass
class Run:
    """What a rank measured."""

    steps: list[float] = field(default_factory=list)
    """Seconds from the end of a step to the end of the next; the first from the start of training."""
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of generation (with new weights for the copy) and reward, of each step."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of this rank's samples, of each step; TrueShard: of all."""
    threads: int = 0
    """Of torch, in this process, while it trained."""
    sharded: bool = False
    """True if parameters are DTensors."""


def ours(steps: int, seed: int, folder: Path, copy: str, uneven: bool = False) -> Run:
    """``trueshard train`` of examples/grpo.toml, but for evaluation, checkpoints and the writing of samples.

    ``uneven``: a model without training, whose answers are of all lengths, by continuous batching.
    """
    import torch

    from trueshard.train.callbacks import Callback
    from trueshard.train.config import Config
    from trueshard.train.run import checks, session
    from trueshard.train.trainer import Trainer

    ranks = dist.get_world_size()
    model: dict[str, Any] = {"model": {"path": str(ROOT / "models/sort")}}
    if uneven:
        model = {"model": {"architecture": "llama", "fields": FIELDS}, "tokenizer": {"path": str(ROOT / "models/sort")}}
    longest, more = (LONGEST, {"continuous": True}) if uneven else (8, {})
    config = Config.model_validate(
        {
            "run": {"dir": str(folder)},
            **model,
            "data": {"format": "prompt", "path": str(ROOT / "data/sort.jsonl")},
            "rl": {"samples": 8, "advantage": "group", "loss": "clip", "clip": [0.2, 0.2], "skip_equal": False},
            "rollout": {"tokens": longest, "batch": ANSWERS // ranks, "copy": copy, **more},
            "reward": {"function": f"{ROOT / 'rewards.py'}:sort"},
            "train": {
                "steps": steps,
                "sequence_length": longest + 16,
                "batch_size": ANSWERS,
                "seed": seed,
                "accumulate": MICROBATCHES if uneven else 1,
            },
            "optimizer": {"lr": 1e-6 if uneven else 5e-4, "weight_decay": 0.0},
            "schedule": {"decay": "constant"},
            "log": {"samples_every": 10**6},
        }
    )
    result = Run()

    class Clock(Callback):
        def on_start(self, trainer: Trainer) -> None:
            self.last = time.perf_counter()

        def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
            self.last, before = time.perf_counter(), self.last
            result.steps.append(self.last - before)
            result.phases["generation"].append(record["seconds_sync"] + record["seconds_generate"])
            result.phases["reward"].append(record["seconds_reward"])
            result.rewards.append(record["reward"])

    with silent():
        ready = checks.check(config, ranks) if dist.get_rank() == 0 else None
        dist.barrier()
        ready = ready or checks.check(config, ranks, make=False)
        trainer, _ = session.build_trainer(ready, lambda: False, device=torch.device("cpu"))
        trainer.checkpoints = None
        trainer.callbacks.append(Clock())
        trainer.fit()
    result.threads, result.sharded = torch.get_num_threads(), is_sharded(trainer.model)
    return result


def trl(steps: int, seed: int, folder: Path, sharded: bool, uneven: bool = False) -> Run:
    """``GRPOTrainer``; over several ranks under DDP, or with ``sharded`` under Accelerate's FSDP2.

    ``uneven``: as for ``ours``.
    """
    import torch

    # Accelerate takes all cores for one process where OMP_NUM_THREADS is not set.
    with silent(), environment(OMP_NUM_THREADS="1"):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        result = Run()
        clocked: list[tuple[float, float]] = []

        class Timed(GRPOTrainer):  # type: ignore[misc]
            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                if sharded:
                    train_with_fsdp2(self, always=False)  # kept gathered between tokens: the faster one

            def _generate_single_turn(self, *words: Any, **more: Any) -> Any:
                with _clocked(result.phases["generation"]):
                    return super()._generate_single_turn(*words, **more)

            def _calculate_rewards(self, *words: Any, **more: Any) -> Any:
                with _clocked(result.phases["reward"]):
                    return super()._calculate_rewards(*words, **more)

        def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
            both = zip(completions, answer, strict=True)
            judged = [sort(text, {"answer": right}, None)["reward"] for text, right in both]
            result.rewards.append(sum(judged) / len(judged))
            return judged

        sort = _sort()
        lines = (ROOT / "data/sort.jsonl").read_text().splitlines()
        rows = [{key: json.loads(line)[key] for key in ("prompt", "answer")} for line in lines]
        settings = GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs=None if uneven else {"dtype": "float32"},
            per_device_train_batch_size=ANSWERS // dist.get_world_size() // (MICROBATCHES if uneven else 1),
            gradient_accumulation_steps=MICROBATCHES if uneven else 1,
            num_generations=8,
            max_completion_length=LONGEST if uneven else 8,
            learning_rate=1e-6 if uneven else 5e-4,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            epsilon=0.2,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="group",
            max_steps=steps,
            seed=seed,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        model, tokenizer = _untrained(seed) if uneven else (str(ROOT / "models/sort"), None)
        trainer = Timed(
            model,
            reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock(clocked)],
        )
        torch.set_num_threads(1)
        trainer.train()
    result.steps = [wall for wall, _ in clocked]
    result.threads, result.sharded = torch.get_num_threads(), is_sharded(trainer.model)
    return result


def _untrained(seed: int) -> tuple[Any, Any]:
    """Return a model with random values, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(ROOT / "models/sort"), local_files_only=True)
    torch.manual_seed(seed)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **ends, **FIELDS)), tokenizer


def _sort() -> Any:
    return runpy.run_path(str(ROOT / "rewards.py"))["sort"]


@contextlib.contextmanager
def _clocked(seconds: list[float]) -> Any:
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds.append(time.perf_counter() - began)
