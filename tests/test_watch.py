"""The watch: what several ranks hold in common is compared after steps, and an error names what went apart."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from cases import on_ranks
from messages import naming
from trueshard import _torch
from trueshard.sharding.engine import sharded


class Net(nn.Module):
    """With a parameter of one element, which every rank holds whole, a buffer, and one over the batch if asked for."""

    def __init__(self, keeps_mean: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 8), nn.Linear(8, 6), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("mean", torch.zeros(()))
        self.keeps_mean = keeps_mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keeps_mean:
            self.mean.lerp_(x.detach().mean(), 0.1)
        return (self.down(self.up(x).tanh()) * self.scale + self.table).square().mean()


def made(rank: int, mesh: Any = None, keeps_mean: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(keeps_mean)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trueshard.shard(model, optimizer, mesh=mesh, **options)
    torch.manual_seed(rank)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, spoil: Any = lambda: None) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6)).backward()
    spoil()
    optimizer.step()


def add(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        _torch.local(tensor).add_(value)


@on_ranks(4)
def test_what_goes_apart_is_named_on_every_rank(rank: int, world_size: int) -> None:
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shared = {"ranks": 2, "up": "colwise", "down": "rowwise"}

    def found(*words: str, wrong: int, how: dict[str, Any], spoiled: Any, after: bool = False) -> None:
        model, optimizer = made(rank, **how)
        before = (lambda: add(spoiled(model), 1e-2)) if rank == wrong else lambda: None
        step(model, optimizer)
        with pytest.raises(trueshard.ReplicasDiffer, match=naming("after step 2", *words)):
            step(model, optimizer, before)

    found("parameter 'up.weight'", "replicate", wrong=3, how={"mesh": replicas}, spoiled=lambda m: m.up.weight)
    found("gradient 'up.bias'", "replicate", wrong=0, how={"mesh": replicas}, spoiled=lambda m: m.up.bias.grad)
    found("parameter 'scale'", "shard", "ranks 2)", wrong=2, how={}, spoiled=lambda m: m.scale)
    found("gradient 'scale'", "shard", "ranks 1)", wrong=1, how={}, spoiled=lambda m: m.scale.grad)
    found("parameter 'down.bias'", "tensor", wrong=1, how={"tensor": shared}, spoiled=lambda m: m.down.bias)
    found("buffer 'table'", "tensor", wrong=2, how={"tensor": shared}, spoiled=lambda m: m.table)


@on_ranks(3)
def test_a_buffer_of_each_ranks_batch_is_a_warning_once(rank: int, world_size: int) -> None:
    model, optimizer = made(rank, keeps_mean=True)
    with pytest.warns(UserWarning, match=naming("buffer 'mean'", "part of the batch")):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)
    assert sharded(model).watch.checks == 2


@on_ranks(2)
def test_steps_of_a_check_are_asked_for(rank: int, world_size: int) -> None:
    model, optimizer = made(rank, watch=3)
    for _ in range(7):
        step(model, optimizer)
    assert sharded(model).watch.checks == 4  # after 1, 2, 3 and 6
    model, optimizer = made(rank, watch=0)
    step(model, optimizer, lambda: add(model.scale, rank))
    assert sharded(model).watch is None
    with pytest.raises(ValueError, match="watch must be a number of steps"):
        made(rank, watch=-1)


@on_ranks(2)
def test_roundings_are_a_warning(rank: int, world_size: int) -> None:
    model, optimizer = made(rank)
    with pytest.warns(UserWarning, match=naming("'scale'", "roundings")):
        step(model, optimizer, lambda: add(model.scale, rank * 3e-7))
    dist.barrier()
