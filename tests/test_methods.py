"""Contract: methods beside ``forward`` compute as on one process, and what they write is in the shards."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueshard
from cases import as_on_one_device, on_ranks
from gathering import parameters
from handmade_training import batch, prepared
from messages import lacking
from models.handmade import Stack
from parity import Ranks
from resting import all_but
from stepping import same, take_step
from trueshard.sharding.engine import sharded
from trueshard.sharding.methods import methods_that_compute


class Model(Stack):
    """Its methods use words that also belong to methods which write parameters."""

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu_() + 1
        for block in self.blocks:
            hidden = block(hidden).clamp_(-3, 3)
        return self.last(hidden)

    def data_of(self, batch: Any) -> torch.Tensor:
        data = batch["data"]
        return F.linear(self.first(data.data), self.last.weight)

    def by_name(self, x: torch.Tensor) -> torch.Tensor:
        setattr(x, "seen", True)  # noqa: B010
        weight = self.first.weight
        out = torch.zeros(len(x), len(weight))
        out[:] = x @ weight.T
        out += 1
        return out

    def reset(self) -> None:
        nn.init.constant_(self.last.weight, 0.5)

    def halve(self) -> None:
        for p in self.last.parameters():
            p.data.mul_(0.5)

    def shift(self) -> None:
        weight = self.last.weight
        with torch.no_grad():
            weight += 0.25

    def follow(self, momentum: float) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.last.parameters(), self.first.parameters(), strict=True):
                mine.mul_(momentum).add_(theirs, alpha=1 - momentum)

    def replace(self) -> None:
        self.last.weight.data = self.last.weight.data * 2


COMPUTE = ["by_name", "data_of", "in_place"]


def test_what_writes_is_told_from_what_computes() -> None:
    assert methods_that_compute(Model()) == COMPUTE


class Typed(nn.Module):
    """Its methods have no source."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


@pytest.mark.parametrize(("body", "computes"), [("self.layer(x)", True), ("self.layer.weight.data.zero_()", False)])
def test_without_its_source_in_place_operations_count(body: str, computes: bool) -> None:
    scope: dict[str, Any] = {}
    exec(f"def method(self, x=None):\n    return {body}", scope)
    cls = type("Shell", (Typed,), {"method": scope["method"]})
    assert methods_that_compute(cls()) == ["method"] * computes


@as_on_one_device()
def test_methods_are_those_of_one_process(rank: int, world_size: int) -> dict[str, Any]:
    model, optimizer = prepared(world_size, Model, reshard_after_forward="always")
    report: dict[str, Any] = {}
    for seed in range(2):
        x = batch(seed, rank, world_size)
        for name in COMPUTE:
            out = getattr(model, name)({"data": x} if name == "data_of" else x)
            out.pow(2).mean().backward()
        take_step(optimizer)
        report[f"trained {seed}"] = parameters(model)
    for name, arguments in (("reset", ()), ("halve", ()), ("shift", ()), ("follow", (0.9,))):
        getattr(model, name)(*arguments)
        report[name] = parameters(model)
    return report


class Stray(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.first.weight.mean() if self.training else super().forward(x)


@on_ranks(2)
def test_a_parameter_read_outside_its_forward_changes_the_plan_and_is_said_once(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Stray()
    trueshard.shard(model, units="Linear", reshard_after_forward="always")
    policies, words = [], []
    for training in (False, True, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.train(training)(torch.ones(2, 8)).sum().backward()
        words.append([str(each.message) for each in caught if "unit 'first' is read outside" in str(each.message)])
        policies.append(sharded(model).plan.unit("first").reshard_after_forward)
    assert policies == [True, False, False]
    assert [len(each) for each in words] == [0, 1, 0]
    assert lacking(words[1][0], "'first'", "reshard_after_forward") == []


class Reaching(Stack):
    """Reads a weight of one block before that block runs, and calls a layer of another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads == "blocks.0.norm":
            return super().forward(self.blocks[0].norm(x))
        return super().forward(x + F.linear(x, self.blocks[1].up.weight)[:, :8])


def reaching(rank: int, world_size: int, reads: str, options: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = prepared(world_size, Reaching, units=[..., reads], **options)
    model.reads = reads
    for seed in range(2):
        for micro in range(2):
            (model(batch(2 * seed + micro, rank, world_size)).square().mean() / 2).backward()
        take_step(optimizer)
    return parameters(model)


@pytest.mark.parametrize("reads", all_but(["blocks.1.up"], ["blocks.0.norm", "blocks.1.up"]))
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "full", "reshard_after_forward": "always"}])
def test_what_is_read_from_another_block_is_a_unit_too(
    reads: str, options: dict[str, Any], alone: Ranks, ranks3: Ranks
) -> None:
    same(reaching, alone, [ranks3], reads, options)


@pytest.mark.parametrize("reads", ["blocks.0.norm", "blocks.1.up"])
@on_ranks(2)
def test_what_is_read_from_another_block_is_named_with_units_that_work(rank: int, world_size: int, reads: str) -> None:
    model, _ = prepared(world_size, Reaching)
    model.reads = reads
    with pytest.raises(RuntimeError, match="its unit is not gathered here") as caught:
        model(batch(0, rank, world_size))
    pasted = re.search(r"units=(\[.*?\])", str(caught.value))
    assert pasted is not None
    names = [unit.name for unit in sharded(model).plan.units]
    model, _ = prepared(world_size, Reaching, units=eval(pasted[1]))
    model.reads = reads
    out = model(batch(0, rank, world_size))
    plan = sharded(model).plan
    assert {unit.name for unit in plan.units} == {*names, reads}
    again, _ = prepared(world_size, Reaching, plan=trueshard.Plan.from_json(plan.to_json()))
    again.reads = reads
    assert torch.equal(again(batch(0, rank, world_size)), out)
    assert sharded(again).plan == plan
