"""Trainers of TRL with ``ShardedTrainer``, on several ranks, against one process without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from cases import on_ranks
from parity import Ranks, assert_same
from trainers import BATCH, SETTINGS, STEPS, curve, folder_of, language_model, launched, whole_weights
from trueshard import TrueShardError

WORDS = ("a cat", "the dog sat", "one two", "red", "blue sky", "why not")


def preferences(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": WORDS[i % 6], "chosen": f" {WORDS[(i + 1) % 6]} yes", "rejected": f" {WORDS[(i + 2) % 6]}"}
        for i in range(count)
    ]


def texts(count: int) -> list[dict[str, Any]]:
    return [{"text": f"{WORDS[i % 6]} {WORDS[(i * 5 + 1) % 6]}"} for i in range(count)]


def labelled(count: int) -> list[dict[str, Any]]:
    return [{"prompt": WORDS[i % 6], "completion": f" {WORDS[(i + 1) % 6]}", "label": i % 2 == 0} for i in range(count)]


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": WORDS[i % 6]} for i in range(count)]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def conversations(count: int) -> list[dict[str, Any]]:
    turns = [(WORDS[i % 6], WORDS[(i + 1) % 6]) for i in range(count)]
    return [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in turns]


class Told:
    """Generates as it does, and goes on with answers that follow from the prompt and its number, whatever the ranks."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        drawn: Any = super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[misc]
        first = self.accelerator.process_index * len(prompt_ids)  # type: ignore[attr-defined]
        told = []
        for row, prompt in enumerate(prompt_ids, start=first):
            seed = 7 * sum(prompt) + 5 * (row % 2)
            told.append([3 + (seed + 3 * j) % 33 for j in range(3 + seed % 3)] + [2])
        assert len(told) == len(drawn[0] if isinstance(drawn, tuple) else drawn)
        return (told, drawn[1]) if isinstance(drawn, tuple) else told


def kind_of(name: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The trainer, its configuration, its samples, and settings."""
    import trl

    if name == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        return GKDTrainer, GKDConfig, conversations, {"lmbda": 0.0, "max_length": 32}
    return {
        "sft": (trl.SFTTrainer, trl.SFTConfig, texts, {"max_length": 24}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, preferences, {"max_length": 32}),
        "kto": (trl.KTOTrainer, trl.KTOConfig, labelled, {"max_length": 32, "loss_type": "apo_zero_unpaired"}),
        "reward": (trl.RewardTrainer, trl.RewardConfig, preferences, {"max_length": 32}),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, prompts, {"max_completion_length": 6, "beta": 0.1}),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig, prompts, {"max_completion_length": 6, "beta": 0.1}),
    }[name]


def made(rank: int, world_size: int, folder: str, base: str, name: str, kind: str, sharded: bool, **more: Any) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    launched(rank, world_size)
    trainer, config, samples, settings = kind_of(name)
    microbatches = BATCH // world_size if "accumulation" in kind else 1
    words: dict[str, Any] = {
        **SETTINGS,
        "per_device_train_batch_size": BATCH // world_size // microbatches,
        "gradient_accumulation_steps": microbatches,
        "bf16": "bf16" in kind,
        "fp16": False,
        "gradient_checkpointing": kind == "recomputation",
    }
    if name in ("grpo", "rloo"):
        trainer = type("Told", (Told, trainer), {})
    if sharded:
        from trueshard.integrations.transformers import ShardedTrainer

        trainer = type("Mine", (ShardedTrainer, trainer), {})
    if name == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
    if kind == "frozen":
        model.model.layers[0].requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)
    arguments: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(base)}
    if "lora" in kind:
        task = "SEQ_CLS" if name == "reward" else "CAUSAL_LM"
        arguments["peft_config"] = LoraConfig(r=2, target_modules="all-linear", task_type=task)
    if name in ("grpo", "rloo"):
        words |= {"num_generations": 2}
        arguments["reward_funcs"], *rest = more.pop("reward", (reward,))
        if rest:
            arguments["reward_processing_classes"] = rest[0]
    if name == "gkd":
        arguments["teacher_model"] = language_model(seed=9)

    def data(split: str, count: int) -> Any:
        """From files, beside which TRL keeps what rank 0 has computed before."""
        file = Path(folder, f"{split}.json")
        if rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(map(json.dumps, samples(count))))
        torch.distributed.barrier()
        return Dataset.from_json(str(file), cache_dir=folder)

    torch.manual_seed(5)
    return trainer(
        model=model,
        args=config(folder, **(words | settings | more)),
        train_dataset=data("train", BATCH * STEPS),
        eval_dataset=data("eval", 6),
        **arguments,
    )


def trained(rank: int, world_size: int, folder: str, base: str, name: str, kind: str, sharded: bool) -> Any:
    trainer = made(rank, world_size, folder, base, name, kind, sharded)
    trainer.train()
    return curve(trainer), whole_weights(trainer.model)


NAMES = ("dpo", "sft", "kto", "reward", "grpo", "rloo", "gkd")
KINDS = ("full", "lora", "tied", "frozen", "accumulation", "accumulation lora", "recomputation")


def cases() -> list[Any]:
    """Each trainer × each kind: one in the short suite, the others in the rest."""
    short = {("dpo", "accumulation lora")}
    every = [(name, kind) for name in NAMES for kind in KINDS]
    return [pytest.param(*case, marks=() if case in short else pytest.mark.rest) for case in every]


@pytest.mark.parametrize(("name", "kind"), cases())
def test_training(name: str, kind: str, alone: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    base = str(folder_of(language_model(tied=kind == "tied"), tmp_path / "base"))
    # TRL's GKD divides its loss by the tokens of all ranks, and DDP averages it over ranks: so N ranks are not one.
    reference = ranks2 if name == "gkd" else alone
    expected = reference.run(trained, str(tmp_path / "one"), base, name, kind, False)[0]
    for found in ranks2.run(trained, str(tmp_path / "two"), base, name, kind, True):
        assert_same(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_three_ranks(name: str, kind: str, alone: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    base = str(folder_of(language_model(), tmp_path / "base"))
    reference = ranks3 if name == "gkd" else alone
    expected = reference.run(trained, str(tmp_path / "one"), base, name, kind, False)[0]
    for found in ranks3.run(trained, str(tmp_path / "three"), base, name, kind, True):
        assert_same(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["bf16", "bf16 lora", "bf16 lora accumulation"])
@pytest.mark.parametrize("name", NAMES)
def test_bf16_computes_as_on_one_rank(name: str, kind: str, alone: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    """By a loose bound: what rounding to bfloat16 does to a small loss or gradient differs with the batch's shape."""
    base = str(folder_of(language_model(), tmp_path / "base"))
    reference = ranks2 if name == "gkd" else alone
    (expected, _) = reference.run(trained, str(tmp_path / "plain"), base, name, kind, False)[0]
    for found, _ in ranks2.run(trained, str(tmp_path / "two"), base, name, kind, True):
        assert_same(found["loss"], expected["loss"], rtol=3e-2, atol=3e-2)


@pytest.mark.rest
@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name: str, alone: Ranks, tmp_path: Path) -> None:
    base = str(folder_of(language_model(), tmp_path / "base"))
    expected = alone.run(trained, str(tmp_path / "plain"), base, name, "lora", False)[0]
    assert_same(alone.run(trained, str(tmp_path / "one"), base, name, "lora", True)[0], expected, rtol=2e-4, atol=1e-5)


def resumed(rank: int, world_size: int, folder: str, base: str, name: str, kind: str, sharded: bool, at: int) -> Any:
    """Save in the middle and evaluate at the end; or resume from the middle, if ``at`` is the step."""
    words = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": STEPS}
    words["per_device_eval_batch_size"] = 6 // world_size
    trainer = made(rank, world_size, folder, base, name, kind, sharded, **words)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{at}" if at else None)
    curves = curve(trainer)
    return curves["loss"], curves["eval_loss"], whole_weights(trainer.model)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward", "grpo", "rloo"])
def test_a_run_resumes_at_three_ranks(
    name: str, kind: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    base = str(folder_of(language_model(), tmp_path / "base"))
    (expected,) = alone.run(resumed, str(tmp_path / "one"), base, name, kind, False, 0)
    for ranks, at in ((ranks2, 0), (ranks3, 2)):
        for losses, evaluation, weights in ranks.run(resumed, str(tmp_path / "run"), base, name, kind, True, at):
            assert_same((losses, weights), (expected[0], expected[2]), rtol=2e-4, atol=1e-5)
            assert_same(
                evaluation, expected[1], rtol=5e-3, atol=1e-5
            )  # a mean over ranks' means, of samples of any length


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_of_gkd_resumes(kind: str, ranks2: Ranks, tmp_path: Path) -> None:
    base = str(folder_of(language_model(), tmp_path / "base"))
    (expected, _) = ranks2.run(resumed, str(tmp_path / "plain"), base, "gkd", kind, False, 0)
    for at in (0, 2):
        for found in ranks2.run(resumed, str(tmp_path / "run"), base, "gkd", kind, True, at):
            assert_same(found, expected, rtol=2e-4, atol=1e-5)


def with_context(rank: int, world_size: int, folder: str, base: str, name: str, sharded: bool) -> Any:
    from accelerate.utils import ParallelismConfig

    words: dict[str, Any] = {"prediction_loss_only": True, "per_device_train_batch_size": BATCH}
    if sharded:
        sizes = ParallelismConfig(dp_shard_size=world_size // 2, cp_size=2)
        words |= {"parallelism_config": sizes, "per_device_train_batch_size": BATCH * 2 // world_size}
    trainer = made(rank, world_size, folder, base, name, "full", sharded, **words)
    trainer.train()
    return (curve(trainer), whole_weights(trainer.model)), trainer.evaluate()["eval_loss"]


@pytest.mark.rest
def test_ranks_share_sequences_of_sft(alone: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    base = str(folder_of(language_model(), tmp_path / "base"))
    ((expected, expected_loss),) = alone.run(with_context, str(tmp_path / "one"), base, "sft", False)
    for count, mean_of_means in ((2, 3e-4), (4, 5e-3)):
        ranks = Ranks(count, ranks4.pool)
        for found, loss in ranks.run(with_context, str(tmp_path / str(count)), base, "sft", True):
            assert_same(found, expected, rtol=3e-4, atol=2e-5)
            assert_same(loss, expected_loss, rtol=mean_of_means)


def refused_context(rank: int, world_size: int, folder: str, base: str, name: str) -> None:
    with pytest.raises(TrueShardError, match=r"cp_size: .*Trainer's loss is of whole sequences"):
        with_context(rank, world_size, folder, base, name, True)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["dpo", "kto", "gkd"])
def test_other_losses_refuse_to_share_sequences(name: str, ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(refused_context, str(tmp_path), str(folder_of(language_model(), tmp_path / "base")), name)


SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2}
PRECOMPUTED = {"precompute_ref_log_probs": True}


def with_reference(rank: int, world_size: int, folder: str, base: str, kind: str, sharded: bool, words: Any) -> Any:
    trainer = made(rank, world_size, folder, base, "dpo", kind, sharded, **words)
    trainer.train()
    if getattr(trainer, "ref_model", None) is not None and sharded:
        assert all(isinstance(parameter, DTensor) for parameter in trainer.ref_model.parameters())
    return curve(trainer), whole_weights(trainer.model)


@pytest.mark.rest
@pytest.mark.parametrize(("words", "kind"), [(SYNCED, "full"), (PRECOMPUTED, "full"), (PRECOMPUTED, "lora")])
def test_references(
    words: dict[str, Any], kind: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    base = str(folder_of(language_model(), tmp_path / "base"))
    (expected,) = alone.run(with_reference, str(tmp_path / "one"), base, kind, False, words)
    for ranks in (ranks2, ranks3):
        for found in ranks.run(with_reference, str(tmp_path / str(ranks.count)), base, kind, True, words):
            assert_same(found, expected, rtol=2e-4, atol=1e-5)


def rewarded(rank: int, world_size: int, folder: str, base: str, sharded: bool) -> Any:
    """A reward model in the place of a function, and evaluation with answers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(6)
    rewarding = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.ones_(rewarding.score.weight)
    trainer = made(
        *(rank, world_size, folder, base, "grpo", "full", sharded),
        per_device_eval_batch_size=6 // world_size,
        reward=(rewarding, AutoTokenizer.from_pretrained(base)),
    )
    trainer.train()
    if sharded:
        assert all(isinstance(parameter, DTensor) for parameter in rewarding.parameters())
    return curve(trainer)["loss"], whole_weights(trainer.model), trainer.evaluate()["eval_reward"]


@pytest.mark.rest
def test_a_reward_model_and_evaluation_with_answers(alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    base = str(folder_of(language_model(), tmp_path / "base"))
    (expected,) = alone.run(rewarded, str(tmp_path / "one"), base, False)
    for ranks in (ranks2, ranks3):
        for found in ranks.run(rewarded, str(tmp_path / str(ranks.count)), base, True):
            assert_same(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.rest
@on_ranks(1)
def test_generation_by_vllm_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    base = str(folder_of(language_model(), tmp_path / "base"))
    with pytest.raises(ValueError, match="use_vllm=True: "):
        made(rank, world_size, str(tmp_path), base, "grpo", "full", True, use_vllm=True)
