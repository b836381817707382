"""Contract line 9: with ``torch.amp.GradScaler``, an ``inf`` on one rank makes every rank skip the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import trueshard
from cases import on_ranks
from gathering import whole
from models.handmade import ScalarFirst
from parity import Pool, Ranks, assert_same
from resting import all_but

SCALE = 1024.0
STEPS = 5
BAD = (1, 3)
"""steps in which a gradient is not finite"""


def on_one_shard(model: nn.Module, rank: int, world_size: int) -> None:
    """The last row of a matrix: the last rank that has a row finds it, and no other."""
    grad = model.last.weight.grad
    assert grad is not None
    if not isinstance(grad, DTensor):
        grad[-1] = torch.inf
    elif rank == world_size - 1:
        grad.to_local()[-1] = torch.inf


def on_a_replicated_parameter(model: nn.Module, rank: int, world_size: int) -> None:
    """A 0-dim parameter: every rank finds it."""
    grad = model.blocks[1].gate.grad
    assert grad is not None
    (grad.to_local() if isinstance(grad, DTensor) else grad).fill_(torch.nan)


def in_a_batch(model: nn.Module, rank: int, world_size: int) -> None:
    """Nothing here: the batch of the last rank had it."""


Where = Callable[[nn.Module, int, int], None]
PLACES: list[Where] = [on_one_shard, on_a_replicated_parameter, in_a_batch]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"foreach": False}),
    ("SGD", {"momentum": 0.9}),
]


def scaled(
    rank: int, world_size: int, place: Where, kind: str, options: dict[str, Any], clip: bool, given: bool = True
) -> dict[str, Any]:
    """Five steps, of which two are skipped: the scale after each, and everything at the end."""
    torch.manual_seed(0)
    model = ScalarFirst()
    model.blocks[0].requires_grad_(False)
    more = {"eps": 1e-3} if kind == "AdamW" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options, **more)
    if world_size > 1:
        trueshard.shard(model, *([optimizer] if given else []))
        if not given:
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    report: dict[str, Any] = {"scale": [], "norm": []}
    for step in range(STEPS):
        rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        if step in BAD and place is in_a_batch:
            rows[-1, -1] = torch.inf
        scaler.scale(model(rows.chunk(world_size)[rank]).pow(2).mean()).backward()
        if step in BAD:
            place(model, rank, world_size)
        if clip:
            scaler.unscale_(optimizer)
            report["norm"].append(trueshard.clip_grad_norm_(model.parameters(), 0.1))
        before = whole(dict(model.named_parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step in BAD:
            assert_same(whole(dict(model.named_parameters())), before)
        report["scale"].append(scaler.get_scale())
    report["state"] = {
        n: {k: v for k, v in optimizer.state[p].items() if v is not None}
        for n, p in model.named_parameters()
        if p in optimizer.state
    }
    report["parameters"] = dict(model.named_parameters())
    return report


CASES = list(itertools.product(OPTIMIZERS, PLACES, (False, True)))
SOME = [(*case, 2) for case in CASES[::11]]
"""Eleven and the six of an optimizer have no common factor."""
MORE = [(*case, 3) for number, case in enumerate(CASES) if (number // 6 + number // 2 % 3) % 2 == number % 2]
"""Each optimizer at each place, clipped at every other."""


@pytest.mark.parametrize(("optimizer", "place", "clip", "count"), all_but(SOME, SOME + MORE, unpack=True))
def test_an_inf_on_one_rank_makes_every_rank_skip(
    optimizer: tuple[str, dict[str, Any]], place: Where, clip: bool, count: int, alone: Ranks, pool: Pool
) -> None:
    kind, options = optimizer
    (expected,) = alone.run(scaled, place, kind, options, clip)
    # Halved in the bad steps; doubled after two good ones in a row, which never come.
    assert expected["scale"] == [SCALE, SCALE / 2, SCALE / 2, SCALE / 4, SCALE / 4]
    for found in Ranks(count, pool).run(scaled, place, kind, options, clip):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)


def test_an_optimizer_made_after_sharding_skips_too(alone: Ranks, ranks2: Ranks) -> None:
    (expected,) = alone.run(scaled, on_one_shard, "AdamW", {"fused": True}, False)
    for found in ranks2.run(scaled, on_one_shard, "AdamW", {"fused": True}, False, False):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_a_list_over_several_meshes_finds_every_inf(rank: int, world_size: int) -> None:
    """One list over two meshes, with plain and replicated gradients in any order; the inf on each rank in turn."""
    flat = init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models = [nn.Linear(4, 4) for _ in range(2)]  # whose gradients these are
    for model, mesh in zip(models, (flat, pairs), strict=True):
        trueshard.shard(model, mesh=mesh)

    def gradients() -> list[torch.Tensor]:
        return [
            DTensor.from_local(torch.ones(()), flat, [Replicate()], run_check=False),
            torch.ones(3),
            DTensor.from_local(torch.ones(2, 3), pairs, [Replicate(), Shard(0)], run_check=False),
            DTensor.from_local(torch.ones(2), flat, [Shard(0)], run_check=False),
        ]

    for reverse in (False, True):
        for bad in range(world_size):
            for which in (2, 3):
                grads = gradients()
                if rank == bad or (which == 2 and rank % 2 == bad % 2):  # replicas are alike
                    grads[which].to_local()[0] = torch.inf
                found = torch.zeros(1)
                torch._amp_foreach_non_finite_check_and_unscale_(
                    grads[::-1] if reverse else grads, found, torch.tensor(0.5)
                )
                assert found.item() == 1.0
                assert [g.flatten()[-1].item() for g in whole(grads)] == [0.5] * 4
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients(), found, torch.tensor(0.5))
    assert found.item() == 0.0
