"""Contract: a number read from a sharded tensor is that of the whole, on every rank; values are drawn for the whole."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from messages import naming
from models.handmade import Scalar
from parity import Ranks
from stepping import same
from trueshard import _torch


def build(world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model = Scalar()
    if world_size > 1:
        trueshard.shard(model)
    return model


def numbers(rank: int, world_size: int) -> Any:
    model = build(world_size)
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).chunk(world_size)[rank]
    model(rows).pow(2).mean().backward()
    weight: Any = model.blocks[0].up.weight
    grad = weight.grad
    found = {
        "norm": weight.norm().item(),
        "norm 1": float(weight.norm(1)),
        "norm inf": weight.norm(float("inf")).item(),
        "max": weight.max().item(),
        "min": weight.min().item(),
        "mean": weight.mean().item(),
        "count": int((weight > 0).sum()),
        "any": bool((weight > 0.35).any()),
        "all": bool((weight < 0.35).all()),
        "finite": bool(torch.isfinite(grad).all()),
        "f-string": f"{grad.norm():.4f}",
        "scalar": f"{model.scale.detach():.4f}",
        "larger": bool(weight.norm() > 3),
    }
    if rank == 0:
        _torch.local(grad)[0, 0] = float("inf")
    found["not finite"] = bool(torch.isfinite(grad).all())
    if rank == 0:
        _torch.local(grad)[0, 0] = 1.0
    total = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.ndim], 0.5)
    found["total"] = f"{total:.4f}"
    return found


def test_numbers_are_those_of_the_whole(alone: Ranks, sizes: list[Ranks]) -> None:
    (expected,) = alone.run(numbers)
    for ranks in sizes:
        for found in ranks.run(numbers):
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert found[key] == (pytest.approx(value, rel=1e-5) if type(value) is float else value), key


def drawn(rank: int, world_size: int) -> Any:
    model = build(world_size)
    weight: Any = model.blocks[0].up.weight
    torch.manual_seed(3)
    found = {}
    for name, draw in {
        "normal": nn.init.normal_,
        "xavier": nn.init.xavier_uniform_,
        "kaiming": nn.init.kaiming_uniform_,
        "truncated": nn.init.trunc_normal_,
        "bernoulli": lambda p: p.data.bernoulli_(0.5),
        "exponential": lambda p: p.data.exponential_(),
    }.items():
        draw(weight)
        found[name] = copy.deepcopy(weight.detach())
    with torch.no_grad():
        weight.add_(torch.randn_like(weight), alpha=0.1)
        found["noise"] = weight.detach().clone()
        found["rand_like"] = torch.rand_like(weight)
    model.blocks[1].up.reset_parameters()
    found["state"] = torch.get_rng_state()
    return found, dict(model.named_parameters())


def test_values_are_drawn_as_on_one_device(alone: Ranks, sizes: list[Ranks]) -> None:
    same(drawn, alone, sizes)


def apart(rank: int, world_size: int) -> Any:
    weight: Any = build(world_size).blocks[0].up.weight
    if rank == 0:
        with pytest.raises(RuntimeError, match=naming("test_access.py", "full_tensor()")):
            weight.norm().item()
    else:
        with pytest.raises(RuntimeError, match=naming("test_access.py", "full_tensor()")):
            weight.norm(1).item()
    return weight.norm().item()


def test_ranks_that_read_different_numbers_are_told(ranks2: Ranks) -> None:
    one, two = ranks2.run(apart)
    assert one == two


def lonely(rank: int, world_size: int) -> Any:
    norm = build(world_size).blocks[0].up.weight.norm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "timeout_of", lambda _: datetime.timedelta(seconds=1))
        if rank == 0:
            with pytest.raises(RuntimeError, match=naming("ranks [1]", "full_tensor()", "rank == 0")):
                norm.item()


def test_a_number_that_one_rank_reads_is_an_error_within_the_time_limit(ranks2: Ranks) -> None:
    ranks2.run(lonely)


def assigned(rank: int, world_size: int) -> Any:
    model, optimizer = build(world_size), None
    weight: Any = model.blocks[0].up.weight
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).chunk(world_size)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(rows).pow(2).mean().backward()
        if step == 0:
            weight.grad.data = weight.grad.data * 3
            model.scale.grad.data = torch.tensor(0.25)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            weight.data = torch.arange(weight.numel()).view(weight.shape) / 100
            model.last.weight.data = model.last.weight.data.clone() * 0.5
            model.scale.data = torch.tensor(0.75)
    if world_size > 1:
        with pytest.raises(RuntimeError, match=naming("p.data", "(3, 8)", "(16, 8)")):
            weight.data = torch.ones(3, 8)
        with pytest.raises(RuntimeError, match=naming("p.data", "bfloat16", "before shard()")):
            weight.data = weight.data.bfloat16()
    return dict(model.named_parameters())


def test_data_that_is_assigned_is_taken_or_refused(alone: Ranks, sizes: list[Ranks]) -> None:
    same(assigned, alone, sizes)
