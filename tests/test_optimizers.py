"""Contract line 2: each optimizer keeps its object, its parameters, groups, keys and order, and the state it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from cases import as_on_one_device, raises_on_ranks
from gathering import parameters
from handmade_training import batch
from messages import naming
from models.handmade import Scalar, Stack
from parity import Ranks
from stepping import same, shard_over, take_step


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int, world_size: int, seed: int) -> None:
    model(batch(seed, rank, world_size)).pow(2).mean().backward()
    for optimizer in optimizers:
        take_step(optimizer)


def prior(rank: int, world_size: int, kind: str, options: dict[str, Any], build: Callable[[], nn.Module]) -> Any:
    """Two steps on one process, then sharded, then two more: state and parameters."""
    torch.manual_seed(0)
    model = build()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for seed in range(2):
        step(model, [optimizer], 0, 1, seed)
    schedule.step()
    held = optimizer.param_groups[0]
    if world_size > 1:
        trueshard.shard(model, optimizer)
        assert optimizer.param_groups[0] is held
        assert held["params"] == list(model.parameters())
    for seed in range(2, 4):
        step(model, [optimizer], rank, world_size, seed)
        schedule.step()
    name_of = {id(p): n for n, p in model.named_parameters()}
    return {
        "lr": held["lr"],
        "parameters": dict(model.named_parameters()),
        "state": {name_of[id(p)]: dict(entries) for p, entries in optimizer.state.items()},
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("AdamW", {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
        pytest.param("AdamW", {"lr": 0.01, "eps": 1e-3}, marks=pytest.mark.rest),
        pytest.param("Adagrad", {"lr": 0.05, "eps": 1e-3}, marks=pytest.mark.rest),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state_that_was_there_is_sharded_along(
    kind: str, options: dict[str, Any], alone: Ranks, ranks2: Ranks, ranks3: Ranks
) -> None:
    same(prior, alone, [ranks2, ranks3], kind, options, Stack, atol=1e-5)


@pytest.mark.parametrize(("kind", "path"), [("SGD", "foreach"), ("AdamW", "foreach"), ("AdamW", "fused")])
def test_explicit_paths_work_with_replicated_parameters(kind: str, path: str, alone: Ranks, ranks3: Ranks) -> None:
    """A 0-dim parameter is plain beside DTensors, which torch's list operations refuse to mix."""
    options = {"lr": 0.01, path: True} | ({"momentum": 0.9} if kind == "SGD" else {"eps": 1e-3})
    same(prior, alone, [ranks3], kind, options, Scalar, atol=1e-5)


@as_on_one_device(atol=1e-5)
def test_several_optimizers_over_subsets_keep_their_groups(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Stack()
    names = {id(p): n for n, p in model.named_parameters()}
    named = list(model.named_parameters())
    first = torch.optim.AdamW(
        [
            {"params": named[4:8][::-1], "lr": 1e-2, "tag": ["a"], "eps": 1e-3},
            {"params": named[8:10], "initial_lr": 3.0, "eps": 1e-3},
        ],
        lr=torch.tensor(0.001),
    )
    second = torch.optim.SGD(list(model.first.parameters()), lr=0.1)
    groups = [[(list(g), [names[id(p)] for p in g["params"]]) for g in o.param_groups] for o in (first, second)]
    tag, rate = first.param_groups[0]["tag"], first.param_groups[1]["lr"]
    given = first.param_groups[0]["param_names"]
    shard_over(world_size, model, first, second)
    now = {id(p): n for n, p in model.named_parameters()}
    assert groups == [[(list(g), [now[id(p)] for p in g["params"]]) for g in o.param_groups] for o in (first, second)]
    assert first.param_groups[0]["tag"] is tag
    assert first.param_groups[1]["lr"] is rate
    assert first.param_groups[0]["param_names"] is given
    second.add_param_group({"params": list(model.last.parameters()), "lr": 0.05})
    for seed in range(3):
        step(model, [first, second], rank, world_size, seed)
    return parameters(model)


@raises_on_ranks(2, naming("'weight'", "(3, 8)", "not a parameter"))
def test_a_foreign_parameter_is_refused_by_name(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, other = Stack(), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([{"params": [*model.named_parameters(), *other.named_parameters()]}], lr=0.1)
    before = list(model.parameters())
    try:
        trueshard.shard(model, optimizer)
    finally:
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def made_from_the_old_list(rank: int, world_size: int) -> None:
    model = Stack()
    old = list(model.parameters())
    trueshard.shard(model)
    optimizer = torch.optim.SGD(old, lr=0.1)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()


def made_while_gathered(rank: int, world_size: int) -> None:
    model = Stack()
    trueshard.shard(model)
    loss = model(torch.randn(2, 8)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()


def old_group_added_later(rank: int, world_size: int) -> None:
    model = Stack()
    old = list(model.last.parameters())
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    trueshard.shard(model, optimizer)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": old})
    optimizer.step()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (made_from_the_old_list, naming("'first.weight'", "before shard()")),
        (made_while_gathered, naming("'first.weight'", "gathered")),
        (old_group_added_later, naming("'last.weight'", "before shard()")),
    ],
)
def test_an_optimizer_that_would_train_nothing_is_found_at_its_step(
    case: Callable[..., None], message: str, ranks2: Ranks
) -> None:
    ranks2.raises(case, match=message)
