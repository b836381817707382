"""transformers' ``Trainer`` with ``ShardedTrainer``, on several ranks, against one process without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parity import Ranks, assert_same
from trainers import BATCH, STEPS, folder_of, language_model, launched, tokens, whole_weights


def made(
    rank: int,
    world_size: int,
    folder: str,
    kind: str = "full",
    sharded: bool = True,
    shard: Any = None,
    base: str | None = None,
    **settings: Any,
) -> Any:
    """Return a trainer of a kind: which parameters train, and how."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    launched(rank, world_size)
    model = language_model(tied=kind == "tied")
    if base is not None:
        model = AutoModelForCausalLM.from_pretrained(base)
    if kind == "lora":
        model = with_lora(model)
    if kind == "frozen":
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    samples, microbatches = BATCH // world_size, BATCH // world_size if kind == "accumulation" else 1
    words: dict[str, Any] = {
        "per_device_train_batch_size": samples // microbatches,
        "gradient_accumulation_steps": microbatches,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 3,
        "bf16": kind == "bf16",
        "disable_tqdm": True,
        "lr_scheduler_type": "linear",
    }
    kinds: Any = Trainer
    if sharded:
        from trueshard.integrations.transformers import ShardedTrainer

        kinds = type("Mine", (ShardedTrainer, Trainer), {})
    more = {"shard": shard} if shard is not None else {}
    return kinds(
        model=model,
        args=TrainingArguments(folder, **(words | settings)),
        train_dataset=tokens(BATCH * STEPS),
        eval_dataset=tokens(8, seed=1),
        **more,
    )


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    model.name_or_path = model.name_or_path or "a-base"
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def curve(trainer: Any) -> dict[str, list[float]]:
    kept = ("loss", "grad_norm", "eval_loss")
    return {key: [line[key] for line in trainer.state.log_history if key in line] for key in kept}


def trained(rank: int, world_size: int, folder: str, kind: str, sharded: bool, settings: dict[str, Any]) -> Any:
    trainer = made(rank, world_size, folder, kind, sharded, **settings)
    trainer.train()
    return curve(trainer), whole_weights(trainer.model)


def first_short(*kinds: str) -> pytest.MarkDecorator:
    """Parametrize ``kind``: the first in the short suite, the others in the rest."""
    short, *rest = kinds
    return pytest.mark.parametrize("kind", [short, *(pytest.param(kind, marks=pytest.mark.rest) for kind in rest)])


@first_short("accumulation", "full", "lora", "frozen", "tied")
def test_training(kind: str, alone: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    (expected,) = alone.run(trained, str(tmp_path / "one"), kind, False, {})
    for found in ranks2.run(trained, str(tmp_path / "two"), kind, True, {}):
        assert_same(found, expected, rtol=2e-4, atol=1e-5)


def saved_and_resumed(rank: int, world_size: int, folder: str, kind: str, resumed: bool, best: bool) -> Any:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    if best:
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = made(rank, world_size, folder, kind, sharded=world_size > 1, **settings)
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")) if resumed else None)
    return curve(trainer), whole_weights(trainer.model)


@first_short("lora", "full", "tied")
def test_a_run_resumes_at_another_number_of_ranks(
    kind: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    (expected,) = alone.run(saved_and_resumed, str(tmp_path / "one"), kind, False, False)
    for found in ranks2.run(saved_and_resumed, str(tmp_path / "two"), kind, False, False):
        assert_same(found, expected, rtol=2e-4, atol=1e-5)
    for found in ranks3.run(saved_and_resumed, str(tmp_path / "two"), kind, True, False):
        assert_same(found, expected, rtol=2e-4, atol=1e-5)
    # the second run wrote checkpoint-4 once more
    assert {path.name for path in (tmp_path / "two").iterdir()} >= {"checkpoint-2", "checkpoint-4"}


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_is_written_is_what_transformers_and_peft_read(kind: str, ranks2: Ranks, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    base = folder_of(language_model(), tmp_path / "base")
    settings = {"save_strategy": "steps", "save_steps": STEPS, "base": str(base)}
    _, trained_weights = ranks2.run(trained, str(tmp_path / "run"), kind, True, settings)[0]
    folder = tmp_path / "run" / f"checkpoint-{STEPS}"
    assert not (folder / "base").exists()
    if kind == "lora":
        found = AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True)
    else:
        found = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(whole_weights(found), trained_weights)
