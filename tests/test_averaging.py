"""Contract line 9: averaged copies of a sharded model (EMA, SWA) equal the unsharded copy, and cost a shard a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

import trueshard
from cases import as_on_one_device, on_ranks
from gathering import whole
from handmade_training import batch, prepared, take_steps
from models.handmade import WIDTH, Block, Scalar
from parity import Ranks
from stepping import shard_over

Report = dict[str, Any]


class Everything(Scalar):
    """Uneven shards, 0-dim, frozen and tied parameters, and buffers: one changes, one is not saved, one is a count."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 1)
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].down.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean += 0.1 * self.calls
        return super().forward((x - 0.01 * self.mean) * self.mask) + self.one(x)


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "ema, by list": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
    "ema, by parameter": lambda: {"avg_fn": get_ema_avg_fn(0.8)},
    "swa, by list": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    "default, with buffers": lambda: {"use_buffers": True},
    "buffers by parameter": lambda: {"avg_fn": get_ema_avg_fn(0.8), "use_buffers": True},
    "ema of a model of floats, with buffers": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.8), "use_buffers": True},
}


IN_SHORT = ("default", "ema, by list", "buffers by parameter")
LATE = ("default", "swa, by list", "ema of a model of floats, with buffers")
"""What a copy has when it is made is the same for those by parameter."""
ON_THREE = (("ema, by parameter", True), ("default, with buffers", False))


@pytest.mark.parametrize(
    ("way", "early", "count"),
    [
        *(pytest.param(way, True, 2, marks=() if way in IN_SHORT else pytest.mark.rest) for way in WAYS),
        *(pytest.param(way, False, 2, marks=pytest.mark.rest) for way in LATE),
        *(pytest.param(way, early, 3, marks=pytest.mark.rest) for way, early in ON_THREE),
    ],
)
@as_on_one_device("count", atol=1e-5)
def test_an_averaged_copy_is_that_of_the_unsharded_model(rank: int, world_size: int, way: str, early: bool) -> Report:
    """Made before the first step, or after it: four steps, an update of the copy after each, what the copy computes."""
    torch.manual_seed(0)
    model = Everything()
    if way == "ema of a model of floats, with buffers":
        model.calls = model.calls.float()  # torch's EMA of a list takes no integers
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    shard_over(world_size, model, optimizer)
    copy = AveragedModel(model, **WAYS[way]()) if early else None
    report: Report = {}
    for seed in range(4):
        take_steps(model, optimizer, rank, world_size, [seed])
        if copy is None:
            copy = AveragedModel(model, **WAYS[way]())
        copy.update_parameters(model)
    assert copy is not None
    report["model"] = whole(dict(model.state_dict()))
    report["copy"] = whole(dict(copy.state_dict()))
    report["names"] = [n for n, _ in copy.module.named_parameters(remove_duplicate=False)]
    report["trainable"] = [p.requires_grad for p in copy.module.parameters()]
    copy.eval()
    with torch.no_grad():
        report["output"] = copy(batch(9, 0, 1))
    model.eval()
    report["model's output"] = model(batch(9, 0, 1)).detach()
    return report


@pytest.mark.rest
@pytest.mark.parametrize("too", [False, True])
@pytest.mark.parametrize("way", WAYS)
@as_on_one_device(2, atol=1e-5)
def test_a_copy_made_before_sharding_is_averaged_as_on_one_process(
    rank: int, world_size: int, way: str, too: bool
) -> Report:
    """It is whole on every rank, or sharded as well; two steps, an update of the copy after each."""
    torch.manual_seed(0)
    model = Everything()
    if way == "ema of a model of floats, with buffers":
        model.calls = model.calls.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    copy = AveragedModel(model, **WAYS[way]())
    shard_over(world_size, model, optimizer)
    if too:
        shard_over(world_size, copy)
    for seed in range(3):
        take_steps(model, optimizer, rank, world_size, [seed])
        copy.update_parameters(model)
    assert any(isinstance(p, DTensor) for p in copy.parameters()) is (too and world_size > 1)
    report = {"copy": whole(dict(copy.state_dict())), "model": whole(dict(model.state_dict()))}
    copy.eval()
    with torch.no_grad():
        report["output"] = copy(batch(9, 0, 1))
    model.load_state_dict(copy.module.state_dict())
    return report | {"loaded": whole(dict(model.named_parameters()))}


@pytest.mark.parametrize("before", [False, pytest.param(True, marks=pytest.mark.rest)])
@on_ranks(2)
def test_an_average_is_gathered_or_its_model_is_named(rank: int, world_size: int, before: bool) -> None:
    model, optimizer = prepared(1, Everything)
    copy = AveragedModel(model) if before else None
    trueshard.shard(model, optimizer)
    if copy is None:
        copy = AveragedModel(model)
    else:
        trueshard.shard(copy)
    take_steps(model, optimizer, rank, world_size, [0])
    copy.update_parameters(model)
    here, other, named = (copy, copy.module, "AveragedModel") if before else (copy.module, copy, "'module'")
    with trueshard.gathered(here) as full, torch.no_grad():
        assert not any(isinstance(p, DTensor) for p in full.parameters())
        torch.testing.assert_close(full(batch(9, 0, 1)), copy.eval()(batch(9, 0, 1)))
    with pytest.raises(ValueError, match=f"not sharded, .*{named}.* is: give that"), trueshard.gathered(other):
        pass


def held(model: nn.Module) -> int:
    """Elements of the parameters in this rank's memory, a tied one once."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def memory(rank: int, world_size: int) -> tuple[int, int, int]:
    model = Everything()
    every = sum(p.numel() for p in model.parameters())
    trueshard.shard(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    copy = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    copy.update_parameters(model)
    copy.update_parameters(model)
    storages = {(p.to_local() if isinstance(p, DTensor) else p).untyped_storage().data_ptr() for p in copy.parameters()}
    shared = {(p.to_local() if isinstance(p, DTensor) else p).untyped_storage().data_ptr() for p in model.parameters()}
    assert not (storages - {0}) & (shared - {0})
    assert held(copy.module) == held(model)
    copy.module(torch.ones(2, WIDTH))
    assert held(copy.module) > held(model) or world_size == 1  # gathered, until it is freed
    with torch.no_grad():
        copy.module(torch.ones(2, WIDTH))
    replicated = sum(p.numel() for p in model.parameters() if p.ndim == 0)
    return held(model), replicated, every


def expected_share(model: nn.Module, rank: int, world_size: int) -> int:
    """Elements by ``torch.chunk``'s rule for dim 0; what has no dimension is whole on every rank."""
    count = 0
    for p in model.parameters():
        pieces = p.chunk(world_size) if p.ndim else [p] * world_size
        count += pieces[rank].numel() if rank < len(pieces) else 0
    return count


def test_a_copy_costs_a_shard_a_rank(sizes: list[Ranks]) -> None:
    model = Everything()
    for ranks in sizes:
        found = ranks.run(memory)
        for rank, (here, _, _) in enumerate(found):
            assert here == expected_share(model, rank, ranks.count)
        replicated, every = found[0][1:]
        assert sum(here for here, _, _ in found) == every + (ranks.count - 1) * replicated
        assert max(here for here, _, _ in found) < 1.25 * every / ranks.count


@as_on_one_device(atol=1e-05)
def test_averaged_values_are_swapped_in_and_out(rank: int, world_size: int) -> Report:
    """Evaluation with the averaged values in the model itself, and back again before training goes on."""
    model, optimizer = prepared(world_size, Everything, settings={"momentum": 0.9})
    copy = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    report: Report = {}
    for seed in range(3):
        take_steps(model, optimizer, rank, world_size, [seed])
        copy.update_parameters(model)
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, average in zip(model.parameters(), copy.module.parameters(), strict=True):
                p.copy_(average)
            model.eval()
            report[f"averaged {seed}"] = model(batch(20, 0, 1))
            copy.eval()
            report[f"by the copy {seed}"] = copy(batch(20, 0, 1))
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)
            report[f"back {seed}"] = model(batch(20, 0, 1))
            model.train()
    model.load_state_dict(copy.module.state_dict())
    report["loaded"] = whole(dict(model.named_parameters()))
    return report


class Normalised(nn.Module):
    """Normalises whole features of the batch by running statistics; every rank sees the whole batch in the test."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.block(x)))


@as_on_one_device(atol=1e-5)
def test_torchs_recipe_for_swa_works(rank: int, world_size: int) -> Report:
    """SWALR, an update an epoch, statistics of the copy at the end."""
    torch.manual_seed(0)
    model = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    shard_over(world_size, model, optimizer)
    copy = AveragedModel(model)
    report: Report = {"rates": []}
    for seed in range(5):
        take_steps(model, optimizer, 0, 1, [seed])
        scheduler.step()
        report["rates"].append(optimizer.param_groups[0]["lr"])
        if seed >= 2:
            copy.update_parameters(model)
    update_bn([batch(seed, 0, 1) for seed in range(3)], copy)
    copy.eval()
    with torch.no_grad():
        report["output"] = copy(batch(9, 0, 1))
    return report | {"copy": whole(dict(copy.state_dict()))}
