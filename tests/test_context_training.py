"""The trainer on the context axis: each sequence counts once; and the memory of a long one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueshard
from messages import naming
from meter import gloo_lets_go, meter, peak_and_rest
from parity import Pool, Ranks, assert_same
from sequences import IGNORED, batch_of, build, summed
from trueshard.errors import UserError

# The trainer


def pairs(seed: int) -> dict[str, torch.Tensor]:
    """Two pairs: chosen answers, then rejected ones; padded."""
    batch = batch_of("padded", seed)
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "targets": targets}


def documents(seed: int) -> dict[str, torch.Tensor]:
    batch = batch_of("packed", seed)
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "targets": targets}


def fitted(rank: int, world_size: int, kind: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Records of three steps of the trainer, evaluations included; samples go by the rank along shard alone."""
    from trueshard.train.losses import CausalLoss
    from trueshard.train.preference import PreferenceLoss

    model = build("gpt2" if "tensor" not in sizes else "llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    loss: Any = CausalLoss()
    if kind == "pairs":
        reference = build("gpt2").requires_grad_(False)
        nn.init.normal_(reference.lm_head.weight, generator=torch.Generator().manual_seed(5))
        loss = PreferenceLoss(reference, beta=2.0)
    reader, readers = 0, 1
    if world_size > 1:
        trueshard.shard(model, optimizer, **sizes)
        if kind == "pairs":
            trueshard.shard(reference, **sizes)
        readers = world_size // (sizes.get("context", 1) * sizes.get("tensor", 1))
        reader = rank // (world_size // readers)
    made = pairs if kind == "pairs" else documents
    order = torch.tensor([0, 2, 1, 3])  # of two pairs, the first reader's are rows 0 and 2

    def part(seed: int) -> dict[str, torch.Tensor]:
        if kind == "pairs":
            return {
                key: each[order.chunk(readers)[reader]] if readers > 1 else each for key, each in made(seed).items()
            }
        return {key: each.chunk(readers)[reader] for key, each in made(seed).items()}

    records: list[dict[str, Any]] = []

    class Record(trueshard.Callback):
        def on_step(self, trainer: Any, record: dict[str, Any]) -> None:
            keys = ("loss", "grad_norm", "tokens", "evaluation_loss", "evaluation_count")
            records.append({key: record[key] for key in keys} | (loss.measures() if kind == "pairs" else {}))

    trainer = trueshard.Trainer(
        model,
        optimizer,
        [part(seed) for seed in range(6)],
        loss=loss,
        steps=3,
        accumulate=2,
        evaluation=[part(7), part(8)],
        evaluate_every=1,
        callbacks=[Record()],
    )
    trainer.fit()
    return records


@pytest.mark.parametrize(
    ("count", "kind", "sizes"),
    [
        (4, "documents", {"context": 2}),
        pytest.param(2, "pairs", {"context": 2}, marks=pytest.mark.rest),
        pytest.param(4, "pairs", {"context": 2}, marks=pytest.mark.rest),
        pytest.param(4, "documents", {"context": 2, "tensor": 2}, marks=pytest.mark.rest),
    ],
)
def test_the_trainer_counts_each_sequence_once(
    count: int, kind: str, sizes: dict[str, int], alone: Ranks, pool: Pool
) -> None:
    (expected,) = alone.run(fitted, kind, sizes)
    assert all(("rewards_margins" in record) == (kind == "pairs") for record in expected)
    for found in Ranks(count, pool).run(fitted, kind, sizes):
        assert_same(found, expected, rtol=1e-12, atol=1e-12)


def test_the_configuration_has_the_axes() -> None:
    from trueshard.train.shard_section import ShardSection

    section = ShardSection(tensor={"ranks": 2, "sequence": True}, context=2, experts=2, replicate=2)
    choices = section.options()
    assert (choices.tensor, choices.context, choices.experts) == ({"ranks": 2, "sequence": True}, 2, 2)
    assert section.readers(16) == 4
    with pytest.raises(ValueError, match=naming("shard.replicate = 2", "shard.tensor = 2", "shard.context = 2", 12, 8)):
        section.readers(12)


def test_what_does_not_fit_the_axes_is_said_before_a_run_begins() -> None:
    from trueshard.train.config import Config
    from trueshard.train.run.checks import check_settings

    tree: dict[str, Any] = {
        "run": {"dir": "run"},
        "model": {"architecture": "llama"},
        "tokenizer": {"vocab_size": 300},
        "data": {"path": "text"},
        "train": {"steps": 1, "batch_size": 3},
        "shard": {"context": 2},
    }
    with pytest.raises(UserError, match=naming("train.batch_size", "3 sequences", "2 ranks", "counted once")):
        check_settings(Config.model_validate(tree), 4)
    with pytest.raises(UserError, match=naming("shard.context = 2", "3 ranks")):
        check_settings(Config.model_validate(tree), 3)
    tree |= {"data": {"path": "text", "format": "prompt"}, "rl": {}, "reward": {"function": "rewards.py:one"}}
    with pytest.raises(ValueError, match=naming("shard.context", "[rl]")):
        Config.model_validate(tree)


# Memory


def peak(rank: int, world_size: int, length: int) -> int:
    """Highest rise of this process's memory in a step on one plain sequence, in bytes."""
    model = build("llama", 4, 4, hidden_size=16, head_dim=4, intermediate_size=32, num_hidden_layers=1).float()
    ids = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    if world_size > 1:
        trial = {"trial": False}  # of the batch, before the first pass: not what a step takes
        trueshard.shard(model, context=world_size, activation_checkpointing="full", tensor=trial)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def step() -> None:
        part = trueshard.split_sequence(model, batch)
        labels = part.pop("labels")
        del part["shift_labels"]
        summed(model(**part, use_cache=False).logits, labels).backward()

    with gloo_lets_go() if world_size > 1 else contextlib.nullcontext():
        changes = meter([step]).steps[0]
    return peak_and_rest([change.bytes for change in changes])[0]


@pytest.mark.rest
def test_four_ranks_have_a_quarter_of_a_long_sequence_each(alone: Ranks, ranks4: Ranks) -> None:
    length = 1 << 14
    (one,) = alone.run(peak, length, timeout=300.0)
    found = ranks4.run(peak, length, timeout=300.0)
    assert 0.25 * one < max(found) < 0.28 * one
