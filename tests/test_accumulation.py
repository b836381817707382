"""Contract: gradients that were summed and not reduced go with ``zero_grad()``, and are never left out of a step."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from cases import as_on_one_device
from gathering import whole
from handmade_training import batch, prepared, take_steps
from messages import naming
from models.handmade import Scalar
from parity import Ranks
from resting import all_but
from stepping import accumulate, take_step


class Planted(Exception):
    """The user's own."""


def build(world_size: int, given: bool = True, **words: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if world_size > 1:
        trueshard.shard(model, *([optimizer] if given else []), **words)
        if not given:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


def backward(model: nn.Module, seed: int, rank: int, world_size: int) -> None:
    model(batch(seed, rank, world_size)).pow(2).mean().backward()


GIVEN_UP = ["the optimizer", "the model", "part by part", "after an exception", "an optimizer made later"]


@pytest.mark.parametrize(
    ("gradients", "how"),
    all_but(
        [*(("whole", how) for how in GIVEN_UP), ("sharded", "part by part")],
        itertools.product(["whole", "sharded", "shards kept"], GIVEN_UP),
        unpack=True,
    ),
)
@as_on_one_device()
def test_what_was_given_up_is_in_no_later_step(rank: int, world_size: int, gradients: str, how: str) -> Any:
    """Two microbatches, given up; then a whole step, and another. Shards are kept where sums are exact."""
    words = {"exact": True} if gradients == "shards kept" else {}
    word = "whole" if gradients == "whole" else "sharded"
    model, optimizer = build(world_size, given=how != "an optimizer made later", accumulate_gradients=word, **words)
    for number in range(3):
        if number % 2 == 0:
            with contextlib.suppress(Planted), accumulate(model, last=False):
                backward(model, 10, rank, world_size)
                if how == "after an exception":
                    raise Planted
            with accumulate(model, last=False):
                backward(model, 11, rank, world_size)
            if how == "part by part":
                for part in model.children():
                    part.zero_grad()
                model.zero_grad()
            elif how == "the model":
                model.zero_grad()
            else:
                optimizer.zero_grad()
        for part in (False, True):
            with accumulate(model, last=part):
                backward(model, number * 2 + part, rank, world_size)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    return dict(model.named_parameters())


@pytest.mark.parametrize("gradients", ["whole", "sharded"])
@as_on_one_device()
def test_a_step_without_a_last_microbatch_is_an_error_and_can_go_on(rank: int, world_size: int, gradients: str) -> Any:
    model, optimizer = build(world_size, accumulate_gradients=gradients)
    for _ in range(2):
        with accumulate(model, last=False):
            backward(model, 0, rank, world_size)
        if world_size > 1:
            with pytest.raises(RuntimeError, match=naming("SGD", "last=True", "zero_grad()")):
                optimizer.step()
        with accumulate(model, last=True):
            backward(model, 1, rank, world_size)
        take_step(optimizer)
    return dict(model.named_parameters())


@as_on_one_device()
def test_the_last_microbatch_may_run_in_the_closure_of_a_step(rank: int, world_size: int) -> Any:
    model, optimizer = build(world_size)
    for _ in range(2):
        with accumulate(model, last=False):
            backward(model, 0, rank, world_size)
        if world_size > 1:
            with pytest.raises(RuntimeError, match=naming("SGD", "last=True", "zero_grad()")):
                optimizer.step(lambda: None)
        optimizer.step(lambda: backward(model, 1, rank, world_size))
        optimizer.zero_grad()
    return dict(model.named_parameters())


class Phases(nn.Module):
    """A complex and a real scale, which every rank holds whole, beside a layer that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.phase = nn.Parameter(torch.tensor(0.5 + 0.25j))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale * self.phase - 0.1j).abs()


@as_on_one_device()
def test_complex_gradients_beside_real_ones_keep_both_parts(rank: int, world_size: int) -> Any:
    model, optimizer = prepared(world_size, Phases)
    take_steps(model, optimizer, rank, world_size)
    return dict(model.named_parameters())


def microbatches_in_bfloat16(rank: int, world_size: int, together: Any) -> Any:
    """The gradient of 8 microbatches: accumulated, whole or as shards, or each reduced and then added in float64."""
    torch.manual_seed(0)
    model = Scalar()
    trueshard.shard(model, mixed_precision="bf16")
    total: dict[str, Any] = {}
    for seed in range(8):
        with trueshard.accumulate(model, last=not together or seed == 7, gradients=together or None):
            backward(model, seed, rank, world_size)
        if not together:
            parts = whole({name: p.grad.double() for name, p in model.named_parameters()})
            total = {name: total.get(name, 0) + part for name, part in parts.items()}
            model.zero_grad()
    return total or {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.parametrize("gradients", ["whole", "sharded"])
def test_microbatches_are_summed_in_the_reduce_dtype(gradients: str, ranks2: Ranks) -> None:
    """Summed in bfloat16 they would be off by a thousandth; what float32 rounds is a ten-millionth."""
    found, expected = (ranks2.run(microbatches_in_bfloat16, together)[0] for together in (gradients, ""))
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 2e-6 * value.norm(), name
