"""``shard(exact=True)``: ranks × accumulation, in any split and order, give the same losses, norms and states.

A microbatch is what one ``backward()`` computes. Units that run several times before it are refused with accumulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import exactness
import trueshard
from messages import naming
from models.handmade import Stack
from parity import Pool, Ranks, assert_same
from stepping import take_step
from trueshard.optim.exact import loss_on_grid

STEPS = 10
TERMS = 12
"""Of a microbatch's loss, as ``token_mean`` counts them."""

CLIP = 0.01

Record = list[tuple[float, float, str]]
"""Of each step: mean loss, norm of the gradients, hash of parameters and optimizer state."""


def dealt(rank: int, ranks: int, accumulation: int, order: str) -> list[int]:
    """Numbers of a rank's microbatches in the order in which it computes them."""
    if order == "strided":
        return list(range(rank, ranks * accumulation, ranks))
    own = range(rank * accumulation, (rank + 1) * accumulation)
    return list(reversed(own)) if order == "reversed" else list(own)


@contextmanager
def unreduced(model: Any, last: bool, order: str) -> Iterator[None]:
    """Both ways to say which backward reduces: this library's and FSDP2's."""
    if order == "strided":
        model.set_requires_gradient_sync(last)
        yield
    else:
        with trueshard.accumulate(model, last=last):
            yield


def summed_loss(model: nn.Module, step: int, number: int, forwards: int) -> torch.Tensor:
    parts = [exactness.summed_loss(model, step, forwards * number + part)[0] for part in range(forwards)]
    return torch.stack(parts).sum()


def train(
    rank: int,
    world_size: int,
    name: str,
    accumulation: int,
    order: str = "in turn",
    forwards: int = 1,
    options: Any = None,
    shape: tuple[int, int] | None = None,
) -> Record:
    """Take `STEPS` steps of ``world_size * accumulation`` microbatches of ``forwards`` forwards each."""
    torch.manual_seed(0)
    model = exactness.MODELS[name]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    trueshard.shard(model, optimizer, mesh=mesh, exact=True, **(options or {}))
    model.train()
    own = dealt(rank, world_size, accumulation, order)
    record = []
    for step in range(STEPS):
        mean = trueshard.token_mean(model, TERMS * len(own))
        total = torch.zeros((), dtype=torch.float64)
        for number in own:
            with trueshard.sample_rng(0, step, number), unreduced(model, number == own[-1], order):
                loss = summed_loss(model, step, number, forwards)
                mean(loss).backward()
            total += loss_on_grid(loss)
        norm = float(trueshard.clip_grad_norm_(model.parameters(), CLIP))
        take_step(optimizer)
        record.append((mean.value(total), norm, trueshard.state_hash(model, optimizer).total))
    return record


def hold(pool: Pool, name: str, microbatches: int, *more: Any) -> None:
    """Hold all splits of a step's microbatches over one to four ranks against one rank that computes all of them."""
    (expected,) = Ranks(1, pool).run(train, name, microbatches, "in turn", *more)
    assert len({state for *_, state in expected}) == STEPS
    assert expected[0][1] > CLIP
    for ranks in (2, 3, 4):
        if microbatches % ranks:
            continue
        order = ("strided", "reversed", "in turn")[ranks - 2]
        for found in Ranks(ranks, pool).run(train, name, microbatches // ranks, order, *more):
            assert found == expected, f"{ranks} ranks × {microbatches // ranks} microbatches"


@pytest.mark.parametrize(("name", "microbatches"), [("gpt2_with_dropout", 4), ("whole_ones", 6)])
def test_accumulation_changes_no_bit(name: str, microbatches: int, pool: Pool) -> None:
    hold(pool, name, microbatches)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "microbatches", "options"),
    [
        ("vit", 4, {}),
        ("llama", 8, {"mixed_precision": "bf16", "reshard_after_forward": "never"}),
        ("mixtral", 12, {}),
        ("tied", 8, {"mixed_precision": "bf16", "activation_checkpointing": "full"}),
        ("uneven", 16, {}),
    ],
)
def test_accumulation_of_1_to_16_changes_no_bit(
    name: str, microbatches: int, options: dict[str, Any], pool: Pool
) -> None:
    hold(pool, name, microbatches, 1, options)


@pytest.mark.rest
def test_replicas_split_the_microbatches_too(pool: Pool) -> None:
    (expected,) = Ranks(1, pool).run(train, "gpt2_with_dropout", 8)
    for found in Ranks(4, pool).run(train, "gpt2_with_dropout", 2, "strided", 1, {}, (2, 2)):
        assert found == expected


class Again(Stack):
    """One block, called three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.last(x)


def called_again(rank: int, world_size: int, accumulation: int, units: Any) -> dict[str, str]:
    torch.manual_seed(0)
    model = Again(depth=1)
    trueshard.shard(model, exact=True, units=units)
    mean = trueshard.token_mean(model, TERMS * accumulation)
    own = dealt(rank, world_size, accumulation, "in turn")
    for number in own:
        with trueshard.accumulate(model, last=number == own[-1]):
            mean(summed_loss(model, 0, number, 1)).backward()
    return exactness.digest({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_units_that_run_again_are_exact_or_refused(alone: Ranks, ranks2: Ranks) -> None:
    (expected,) = alone.run(called_again, 2, "first")
    for accumulation, units in ((1, "Block"), (1, "first")):
        for found in ranks2.run(called_again, accumulation, units):
            assert_same(found, expected)
    alone.raises(called_again, 2, "Block", match=naming("'blocks.0'"))
    ranks2.raises(train, "whole_ones", 2, "in turn", 2, match="backward")
