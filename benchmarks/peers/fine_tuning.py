"""Supervised fine-tuning by TRL's ``SFTTrainer``: under DDP, under Accelerate's FSDP2, and with TrueShard."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from benchmarks.peers import OURS
from benchmarks.peers.environment import environment
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.trainers import clock, is_sharded, marking, silent, train_with_fsdp2

TOKENIZER = Path(__file__).parents[2] / "examples/models/sort"
"""Tells padding from text alone: samples are numbers of tokens already."""
DDP, FSDP2 = "TRL, DDP", "TRL, FSDP2"
WAYS = (OURS, DDP, FSDP2)


@dataclass
class Run:
    """What a rank measured."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of each step by the wall's and the processor's clock."""
    losses: list[float] = field(default_factory=list)
    """Of this rank's batches, nats."""
    sharded: bool = False
    """True if parameters are DTensors."""


def train(way: str, recipe: Recipe, steps: int) -> Run:
    """Train the recipe's model on this rank, one of ``WAYS``; collective."""
    # Accelerate takes all cores for one process where OMP_NUM_THREADS is not set.
    with silent(), environment(OMP_NUM_THREADS="1"), tempfile.TemporaryDirectory() as folder:
        import torch
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer

        from trueshard.integrations.transformers import ShardedTrainer

        result = Run()

        class Told(SFTTrainer):  # type: ignore[misc]
            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                if way == FSDP2:
                    train_with_fsdp2(self, always=recipe.policy == "always")

            def training_step(self, *words: Any, **more: Any) -> torch.Tensor:
                loss: torch.Tensor = super().training_step(*words, **more)
                result.losses.append(loss.item())
                return loss

        class Sharded(ShardedTrainer, Told):
            shard: ClassVar = {"reshard_after_forward": recipe.policy}

        shape, ranks = recipe.shape, dist.get_world_size()
        batches = [shape.batch(seed).tolist() for seed in range(steps * ranks)]
        trainer = (Sharded if way == OURS else Told)(
            recipe.build(),
            args=SFTConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=shape.sequences,
                max_length=shape.tokens,
                max_steps=steps,
                learning_rate=1e-4,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                ddp_find_unused_parameters=False,
            ),
            train_dataset=Dataset.from_list([{"input_ids": ids} for batch in batches for ids in batch]),
            processing_class=AutoTokenizer.from_pretrained(str(TOKENIZER), local_files_only=True),
            callbacks=[clock(result.steps), marking()],
        )
        torch.set_num_threads(1)
        trainer.train()
    result.sharded = is_sharded(trainer.model)
    return result
