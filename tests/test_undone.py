"""Contract line 11: if ``shard()`` fails, model and optimizers are as they were, on every rank; it can be repeated."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import trueshard
from models.handmade import Methods, Scalar
from parity import Ranks
from photograph import photograph
from resting import all_but

#: Every step of shard(), by the function whose call is made to fail → its module.
STAGES = {
    "hide_wrappers": "trueshard.model.names",
    "capture": "trueshard.model.intent",
    "refuse": "trueshard.sharding.engine",
    "resolve": "trueshard.sharding.engine",
    "agree_on_structure": "trueshard.model.agreement",
    "take_from_first_rank": "trueshard.model.agreement",
    "add": "trueshard.model.registry",
    "_prepare_tensors": "trueshard.sharding.apply",
    "_prepare_modules": "trueshard.sharding.apply",
    "_shard_unit": "trueshard.sharding.apply",
    "attributes_of": "trueshard.sharding.apply",
    "after_gathering": "trueshard.sharding.methods",
    "initialise": "trueshard._torch",
    "follow_assignments": "trueshard.sharding.apply",
    "allow_deepcopy": "trueshard.sharding.apply",
    "rebind": "trueshard.sharding.engine",
    "difference": "trueshard.model.intent",
    "_warn": "trueshard.sharding.engine",
    "bind": "trueshard.sharding.engine",
}
EARLY_AND_LATE = ["capture", "_shard_unit", "bind"]


class Planted(RuntimeError):
    """The failure under test."""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Scalar()
    model.extra = Methods()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.last.weight = nn.Parameter(model.last.weight.detach().T.contiguous().T)
    model.last.weight.tag = "mine"
    model.last.weight.register_hook(lambda grad: grad * 2)
    model.scale.register_hook(lambda grad: grad * 3)
    model.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def fail(rank: int, world_size: int, attribute: str, where: int, call: int) -> None:
    """``call``: at which call of the function it fails; ``where``: on which rank (-1: on all)."""
    model, optimizer = build()
    before = photograph(model, optimizer)
    owner = importlib.import_module(STAGES[attribute])
    real = getattr(owner, attribute)
    calls = 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(*args, **kwargs)
        if calls == call and where in (-1, rank):
            raise Planted(attribute)
        return result

    with mock.patch.object(owner, attribute, planted), pytest.raises(RuntimeError, match=attribute) as caught:
        trueshard.shard(model, optimizer, activation_checkpointing={"blocks.1": "full"})
    assert isinstance(caught.value, Planted) == (where in (-1, rank))
    after = photograph(model, optimizer)
    assert list(after) == list(before)
    for key in before:
        assert after[key] == before[key], key
    optimizer.step()  # not taken for one that was left behind
    trueshard.shard(model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("stage", "call"),
    all_but([("bind", 1)], [*((stage, 1) for stage in STAGES), ("_shard_unit", 2), ("_shard_unit", 4)], unpack=True),
)
def test_a_failure_at_any_stage_leaves_no_trace(stage: str, call: int, ranks2: Ranks) -> None:
    """In the midst of the units, too."""
    ranks2.run(fail, stage, -1, call)


@pytest.mark.parametrize(
    "stage", all_but(["_shard_unit"], ["capture", "refuse", "resolve", "_shard_unit", "initialise", "rebind", "bind"])
)
def test_a_failure_on_one_rank_undoes_all(stage: str, ranks3: Ranks) -> None:
    ranks3.run(fail, stage, 1, 1)
