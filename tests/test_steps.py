"""Contract line 9, element-wise optimizers: a step on shards is the step on one device, through the same object.

Each case runs on one process without sharding and on 2 and 3 ranks whose shards are uneven.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import trueshard
from cases import as_on_one_device, on_ranks, raises_on_ranks
from gathering import whole
from messages import naming
from meter import gloo_lets_go
from parity import Ranks, assert_same
from resting import all_but
from stepping import (
    EPS,
    OwnSGD,
    Twin,
    Uneven,
    Whole,
    adamw,
    build,
    loss_of,
    parameters,
    same,
    shard_over,
    shown,
    take_step,
    told,
    train,
)
from trueshard.optim import local_params

# Every path of torch's own classes

ADAM = {"lr": 0.01, "eps": EPS}
PATHS: list[tuple[str, dict[str, Any]]] = [
    *(("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, path: True}) for path in ("foreach", "fused")),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "foreach": False}),
    ("SGD", {"lr": 0.01, "maximize": True}),
    *(("AdamW", ADAM | {"amsgrad": True, "weight_decay": 0.1, path: True}) for path in ("foreach", "fused")),
    ("AdamW", ADAM | {"foreach": False, "maximize": True}),
    ("Adam", ADAM | {"fused": True, "weight_decay": 0.1}),
    ("Adam", ADAM | {"decoupled_weight_decay": True, "lr": torch.tensor(0.01)}),
    ("NAdam", ADAM | {"momentum_decay": 0.01}),
    ("RAdam", ADAM | {"foreach": True}),
    ("Adamax", ADAM),
    ("Adadelta", {"lr": 0.5, "eps": EPS}),
    ("Adagrad", ADAM | {"lr_decay": 0.1}),
    ("Adagrad", ADAM | {"fused": True}),
    ("ASGD", {"lr": 0.05, "t0": 1}),
    ("RMSprop", ADAM | {"centered": True, "momentum": 0.5, "eps": 0.1}),
    ("Rprop", {"lr": 0.01}),
]


def every_path(rank: int, world_size: int, sharded: bool) -> dict[str, Any]:
    found = {}
    for i, (kind, options) in enumerate(PATHS):
        model = build()
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        if sharded or world_size > 1:
            trueshard.shard(model, optimizer)
        train(model, optimizer, rank, world_size)
        found[f"{i} {kind}"] = told(model, optimizer)
    return found


def test_every_path_of_torchs_own_classes(alone: Ranks, sizes: list[Ranks]) -> None:
    same(every_path, alone, sizes, False)


def every_path_in_parts(rank: int, world_size: int, large: int) -> dict[str, Any]:
    with mock.patch.object(local_params, "LARGE", large):
        return every_path(rank, world_size, True)


@pytest.mark.rest
def test_large_parameters_that_step_by_themselves_have_the_same_bits(ranks3: Ranks) -> None:
    together, apart = (ranks3.run(every_path_in_parts, large) for large in (1 << 40, 1))
    assert_same(apart, together, rtol=0, atol=0)


@pytest.mark.rest
def test_one_rank(alone: Ranks) -> None:
    (expected,) = alone.run(every_path, False)
    (found,) = alone.run(every_path, True)
    assert_same(found, expected, rtol=1e-6, atol=1e-7)


@as_on_one_device()
def test_capturable_is_what_it_is_on_one_process(rank: int, world_size: int) -> Any:
    """On the CPU torch refuses it inside the step, which is then as if it had not been called."""
    model = build()
    optimizer = adamw(model, capturable=True)
    shard_over(world_size, model, optimizer)
    loss_of(model, 0, rank, world_size).backward()
    try:
        optimizer.step()
        words = ""
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    for group in optimizer.param_groups:
        group["capturable"] = False
    optimizer.zero_grad()
    optimizer.state.clear()
    train(model, optimizer, rank, world_size)
    return words, parameters(model)


@raises_on_ranks(2, naming("ValueError: AdamW", "differentiable=True"))
def test_differentiable_is_refused_in_words(rank: int, world_size: int) -> None:
    model = build()
    optimizer = adamw(model, differentiable=True)
    before = list(model.parameters())
    try:
        trueshard.shard(model, optimizer)
    finally:
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


# Closures, zero_grad, hooks


class Twice(torch.optim.SGD):
    """Asks for the loss before and after its update, as line searches do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        first = super().step(closure)
        with torch.enable_grad():
            second = closure() if closure else None
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.01)
        return first, second


@pytest.mark.parametrize("how", ["positional", "keyword", "twice"])
@as_on_one_device()
def test_closures(rank: int, world_size: int, how: str) -> Any:
    model = build()
    optimizer: Any = Twice(model.parameters(), lr=0.05) if how == "twice" else adamw(model)
    shard_over(world_size, model, optimizer)
    losses: list[torch.Tensor] = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=step != 1)
            if world_size > 1:
                shown(optimizer)
            assert torch.is_grad_enabled()
            losses.append(loss_of(model, step, rank, world_size))
            losses[-1].backward()
            return losses[-1]

        found = optimizer.step(closure=closure) if how == "keyword" else optimizer.step(closure)
        assert (found[1] if how == "twice" else found) is losses[-1]
    return len(losses), told(model, optimizer)


@on_ranks(2)
def test_random_numbers_that_a_closure_draws_are_not_the_optimizers(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5))
    optimizer = OwnSGD(model.parameters())
    trueshard.shard(model, optimizer, units=["Linear"])

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2, 5)).sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)


@pytest.mark.parametrize("to_none", [True, False])
@as_on_one_device()
def test_zero_grad_both_ways(rank: int, world_size: int, to_none: bool) -> Any:
    model = build()
    optimizer = adamw(model)
    shard_over(world_size, model, optimizer)
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, step, rank, world_size, aside=step == 1).backward()
        optimizer.step()
    grads = whole({n: p.grad for n, p in model.named_parameters()})
    return told(model, optimizer), grads


@as_on_one_device()
def test_step_hooks_see_dtensors_each_once_and_in_order(rank: int, world_size: int) -> Any:
    model = build()
    optimizer = adamw(model)
    seen: list[tuple[str, int]] = []

    def hook(label: str) -> Callable[..., None]:
        def see(given: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            assert given is optimizer
            if world_size > 1:
                shown(optimizer)
                assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
            seen.append((label, len(optimizer.state)))
            if label == "pre after":
                with torch.no_grad():
                    given.param_groups[0]["params"][0].grad.mul_(2)

        return see

    handles = [register_optimizer_step_pre_hook(hook("global pre before"))]
    optimizer.register_step_pre_hook(hook("pre before"))
    optimizer.register_step_post_hook(hook("post before"))
    shard_over(world_size, model, optimizer)
    handles.append(register_optimizer_step_post_hook(hook("global post after")))
    handles.append(register_optimizer_step_pre_hook(hook("global pre after")))
    optimizer.register_step_pre_hook(hook("pre after"))
    optimizer.register_step_post_hook(hook("post after"))
    removed = optimizer.register_step_post_hook(hook("removed"))
    train(model, optimizer, rank, world_size, [0])
    removed.remove()
    train(model, optimizer, rank, world_size, [1, 2])
    for handle in handles:
        handle.remove()
    return seen, told(model, optimizer)


# Learning rates

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=5),
    "LambdaLR from zero": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 3)], [2]
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("when", "tensor"),
    itertools.product(("before", "after"), (False, True)),
)
@as_on_one_device()
def test_schedulers_made_before_and_after(rank: int, world_size: int, when: str, tensor: bool) -> dict[str, Any]:
    found = {}
    for name, make in SCHEDULES.items():
        if tensor and name == "OneCycleLR":
            continue  # torch writes floats into a tensor's place there
        model = build()
        optimizer = adamw(model) if not tensor else torch.optim.AdamW(model.parameters(), torch.tensor(0.01), eps=EPS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule = make(optimizer) if when == "before" else None
            shard_over(world_size, model, optimizer)
            schedule = schedule or make(optimizer)
            rates = []
            for step in range(4):
                train(model, optimizer, rank, world_size, [step])
                schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                rates.append([float(group["lr"]) for group in optimizer.param_groups])
        found[name] = rates, told(model, optimizer)
    return found


# Classes and exceptions


class Doubled(torch.optim.AdamW):
    """A subclass of a known class, which steps twice and shrinks what it was given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.99)
        return loss


@pytest.mark.rest
@as_on_one_device()
def test_a_subclass_whose_step_calls_its_parents(rank: int, world_size: int) -> Any:
    model = build()
    torch.optim.AdamW(model.parameters())  # from now on torch hooks the step of the parent class, too
    optimizer = Doubled(model.parameters(), lr=0.01, eps=EPS)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    shard_over(world_size, model, optimizer)
    train(model, optimizer, rank, world_size)
    return len(calls), told(model, optimizer)


@pytest.mark.parametrize("where", all_but(["closure", "post hook"], ["step", "closure", "pre hook", "post hook"]))
@as_on_one_device()
def test_an_exception_leaves_dtensors_and_the_next_step_works(rank: int, world_size: int, where: str) -> Any:
    model = build()
    optimizer = OwnSGD(model.parameters())
    shard_over(world_size, model, optimizer)
    optimizer.fail_at = 2 if where == "step" else -1
    train(model, optimizer, rank, world_size, [0])

    def closure() -> torch.Tensor:
        loss = loss_of(model, 1, rank, world_size)
        loss.backward()
        if where == "closure":
            raise ArithmeticError("as told")
        return loss

    def hook(*_: Any) -> None:
        if where in ("pre hook", "post hook"):
            raise ArithmeticError("as told")

    register = optimizer.register_step_pre_hook if where == "pre hook" else optimizer.register_step_post_hook
    handle = register(hook)
    with pytest.raises(ArithmeticError, match="as told"):
        optimizer.step(closure)
    handle.remove()
    if world_size > 1:
        shown(optimizer)
        assert all(isinstance(state["mean"], DTensor) for p, state in optimizer.state.items() if p.ndim)
        assert where == "pre hook" or all(isinstance(p.grad, DTensor) for p in model.layers.parameters())
    optimizer.zero_grad()
    train(model, optimizer, rank, world_size, [2, 3])
    return told(model, optimizer)


# Dtypes, placement and policies: a twin takes the very same gradients


class Casting(Uneven):
    """Layers of different storage dtypes in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].to(torch.bfloat16)
        self.last.to(torch.float64)

    def forward(self, x: torch.Tensor, aside: bool = True) -> torch.Tensor:
        for module in (self.first, *self.layers, self.aside, self.last):
            x = module(x.to(next(module.parameters()).dtype))
        return x


WORDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bf16 compute": {"mixed_precision": "bf16"},
    "bf16 storage": {},
    "mixed storage": {"units": ["Linear", "Layer"]},
    "offload": {"offload": "cpu"},
    "always": {"reshard_after_forward": "always", "units": ["Layer"]},
    "never": {"reshard_after_forward": "never"},
    "checkpointed": {"activation_checkpointing": "full", "units": ["Linear"]},
    "hybrid": {"reshard_after_forward": 2},
    "HSDP": {},
}


TWINS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01, eps=EPS, foreach=True),
    "SGD": lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9),
    "Muon": lambda named: torch.optim.Muon([p for _, p in named if p.ndim == 2], lr=0.05, weight_decay=0.3),
    "Adafactor": lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.05),
    "Whole": lambda named: Whole([p for _, p in named]),
}


TWINS_SHORT = ["as it is", "bf16 compute", "mixed storage"]
TWINS_REST = [name for name in WORDS if name not in (*TWINS_SHORT, "HSDP", "hybrid")]


def twins(rank: int, world_size: int, names: list[str]) -> None:
    for name, (kind, make) in itertools.product(names, TWINS.items()):
        if kind != "AdamW" and name not in ("mixed storage", "bf16 storage", "offload", "HSDP"):
            continue
        if (kind, name) == ("Adafactor", "mixed storage"):  # refused: its eps would be that of the first dtype
            continue
        model: Any = build(torch.bfloat16 if name == "bf16 storage" else torch.float32)
        if name == "mixed storage":
            torch.manual_seed(0)
            model = Casting()
        optimizer, twin = make(list(model.named_parameters())), Twin(model, make)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if name == "HSDP" else None
        trueshard.shard(model, optimizer, mesh=mesh, **WORDS[name])
        for step in range(4):
            with trueshard.accumulate(model, last=step % 2 == 1):
                loss_of(model, step, rank, world_size, aside=step < 2).backward()
            if step % 2 == 1:
                twin.step(model)
                optimizer.step()
                model.zero_grad()
                shown(optimizer)
        # Where a shard ends decides which elements vector instructions round: one unit of the last place.
        twin.compare(f"{name}, {kind}", model, *((2**-6, 2**-10) if "storage" in name else (1e-6, 1e-7)))


@raises_on_ranks(2, naming("Adafactor", "eps=(None", "dtypes"))
def test_adafactors_eps_in_a_group_of_two_dtypes_is_refused(rank: int, world_size: int) -> None:
    model = Casting()
    trueshard.shard(model, torch.optim.Adafactor(model.parameters()))


@pytest.mark.rest
@pytest.mark.parametrize("names", [TWINS_SHORT, TWINS_REST])
def test_dtypes_and_policies_do_not_change_a_step(names: list[str], ranks3: Ranks) -> None:
    ranks3.run(twins, names)


@pytest.mark.rest
def test_steps_on_two_mesh_dimensions_and_on_part_of_the_ranks(ranks4: Ranks) -> None:
    ranks4.run(twins, ["HSDP", "hybrid"])


# How step() is called


@pytest.mark.rest
@pytest.mark.parametrize("what", ["step", "training"])
@as_on_one_device(2)
def test_a_compiled_step_and_a_compiled_function_that_trains(rank: int, world_size: int, what: str) -> Any:
    model = build()
    optimizer = adamw(model, foreach=True)
    shard_over(world_size, model, optimizer)
    step: Any = optimizer.step

    def training(number: int) -> None:
        loss_of(model, number, rank, world_size).backward()
        step()
        optimizer.zero_grad()

    if what == "step":
        step = torch.compile(step, backend="aot_eager")  # which has all that "eager" has
    else:
        training = torch.compile(training, backend="aot_eager")
    for number in range(3):
        training(number)
    if world_size > 1:
        shown(optimizer)
    return told(model, optimizer)


@as_on_one_device()
def test_two_optimizers_over_one_model_and_attributes_on_parameters(rank: int, world_size: int) -> Any:
    """Two optimizers over one model; each steps twice in a row; the rate of one parameter is the user's attribute."""
    model = build()
    model.first.weight.rate = 0.5
    optimizers = [adamw(model), OwnSGD(model.parameters(), lr=0.01)]
    shard_over(world_size, model, *optimizers)
    train(model, [optimizers[0], *optimizers, optimizers[1]], rank, world_size, [0])
    for step in (2, 4):
        loss_of(model, step, rank, world_size).backward()
        for each in optimizers:
            each.step()
            each.step()
            model.first.weight.rate, model.first.bias.rate = 0.25, 3.0
        model.zero_grad()
    return told(model, *optimizers)


@on_ranks(2)
def test_an_optimizer_is_freed_when_it_is_let_go_of(rank: int, world_size: int) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trueshard.shard(model, optimizer)
    loss_of(model, 0, rank, world_size).backward()
    optimizer.step()
    weak = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert weak() is None
    finally:
        gc.enable()


class Recomputed(Uneven):
    """Its layers are recomputed by the user's own call, in the way of old or the present one."""

    reentrant: bool | None = None

    def forward(self, x: torch.Tensor, aside: bool = True) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x + torch.tanh(self.aside(x)))


@pytest.mark.rest
@on_ranks(2)
def test_steps_leave_no_object_behind(rank: int, world_size: int) -> None:
    """Neither those of torch's dispatch of a step, nor the graph of a recomputed layer; four steps make what is kept.

    Python may make an object or two once, at any step; what a step leaves comes with each.
    """
    gc.collect()
    gc.freeze()  # what was there before is neither counted nor looked through
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        model = Recomputed()
        model.reentrant = reentrant
        optimizer = adamw(model, foreach=True)
        trueshard.shard(model, optimizer)
        counts = []
        for number in range(9):
            with gloo_lets_go():
                loss_of(model, number, rank, world_size).backward()
                trueshard.clip_grad_norm_(model.parameters(), 1.0)
                take_step(optimizer)
            gc.collect()
            objects = gc.get_objects()
            counts.append((len(objects), sum(isinstance(each, torch.Tensor) for each in objects)))
            del objects
        every, tensors = zip(*counts[4:], strict=True)
        assert len(set(tensors)) == 1, counts
        assert len(set(every)) <= 2, counts
    gc.unfreeze()


class Mixture(nn.Module):
    """A model with parameters without dimensions, and two experts of which each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = build()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.uneven(self.experts[which](x))


@on_ranks(2)
def test_a_model_is_freed_when_it_is_let_go_of(rank: int, world_size: int) -> None:
    model = Mixture()
    hooked = model.uneven.first.weight
    hooked.register_hook(lambda grad, model=model: grad * 2)  # as on one device, it does not keep the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trueshard.shard(model, optimizer, units="Layer")
    loss = model(torch.ones(2, 6), rank).sum()
    loss.backward()
    trueshard.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    weak = weakref.ref(model)
    del model, optimizer, loss, hooked
    gc.collect()
    assert weak() is None
