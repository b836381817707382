"""Contract line 9, what an optimizer holds: its groups and state, as the user reads, writes, copies and carries them.

Each case runs on one process without sharding and on 2 ranks whose shards are uneven; on 3 too where cuts may matter.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import trueshard
from cases import as_on_one_device, on_ranks
from handmade_training import take_steps
from models.handmade import TiedBlocks
from stepping import (
    EPS,
    OPTIMIZERS,
    WHOLE,
    OwnSGD,
    Uneven,
    adamw,
    build,
    loss_of,
    parameters,
    shard_over,
    shown,
    told,
    train,
)

# State


@on_ranks(2, 3)
def test_state_is_shown_as_dtensors_by_parameter(rank: int, world_size: int) -> None:
    model = build()
    optimizer, own = adamw(model), OwnSGD(model.parameters())
    trueshard.shard(model, optimizer, own)
    train(model, [optimizer, own], rank, world_size)
    members = list(model.parameters())
    assert {id(p) for p in optimizer.state} == {id(p) for p in members}
    for p in members:
        for name, value in [*optimizer.state[p].items(), *own.state[p].items()]:
            if name == "step" or p.ndim == 0:
                assert name != "step" or not isinstance(value, DTensor)
                assert value.shape == ()
            else:
                assert isinstance(value, DTensor), name
                assert (value.shape, value.placements, value.device_mesh) == (p.shape, p.placements, p.device_mesh)
                assert value.to_local().shape == p.to_local().shape
    entries = optimizer.state_dict()["state"]
    assert list(entries) == list(range(len(members)))
    assert entries[0]["exp_avg"] is optimizer.state[members[0]]["exp_avg"]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("one process", 2),
        *(pytest.param(source, 2, marks=pytest.mark.rest) for source in ("after a step", "itself")),
        *(pytest.param(source, 3, marks=pytest.mark.rest) for source in ("itself", "one process")),
    ],
)
@as_on_one_device("count")
def test_state_dict_round_trip(rank: int, world_size: int, source: str) -> Any:
    """Others go on from state dicts: of the same sharding, loaded before or after a step, or of one process."""
    found = {}
    for name, make in {"AdamW": lambda model: [adamw(model)], **WHOLE}.items():
        first = build()
        held = make(first)
        if source == "one process":
            train(first, held, 0, 1)
        else:
            shard_over(world_size, first, *held)
            train(first, held, rank, world_size)
        weights, saved = parameters(first), [each.state_dict() for each in held]
        model = build()
        model.load_state_dict(weights)
        optimizers = make(model)
        shard_over(world_size, model, *optimizers)
        if source == "after a step":
            train(model, optimizers, rank, world_size, [9])
        for each, state in zip(optimizers, saved, strict=True):
            each.load_state_dict(copy.deepcopy(state) if source != "itself" else state)
        train(model, optimizers, rank, world_size, [3, 4, 5])
        if world_size > 1:
            shown(optimizers[0])
        found[name] = told(model, *optimizers) if name == "AdamW" else parameters(model)
    return found


@as_on_one_device()
def test_state_that_is_written_to_between_steps_is_taken_up(rank: int, world_size: int) -> Any:
    model = build()
    optimizer = adamw(model)
    shard_over(world_size, model, optimizer)
    train(model, optimizer, rank, world_size, [0, 2])
    first, second, third, fourth = list(model.parameters())[:4]
    with torch.no_grad():
        optimizer.state[first]["exp_avg"].mul_(3)
    optimizer.state[second]["exp_avg"] = torch.ones_like(second)
    optimizer.state[third]["exp_avg_sq"] = torch.full(third.shape, 2.0)  # plain and whole
    del optimizer.state[fourth]
    optimizer.state[first]["step"] += 5
    train(model, optimizer, rank, world_size, [4])
    return told(model, optimizer)


# Which parameters, and when


@pytest.mark.rest
@as_on_one_device()
def test_groups_come_and_go_after_sharding(rank: int, world_size: int) -> Any:
    """Groups that come after sharding, and one that goes: settings and state stay with their parameters."""
    model = build()
    optimizer = torch.optim.AdamW(model.layers.parameters(), lr=0.01, eps=EPS)
    own = OwnSGD(model.first.parameters())
    shard_over(world_size, model, optimizer, own)
    train(model, [optimizer, own], rank, world_size, [0])
    optimizer.add_param_group({"params": model.aside.parameters(), "lr": 0.1})
    own.add_param_group({"params": model.last.parameters(), "lr": 0.01})
    train(model, [optimizer, own], rank, world_size, [1, 2])
    del optimizer.param_groups[0]
    train(model, [optimizer, own], rank, world_size, [3, 4])
    optimizer.param_groups[0]["params"].reverse()
    optimizer.add_param_group({"params": model.layers[1].parameters()})
    train(model, [optimizer, own], rank, world_size, [5, 6])
    return parameters(model)


def fail() -> None:
    raise ArithmeticError("as told")


@as_on_one_device()
def test_an_optimizer_made_after_sharding_is_as_exact(rank: int, world_size: int) -> dict[str, Any]:
    """Optimizers made from the sharded model and never given to `shard()`."""
    found = {}
    for name in (*OPTIMIZERS, "own, failing"):
        model = build()
        shard_over(world_size, model)
        optimizer = OPTIMIZERS[name.split(",")[0]](model)
        if name == "own, failing":
            loss_of(model, 0, rank, world_size).backward()
            with pytest.raises(ArithmeticError):
                optimizer.step(fail)
            if world_size > 1:
                shown(optimizer)
            optimizer.zero_grad()
        train(model, optimizer, rank, world_size)
        found[name] = parameters(model)
    return found


@as_on_one_device(2)
def test_frozen_parameters_and_thawed_ones(rank: int, world_size: int) -> Any:
    model = build()
    model.layers[0].requires_grad_(False)
    model.last.bias.requires_grad_(False)
    optimizers = [adamw(model), OwnSGD(model.parameters(), lr=0.01)]
    shard_over(world_size, model, *optimizers)
    train(model, optimizers, rank, world_size, [0, 2])
    model.layers[0].requires_grad_(True)
    model.last.bias.requires_grad_(True)
    train(model, optimizers, rank, world_size, [4, 5])
    model.first.requires_grad_(False)
    train(model, optimizers, rank, world_size, [6])
    return told(model, *optimizers)


@as_on_one_device(2)
def test_a_tie_is_stepped_once(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    model = TiedBlocks()
    optimizer = adamw(model)
    shard_over(world_size, model, optimizer)
    take_steps(model, optimizer, rank, world_size)
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    return told(model, optimizer)


# Copies, and state from before and from elsewhere


@pytest.mark.rest
@as_on_one_device(2)
def test_a_copy_of_model_and_optimizer_goes_on(rank: int, world_size: int) -> Any:
    """A copy of model and optimizer trains on, and leaves both originals alone."""
    found = {}
    for name in ("AdamW", "Muon", "own"):
        model = build()
        optimizer = OPTIMIZERS[name](model)
        shard_over(world_size, model, optimizer)
        train(model, optimizer, rank, world_size, [0, 2])
        held = parameters(model)
        again, other = copy.deepcopy((model, optimizer))
        assert other.param_groups[0]["params"][0] is next(iter(again.parameters())) or name == "Muon"
        train(again, other, rank, world_size, [4, 6])
        assert all(torch.equal(held[n], p) for n, p in parameters(model).items())
        train(model, optimizer, rank, world_size, [4, 6])
        found[name] = parameters(again), parameters(model)
    return found


@as_on_one_device(2)
def test_a_pickled_state_dict_loads_where_it_was_made(rank: int, world_size: int) -> Any:
    model = build()
    optimizer = adamw(model)
    shard_over(world_size, model, optimizer)
    train(model, optimizer, rank, world_size, [0, 2])
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    optimizer.state.clear()
    optimizer.load_state_dict(state)
    train(model, optimizer, rank, world_size, [4])
    return told(model, optimizer)


@as_on_one_device(2)
def test_gradients_that_the_user_sets(rank: int, world_size: int) -> Any:
    """The user sets gradients: another tensor, one that was taken over from an earlier step, a sum of two."""
    model = build()
    optimizer = adamw(model)
    shard_over(world_size, model, optimizer)
    kept = {}
    for step in range(4):
        loss_of(model, step, rank, world_size).backward()
        for name, p in model.named_parameters():
            if step == 1:
                p.grad = 2 * p.grad
            elif step == 2:
                p.grad = p.grad + kept[name]
            elif step == 3 and name.startswith("layers"):
                p.grad = None
            kept[name] = p.grad
        optimizer.step()
        assert all(p.grad is kept[n] for n, p in model.named_parameters())
        optimizer.zero_grad()
    return told(model, optimizer)


@pytest.mark.parametrize("name", ["AdamW", "Rprop", "Adafactor", "Muon", "own"])
@as_on_one_device()
def test_momenta_from_before_sharding_go_on(rank: int, world_size: int, name: str) -> Any:
    model = build()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 0, 1, [0, 2])
    shard_over(world_size, model, optimizer)
    train(model, optimizer, rank, world_size, [4, 5, 6])
    return parameters(model)


@as_on_one_device(2)
def test_a_model_from_the_meta_device(rank: int, world_size: int) -> Any:
    """Optimizers made before a model of the meta device is sharded and filled."""
    source = build()
    found = {}
    for name in ("AdamW", "Muon", "own"):
        model = build()
        if world_size > 1:
            with torch.device("meta"):
                model = Uneven()
        optimizer = OPTIMIZERS[name](model)
        if world_size > 1:
            trueshard.shard(model, optimizer)
            assert all(p.is_meta for p in model.parameters())
            model.to_empty(device="cpu")
            model.load_state_dict(source.state_dict())
        train(model, optimizer, rank, world_size)
        found[name] = parameters(model)
    return found
