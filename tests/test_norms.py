"""The norm monitor's numbers are those of the unsharded model, at every world size."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from cases import on_ranks
from gathering import parameters, whole
from messages import naming
from models.handmade import Scalar, Sometimes, Stack, TiedBlocks, Tiny
from parity import Pool, Ranks, assert_same

Report = dict[str, Any]


def frozen() -> nn.Module:
    model = Scalar()
    model.blocks[1].requires_grad_(False)
    model.blocks[0].gate.requires_grad_(False)
    return model


def two_dtypes() -> nn.Module:
    """bfloat16 blocks between float32 layers, and a norm in float32 in each."""
    model = Stack(depth=2)
    for block in model.blocks:
        block.up.to(torch.bfloat16)
        block.down.to(torch.bfloat16)
        block.forward = lambda x, block=block: x + block.down(block.up(x.bfloat16())).float()
    return model


BUILDS: list[Callable[[], nn.Module]] = [Stack, Tiny, TiedBlocks, Sometimes, frozen]


def measured(rank: int, world_size: int, build: Callable[[], nn.Module], kind: str, shape: Any = None) -> Report:
    """Names and norms of two steps, held against what they are by definition on the whole tensors."""
    torch.manual_seed(0)
    model = build()
    more = {"eps": 1e-3, "weight_decay": 0.1} if kind == "AdamW" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **more)
    if world_size > 1:
        mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        trueshard.shard(model, optimizer, mesh=mesh)
    report: Report = {}
    for seed in range(2):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(seed)).chunk(world_size)[rank]
        model(x).pow(2).mean().backward()
        before = parameters(model)
        grads = whole({n: p.grad for n, p in model.named_parameters()})
        with trueshard.measure_norms(model) as norms:
            optimizer.step()
        after = parameters(model)
        for name in after:
            grad, new = grads[name], after[name].double()
            expected = {
                "gradient": None if grad is None else grad.double().norm().item(),
                "update": (new - before[name].double()).norm().item(),
                "parameter": new.norm().item(),
            }
            assert_same(asdict(norms[name]), expected, rtol=1e-6)
        assert list(norms) == [name for name, _ in model.named_parameters()]
        assert len(norms) == len(before)
        report[f"step {seed}"] = {name: asdict(each) for name, each in norms.items()}
        optimizer.zero_grad()
    return report


MORE_RANKS: list[tuple[Any, str, int, Any]] = [
    *((build, "AdamW", 4, (2, 2)) for build in BUILDS),
    (Tiny, "SGD", 2, None),
    (frozen, "SGD", 4, None),
    (Stack, "SGD", 3, None),
]


@pytest.mark.parametrize(
    ("build", "kind", "count", "shape"),
    [
        *((build, "AdamW", 3, None) for build in BUILDS),
        *(pytest.param(*each, marks=pytest.mark.rest) for each in MORE_RANKS),
    ],
)
def test_norms_do_not_depend_on_the_ranks(
    build: Callable[[], nn.Module], kind: str, count: int, shape: Any, alone: Ranks, pool: Pool
) -> None:
    (expected,) = alone.run(measured, build, kind)
    found = Ranks(count, pool).run(measured, build, kind, shape)
    assert all(each == found[0] for each in found)
    assert_same(found[0], expected, rtol=1e-4, atol=1e-7)


def test_norms_of_two_dtypes_are_those_of_the_values(ranks3: Ranks) -> None:
    """bfloat16 rounds updates, so they differ from one process's; what is measured is what is there."""
    found = ranks3.run(measured, two_dtypes, "SGD")
    assert all(each == found[0] for each in found)


def test_what_is_measured_of_what_does_not_move(alone: Ranks) -> None:
    (report,) = alone.run(measured, frozen, "SGD")
    norms = report["step 0"]
    assert norms["blocks.1.up.weight"]["gradient"] is None
    assert norms["blocks.1.up.weight"]["update"] == 0.0 < norms["blocks.1.up.weight"]["parameter"]


@on_ranks(2)
def test_it_costs_one_small_all_reduce(rank: int, world_size: int) -> int:
    from traffic import Traffic

    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer, watch=0)
    model(torch.ones(2, 8)).sum().backward()
    with Traffic() as traffic, trueshard.measure_norms(model) as norms:
        optimizer.step()
    assert traffic.calls["all_reduce"] == 1
    assert traffic.total == traffic.received["all_reduce"] <= 2 * 8 * 4 * len(norms)
    return len(norms)


@on_ranks(2)
def test_it_measures_what_is_stepped_also_while_parameters_are_gathered(rank: int, world_size: int) -> None:
    """Between a forward and its backward the modules hold gathered parameters."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer, reshard_after_forward="never")
    model(torch.ones(2, 8)).sum().backward()
    loss = model(torch.ones(2, 8)).sum()
    with trueshard.measure_norms(model) as norms:
        optimizer.step()
    assert all(each.gradient and each.update for each in norms.values())
    del loss


def test_reading_too_early_and_wrong_names_are_errors() -> None:
    model = TiedBlocks()
    with trueshard.measure_norms(model) as norms, pytest.raises(RuntimeError, match="after"):
        norms["first.weight"]
    assert "first.weight" in norms
    assert norms.get("nothing") is None
    with pytest.raises(KeyError, match=naming("'first.wait'", "'first.weight'")):
        norms["first.wait"]
    with pytest.raises(KeyError, match=naming("'blocks.2.up.weight'", "tied", "'blocks.0.up.weight'")):
        norms["blocks.2.up.weight"]
    with (
        pytest.raises(ValueError, match=naming("'first.weight'", "meta")),
        trueshard.measure_norms(Stack().to("meta")),
    ):
        pass


def test_an_exception_in_the_block_goes_through_and_leaves_no_copy() -> None:
    model = Stack()
    copies: list[weakref.ref[torch.Tensor]] = []
    reports: list[trueshard.MeasuredNorms] = []

    def failing() -> None:
        with trueshard.measure_norms(model) as norms:
            reports.append(norms)
            equal = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == model.first.weight.shape]
            copies.extend(weakref.ref(t) for t in equal if torch.equal(t, model.first.weight))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        failing()
    assert len(copies) == 1
    del caught
    gc.collect()
    assert copies[0]() is None
    with pytest.raises(RuntimeError, match="raised"):
        list(reports[0])


def test_sparse_and_complex_gradients_have_norms() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3, sparse=True)})
    model.register_parameter("wave", nn.Parameter(torch.tensor([3 + 4j])))
    (model["embed"](torch.tensor([1, 1, 2])).sum() + model.wave.abs().sum()).backward()
    with trueshard.measure_norms(model) as norms:
        pass
    assert norms["embed.weight"].gradient == pytest.approx((3 * 4 + 3 * 1) ** 0.5)
    assert norms["wave"].parameter == pytest.approx(5.0)
    assert norms["wave"].update == 0.0
