"""Contract line 9: gradient clipping is torch's on the unsharded model, with torch's own functions or with ours."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from cases import as_on_one_device
from gathering import whole
from handmade_training import batch, prepared
from messages import naming
from models.handmade import Scalar, ScalarFirst, Stack, TiedBlocks, Tiny
from parity import Pool, Ranks, assert_same
from stepping import shard_over
from trueshard.optim.shards import group_shards

ORDERS = [0.5, 1.0, 2.0, 3.0, math.inf, -math.inf, 0.0, -1.0]
FOREACH = [None, True, False]
Report = dict[str, Any]


def frozen() -> nn.Module:
    """Frozen, replicated, and fewer rows than ranks, so that shards are empty."""
    model = Scalar()
    model.blocks[1].requires_grad_(False)
    model.one = nn.Linear(8, 1)
    model.last.register_forward_hook(lambda module, args, output: output + model.one(args[0]))
    return model


def bfloat16() -> nn.Module:
    return Stack().bfloat16()


def mixed() -> nn.Module:
    """Two dtypes in one list of gradients."""
    model = Stack()
    model.blocks[1].bfloat16()
    model.blocks[1].forward = lambda x, forward=model.blocks[1].forward: forward(x.bfloat16()).float()
    return model


def gradients(model: nn.Module, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """After a backward on this rank's rows."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).to(dtype).chunk(world_size)[rank]
    model(x).float().pow(2).mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def each_way(rank: int, world_size: int, build: Callable[[], nn.Module], duplicates: bool, shape: Any = None) -> Report:
    """Every order and every ``foreach``, from the same gradients; one process uses torch's own function."""
    torch.manual_seed(0)
    model = build()
    if world_size > 1:
        mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        trueshard.shard(model, mesh=mesh)
    grads = gradients(model, rank, world_size)
    values = {n: g.clone() for n, g in grads.items()}
    every = [p for _, p in model.named_parameters(remove_duplicate=not duplicates)]
    clip = trueshard.clip_grad_norm_ if world_size > 1 else torch.nn.utils.clip_grad_norm_
    report: Report = {}
    for order in ORDERS:
        for foreach in FOREACH:
            for limit in (0.1, 1e6):
                for name, grad in grads.items():
                    grad.copy_(values[name])
                total = clip(every, limit, norm_type=order, foreach=foreach)
                report[f"order {order}, foreach {foreach}, limit {limit}"] = whole({"total": total, "grads": grads})
    return report


@pytest.mark.parametrize(
    ("build", "duplicates", "count", "shape"),
    [
        (frozen, False, 2, None),
        (Tiny, False, 2, None),
        (TiedBlocks, True, 2, None),
        pytest.param(frozen, False, 3, None, marks=pytest.mark.rest),
        pytest.param(frozen, False, 4, (2, 2), marks=pytest.mark.rest),
        pytest.param(Tiny, False, 4, None, marks=pytest.mark.rest),
        pytest.param(TiedBlocks, True, 4, (2, 2), marks=pytest.mark.rest),
    ],
)
def test_clipping_is_torchs_on_the_unsharded_model(
    build: Callable[[], nn.Module],
    duplicates: bool,
    count: int,
    shape: tuple[int, ...] | None,
    alone: Ranks,
    pool: Pool,
) -> None:
    (expected,) = alone.run(each_way, build, duplicates)
    for found in Ranks(count, pool).run(each_way, build, duplicates, shape):
        assert_same(found, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("build", [bfloat16, mixed])
def test_clipping_in_low_precision_is_torchs_up_to_its_rounding(
    build: Callable[[], nn.Module], alone: Ranks, ranks2: Ranks
) -> None:
    (expected,) = alone.run(each_way, build, False)
    orders = [key for key in expected if not key.startswith(("order -", "order 0.0"))]
    for found in ranks2.run(each_way, build, False):
        assert_same({k: found[k] for k in orders}, {k: expected[k] for k in orders}, rtol=5e-2, atol=2e-3)


@pytest.mark.rest
@pytest.mark.parametrize("reverse", [False, True])
@as_on_one_device(4, rtol=0.001, atol=1e-07)
def test_a_list_over_several_meshes_has_one_norm(rank: int, world_size: int, reverse: bool) -> Report:
    """One list: a model over all ranks, one over two replicas, and plain parameters, in turn."""
    torch.manual_seed(0)
    models = {"flat": Scalar(), "pairs": Stack()}
    plain = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(()))]
    if world_size > 1:
        trueshard.shard(models["flat"])
        pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        trueshard.shard(models["pairs"], mesh=pairs)
    for model in models.values():
        gradients(model, rank, world_size)
    for parameter in plain:
        parameter.grad = parameter.detach().clone()
    lists = [list(model.parameters()) for model in models.values()]
    every = [p for pair in zip(*lists, strict=False) for p in pair] + plain
    every = every[::-1] if reverse else every
    report: Report = {}
    for order in ORDERS:
        clip = trueshard.clip_grad_norm_ if world_size > 1 else torch.nn.utils.clip_grad_norm_
        report[f"order {order}"] = whole([clip(every, 0.5, norm_type=order), *(p.grad for p in every)])
    every[2].grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="number 2"):
        trueshard.clip_grad_norm_(every, 0.5, error_if_nonfinite=True)
    return report


@as_on_one_device()
def test_what_is_not_finite_on_one_rank_is_an_error_on_every_rank(rank: int, world_size: int) -> list[Any]:
    """inf and NaN on the last shard of one gradient: an error, or torch's values, as is asked."""
    seen = []
    for bad in (torch.inf, torch.nan):
        for order in (1.0, 2.0, math.inf):
            torch.manual_seed(0)
            model = Stack()
            shard_over(world_size, model)
            gradients(model, rank, world_size)
            grad = model.last.weight.grad
            if world_size == 1:
                grad[-1, -1] = bad
            elif rank == world_size - 1:
                grad.to_local()[-1, -1] = bad
            before = whole([p.grad for p in model.parameters()])
            place = [p is model.last.weight for p in model.parameters()].index(True)
            words = naming(f"number {place}", "(8, 8)", "skip")
            with pytest.raises(RuntimeError, match=words if order < math.inf else "is nan|is inf"):
                trueshard.clip_grad_norm_(model.parameters(), 0.1, order, error_if_nonfinite=True)
            assert_same(whole([p.grad for p in model.parameters()]), before)
            clip = trueshard.clip_grad_norm_ if world_size > 1 else torch.nn.utils.clip_grad_norm_
            seen.append(whole([clip(model.parameters(), 0.1, order), *(p.grad for p in model.parameters())]))
    return seen


@as_on_one_device(2, atol=1e-07)
def test_parameters_come_as_a_list_a_generator_or_one_tensor(rank: int, world_size: int) -> Report:
    torch.manual_seed(0)
    model = Stack()
    shard_over(world_size, model)
    gradients(model, rank, world_size)
    clip = trueshard.clip_grad_norm_ if world_size > 1 else torch.nn.utils.clip_grad_norm_
    report: Report = {
        "generator": clip((p for p in model.parameters()), 1e6),
        "one": clip(model.last.weight, 0.1),
        "none": clip([], 1.0),
        "without gradients": clip([nn.Parameter(torch.ones(3))], 1.0),
        "limit as a tensor": clip(model.parameters(), torch.tensor(0.05)),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report["empty generator"] = clip((p for p in ()), 1.0)
    assert "no gradient" in str(caught[0].message)
    return report | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("foreach", FOREACH)
@as_on_one_device()
def test_torchs_own_functions_take_every_parameter(rank: int, world_size: int, foreach: bool | None) -> Report:
    model, optimizer = prepared(world_size, ScalarFirst, "AdamW", {"lr": 0.01, "eps": 1e-3, "foreach": foreach})
    norms = []
    for seed in range(3):
        model(batch(seed, rank, world_size)).pow(2).mean().backward()
        if seed == 2:
            total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], 3.0, foreach=foreach)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total, foreach=foreach)
        else:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        norms.append(whole(total))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.005, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad(set_to_none=seed == 0)
    state = {n: dict(optimizer.state[p]) for n, p in model.named_parameters()}
    return {"norm": norms, "state": state} | dict(model.named_parameters())


def slices(memory: torch.Tensor) -> list[tuple[list[torch.Tensor], int]]:
    """(tensors, how many runs they are)."""
    first, second, third = memory[:4].view(2, 2), memory[4:10], memory[10:]
    return [
        ([first, second, third], 1),
        ([first, third], 2),
        ([second, first], 2),
        ([first, second, second], 2),
        ([first, memory[4:4], second], 1),
        ([memory[:9].view(3, 3).T, memory[9:]], 2),
        ([first, torch.zeros(5), second], 3),
        ([torch.zeros(2), torch.zeros(2)], 2),
        ([memory[:4], memory[4:8].clone(), memory[8:]], 3),
        ([memory[:0]], 0),
    ]


def test_neighbours_in_memory_are_one_run() -> None:
    for number, (_, count) in enumerate(slices(torch.zeros(12))):
        shards, _ = slices(torch.arange(12.0))[number]
        expected = [shard.clone() * 2 ** sum(shard is other for other in shards) for shard in shards]
        (group,) = group_shards(shards)
        assert len(group.pieces) == count
        for piece in group.pieces:
            piece.mul_(2.0)
        assert all(map(torch.equal, shards, expected))
