"""Contract: a number read from a sharded tensor is that of the whole, on every rank; values are drawn for the whole."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import trueshard
from cases import as_on_one_device, on_ranks
from handmade_training import batch, prepared
from messages import naming
from models.handmade import Scalar
from parity import Ranks
from stepping import same, shard_over, take_step
from trueshard import _torch


def build(world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model = Scalar()
    shard_over(world_size, model)
    return model


def numbers(rank: int, world_size: int) -> Any:
    model = build(world_size)
    model(batch(0, rank, world_size)).pow(2).mean().backward()
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
        _torch.local(grad)[0, 0] = float("nan")
    found["NaN on one rank"] = [f"{each:.4f}" for each in (grad.max(), grad.min(), grad.abs().max(), grad.sum())]
    found["NaN in norms"] = [f"{grad.norm(order):.4f}" for order in (1, 2, float("inf"))]
    found["unequal to itself"] = bool((grad != grad).any()), int((grad != grad).sum())
    if rank == 0:
        _torch.local(grad)[0, 0] = 1.0
    found["unequal to itself later"] = bool((grad != grad).any())
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


@as_on_one_device()
def test_values_are_drawn_as_on_one_device(rank: int, world_size: int) -> Any:
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


def apart(rank: int, world_size: int) -> Any:
    weight: Any = build(world_size).blocks[0].up.weight
    with pytest.raises(RuntimeError, match=naming("test_access.py", "full_tensor()")):
        weight.norm(1 + rank).item()
    return weight.norm().item()


def test_ranks_that_read_different_numbers_are_told(ranks2: Ranks) -> None:
    one, two = ranks2.run(apart)
    assert one == two


@on_ranks(2)
def test_a_number_that_one_rank_reads_is_an_error_within_the_time_limit(rank: int, world_size: int) -> Any:
    norm = build(world_size).blocks[0].up.weight.norm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "timeout_of", lambda _: datetime.timedelta(seconds=1))
        if rank == 0:
            with pytest.raises(RuntimeError, match=naming("ranks [1]", "full_tensor()", "rank == 0")):
                norm.item()


@as_on_one_device()
def test_data_that_is_assigned_is_taken_or_refused(rank: int, world_size: int) -> Any:
    model, optimizer = prepared(world_size, Scalar)
    weight: Any = model.blocks[0].up.weight
    rows = batch(0, rank, world_size)
    for step in range(3):
        model(rows).pow(2).mean().backward()
        if step == 0:
            weight.grad.data = weight.grad.data * 3
            model.scale.grad.data = torch.tensor(0.25)
        take_step(optimizer)
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


@as_on_one_device()
def test_gradients_that_are_asked_for_are_those_of_the_whole(rank: int, world_size: int) -> Any:
    model = build(world_size)
    rows = batch(0, rank, world_size)
    some = [model.blocks[0].up.weight, model.scale, model.last.bias]
    found: list[Any] = [torch.autograd.grad(model(rows).pow(2).mean(), some)]
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = model(rows).pow(2).mean()
    loss.backward(inputs=some, retain_graph=True)
    assert [parameter.grad is not None for parameter in some] == [True] * 3
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 3
    found.append([parameter.grad.clone() for parameter in some])
    loss.backward()
    found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    found.append(torch.autograd.grad(model(rows).abs().mean(), list(model.parameters())))
    found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    rows = rows.clone().requires_grad_()
    found.append(torch.autograd.grad(model(rows).mean() + some[0].pow(2).sum(), some[0])[0])
    assert rows.grad is None
    found.append(torch.autograd.grad(model.first(rows).mean(), [model.first.bias, some[0]], allow_unused=True)[0])
    with pytest.raises(RuntimeError, match="allow_unused"):
        torch.autograd.grad(model.first(rows).sum(), some[:1])
    return found


@pytest.mark.rest
@as_on_one_device()
def test_derivatives_in_forward_mode_are_those_of_the_whole(rank: int, world_size: int) -> Any:
    """Gradients of a loss that holds a value and its derivative, in forward mode, by the input."""
    model = build(world_size)
    rows = batch(0, rank, world_size)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(rows, torch.ones_like(rows))
        value, derivative = forward_ad.unpack_dual(model(dual))
        (value.pow(2).mean() + derivative.pow(2).mean()).backward()
        with torch.no_grad():
            assert torch.equal(forward_ad.unpack_dual(model(dual))[1], derivative)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def transformed(rank: int, world_size: int) -> Any:
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return torch.func.jvp(build(world_size), (rows,), (torch.ones_like(rows),))


def test_a_transform_of_torch_func(alone: Ranks, ranks2: Ranks, differs: Callable[[str], None]) -> None:
    if _torch.TAKES_TRANSFORMS:
        same(transformed, alone, [ranks2])
    else:
        differs("a sharded model inside a transform of `torch.func` is refused; `torch.autograd.forward_ad` works")
        ranks2.raises(transformed, match=naming("torch.func", "forward_ad", "2.13"))


@on_ranks(2)
def test_gradients_that_cannot_be_had_are_refused(rank: int, world_size: int) -> Any:
    model = build(world_size)
    weight: Any = model.last.weight
    rows = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match=naming("create_graph=True")):
        torch.autograd.grad(model(rows).sum(), weight, create_graph=True)
    hidden = rows.requires_grad_() * 2
    with pytest.raises(RuntimeError, match=naming("no leaf")):
        torch.autograd.grad(model(hidden).sum(), [weight, hidden])
    model.zero_grad()
    other = build(world_size)
    with trueshard.accumulate(model, last=False):
        model(rows).sum().backward()
        with pytest.raises(RuntimeError, match=naming("accumulate(model, last=False)")):
            torch.autograd.grad(model(rows).sum(), weight)
        assert torch.autograd.grad(other(rows).sum(), other.last.weight)[0].shape == weight.shape


@as_on_one_device()
def test_plain_tensors_compute_with_sharded_ones(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    model = Scalar()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    average = [parameter.detach().clone() for parameter in model.parameters()]
    importance = [torch.rand_like(parameter) for parameter in before]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    shard_over(world_size, model, optimizer)
    rows = batch(0, rank, world_size)
    own = list(model.parameters())
    for _ in range(3):
        loss = model(rows).pow(2).mean()
        l1 = torch.zeros(())
        for parameter in own:
            l1 = l1 + parameter.abs().sum()
        l2 = sum((i * (p - b) ** 2).sum() for i, p, b in zip(importance, own, before, strict=True))
        together = torch.stack([parameter.pow(2).sum() for parameter in own]).sum()
        (loss + 0.01 * l1 - 0.1 * -l2 + together / 100 + own[0] * rows.mean()).backward()
        take_step(optimizer)
        with torch.no_grad():
            for mean, parameter in zip(average, own, strict=True):
                mean.mul_(0.5).add_(parameter, alpha=0.5)
    with torch.no_grad():
        own[1].lerp_(average[1], 0.3)
        own[2].copy_(average[2])
        own[3].sub_(average[3], alpha=0.1)
        own[4][2] = 7.0
        own[6][1:9, 2] = own[6][0, :].sum()
    arrays = [own[6].detach().numpy(), own[0].detach().numpy()]
    return average, [torch.from_numpy(each.copy()) for each in arrays], dict(model.named_parameters())


@on_ranks(2)
def test_what_cannot_be_followed_names_the_remedy(rank: int, world_size: int) -> Any:
    model = build(world_size)
    weight: Any = model.last.weight
    loss = model(torch.ones(2, 8)).sum()
    with pytest.raises(RuntimeError, match=naming("loss = loss + ")):
        loss += weight.pow(2).sum()
    other = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match=naming("functional_call", "last.weight", "before shard()")):
        torch.func.functional_call(model, {"last.weight": other["last.weight"]}, torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=naming("functional_call", "scale")):
        torch.func.functional_call(model, {"scale": other["scale"]}, torch.ones(2, 8))
    own = torch.func.functional_call(model, dict(model.named_parameters()), torch.ones(2, 8))
    assert torch.equal(own, model(torch.ones(2, 8)))
    plain = nn.Linear(2, 2)
    torch.func.functional_call(plain, {"bias": torch.zeros(2)}, torch.ones(1, 2))
    with pytest.raises(RuntimeError, match=naming("no_grad()")):
        weight[0] = 1


@on_ranks(2)
def test_plain_tensors_of_other_shapes_are_refused_by_name(rank: int, world_size: int) -> Any:
    """What the README says of arithmetic outside a pass."""
    model = build(world_size)
    weight: Any = model.blocks[0].up.weight
    assert isinstance(weight, torch.distributed.tensor.DTensor)
    rows = torch.ones(6, 8)
    loss = model(rows).pow(2).mean() + 0.1 * sum(parameter.pow(2).sum() for parameter in model.parameters())
    assert type(loss) is torch.Tensor
    loss.backward()
    assert isinstance(weight - torch.ones(weight.shape), torch.distributed.tensor.DTensor)
    for refused in (lambda: rows @ weight.T, lambda: weight * rows[0], lambda: nn.functional.linear(rows, weight)):
        with pytest.raises(RuntimeError, match=naming("'blocks.0.up.weight'", "full_tensor()")):
            refused()
