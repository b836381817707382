"""How an optimizer may step is found by trying it: each kind by a class made for it, which the library cannot know."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import trueshard
from cases import on_ranks
from messages import naming
from parity import Ranks, assert_same
from resting import all_but
from stepping import ByParameter, build, parameters, same, shard_over, train
from trueshard.optim.classify import classify, manner

Update = Callable[["Made", dict[str, Any], torch.Tensor, dict[str, Any]], torch.Tensor]
"""(optimizer, group, gradient, the parameter's state) → what is subtracted, times the rate"""


class Made(ByParameter):
    """Subtracts from each parameter what a function of its gradient says."""

    def __init__(self, params: Any, rule: Update, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.rule = rule
        self.extra: Any = None

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(group["lr"] * self.rule(self, group, p.grad, state))

    def gradients(self, group: dict[str, Any]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [(p, p.grad) for p in group["params"] if p.grad is not None]


# Element-wise, or row by row


def sign(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    state["mean"] = state.get("mean", torch.zeros_like(grad)).lerp(grad, 0.1)
    return torch.tanh(3 * state["mean"])


def rows(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    """Normalises rows; its state has an entry a row, beside one for the tensor."""
    if grad.ndim < 2:
        return grad
    norm = grad.flatten(1).norm(dim=1)
    state["row"] = state.get("row", torch.zeros_like(norm)).lerp(norm, 0.5)
    state["count"] = state.get("count", torch.zeros(())) + 1
    return grad / (state["row"].view(-1, *[1] * (grad.ndim - 1)) + 0.1)


def nested(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    """State in containers: a tuple, a list, a dict of its own kind."""
    first, second = state.get("pair", (torch.zeros_like(grad), torch.zeros_like(grad)))
    state["pair"] = first.lerp(grad, 0.1), second.lerp(grad.square(), 0.1)
    state.setdefault("more", {"list": [torch.zeros_like(grad)]})["list"][0].lerp_(grad, 0.2)
    return state["more"]["list"][0] + state["pair"][0] / (state["pair"][1].sqrt() + 0.1)


# The whole parameter


def norm(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    return grad / (grad.norm() + 0.1)


#: Updates that look at more of a parameter than an element.
WHOLE: dict[str, Update] = {
    "norm": norm,
    "columns": lambda _, group, grad, state: grad / (grad.norm(dim=0) + 0.1) if grad.ndim == 2 else grad,
    # Factorised from a size on, as Adafactor's kin are.
    "if large": lambda _, group, grad, state: (
        norm(_, group, grad, state) if grad.ndim == 2 and min(grad.shape) >= 128 else grad
    ),
    "if small": lambda _, group, grad, state: norm(_, group, grad, state) if grad.numel() < 1000 else grad,
    "by number of elements": lambda _, group, grad, state: grad / grad.numel() ** 0.5,
    "by the shape's rows": lambda _, group, grad, state: (
        grad * max(1, grad.shape[0] / grad[:1].numel()) ** 0.5 if grad.ndim == 2 else grad
    ),
    "every tenth step": lambda _, group, grad, state: norm(_, group, grad, state) if group["step"] % 10 == 0 else grad,
}


def if_set(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    return norm(_, group, grad, state) if group.get("whole") else grad


# More than one parameter


class Global(Made):
    """Clips by the norm over all parameters."""

    def prepare(self) -> None:
        grads = [grad for group in self.param_groups for _, grad in self.gradients(group)]
        total = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_((self.param_groups[0]["limit"] / (total + 1e-6)).clamp(max=1))


class Largest(Made):
    """The rate of a group follows the largest gradient in it."""

    def prepare(self) -> None:
        for group in self.param_groups:
            group["lr"] = 0.01 / max(grad.abs().max().item() for _, grad in self.gradients(group))


class Estimate(Made):
    """Estimates a distance from all of a group, which it uses late."""

    def prepare(self) -> None:
        for group in self.param_groups:
            dots = [(p * grad).sum().item() for p, grad in self.gradients(group)]
            group["distance"] = group.get("distance", 0.0) + sum(dots)
            group["factor"] = 1.0 if group.get("step", 0) < 50 else group["distance"]


class History:
    """Keeps norms, and after the 25th tells by how much one is above their mean."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def factor(self, norm: float) -> float:
        self.norms.append(norm)
        return 1.0 if len(self.norms) <= 25 else min(1.0, sum(self.norms[:25]) / 25 / norm)


class Remembers(Made):
    """Clips by the norm over all parameters, when an object of its own has seen enough."""

    def __init__(self, params: Any, rule: Update, **settings: Any) -> None:
        super().__init__(params, rule, **settings)
        self.history = History()

    def prepare(self) -> None:
        grads = [grad for group in self.param_groups for _, grad in self.gradients(group)]
        factor = self.history.factor(float(torch.stack([grad.norm() for grad in grads]).norm()))
        for grad in grads:
            grad.mul_(factor)


class Late(Global):
    """Clips so after a warm-up alone."""

    def prepare(self) -> None:
        if self.param_groups[0].get("step", 0) >= self.param_groups[0]["warmup"]:
            super().prepare()


class Beside(Made):
    """Keeps means in a table of its own, by parameter."""

    def __init__(self, params: Any, rule: Update, **settings: Any) -> None:
        super().__init__(params, rule, **settings)
        self.means: dict[Any, torch.Tensor] = {}

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.means[p] = self.means.get(p, torch.zeros_like(p)).lerp(p.grad, 0.1)
        p.sub_(group["lr"] * self.means[p])


def noisy(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    return grad + 0.01 * torch.randn_like(grad)


def noisy_by_python(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    return grad * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))  # noqa: NPY002 (the one that others draw from)


def own_generator(optimizer: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    """A generator of its own, which every rank would use on shards of other sizes."""
    return grad + 0.01 * torch.randn(grad.shape, generator=optimizer.extra)


class NeedsClosure(Made):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("this optimizer needs a closure")
        return super().step(closure)


class NeedsGraph(Made):
    """Differentiates the gradients, as Sophia's and AdaHessian's estimates do."""

    @torch.enable_grad()
    def prepare(self) -> None:
        for group in self.param_groups:
            for p, grad in self.gradients(group):
                torch.autograd.grad((grad * grad).sum(), p)


class Holds(Made):
    """Steps a list of its own, beside its groups."""

    def __init__(self, params: Any, rule: Update, **settings: Any) -> None:
        self.own = list(params)
        super().__init__(self.own, rule, **settings)

    def prepare(self) -> None:
        for p, grad in self.gradients({"params": self.own}):
            p.sub_(self.param_groups[0]["lr"] * grad)


class HoldsInAnObject(Holds):
    """Steps a list that an object of its own keeps."""

    def __init__(self, params: Any, rule: Update, **settings: Any) -> None:
        super().__init__(params, rule, **settings)
        self.keeper, self.own = History(), []
        self.keeper.norms = self.param_groups[0]["params"][:1]


class Keyed(Made):
    """Looks a parameter up in a table of its own, made with the optimizer."""

    def __init__(self, params: Any, rule: Update, **settings: Any) -> None:
        params = list(params)
        super().__init__(params, rule, **settings)
        self.rate = {p: 1.0 + i for i, p in enumerate(params)}

    def prepare(self) -> None:
        for group in self.param_groups:
            for p, grad in self.gradients(group):
                p.sub_(group["lr"] * self.rate.get(p, 1.0) * grad)


class LookAhead(torch.optim.Optimizer):
    """Every third step, halfway back to slow weights, around any optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.count += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    if self.count % 3 == 0:
                        slow.lerp_(p, 0.5)
                        p.copy_(slow)
        return loss


class Bare(LookAhead):
    """The same, without calling the constructor of torch's class, which is what gives ``step`` its hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def warmed(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Made(model.parameters(), norm)
    lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)
    return optimizer


def generator(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Made(model.parameters(), own_generator)
    optimizer.extra = torch.Generator().manual_seed(0)
    return optimizer


def trust(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    return norm(_, group, grad, state) if group["step"] > 100 else grad


def halves(model: nn.Module) -> torch.optim.Optimizer:
    members = list(model.parameters())
    return Made([{"params": members[::2], "whole": True}, {"params": members[1::2]}], if_set)


FOUND: dict[str, tuple[str, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "sign": ("on shards", lambda m: Made(m.parameters(), sign)),
    "rows": ("on shards", lambda m: Made(m.parameters(), rows)),
    "nested": ("on shards", lambda m: Made(m.parameters(), nested)),
    **{name: ("by owner", lambda m, update=update: Made(m.parameters(), update)) for name, update in WHOLE.items()},
    "warm-up from zero": ("by owner", warmed),
    "after a warm-up": ("by owner", lambda m: Made(m.parameters(), trust)),
    "a setting of one group": ("on shards and by owner", halves),
    "look-ahead": ("on shards", lambda m: LookAhead(inner(m))),
    "look-ahead, bare": ("on shards", lambda m: Bare(inner(m))),
    "look-ahead, bare, around one by owner": ("by owner", lambda m: Bare(Made(m.parameters(), norm))),
    "look-ahead around one by owner": ("by owner", lambda m: LookAhead(Made(m.parameters(), norm))),
}
"""Name → how it steps, and the optimizer."""

REFUSED: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "LBFGS": ("LBFGS.*all parameters", lambda m: torch.optim.LBFGS(m.parameters())),
    "SparseAdam": ("SparseAdam.*sparse", lambda m: torch.optim.SparseAdam(m.parameters())),
    "global norm": ("Global.*others", lambda m: Global(m.parameters(), sign, limit=1.0)),
    "global norm, rarely": ("Global.*others", lambda m: Global(m.parameters(), sign, limit=1e4)),
    "largest": ("Largest.*others", lambda m: Largest(m.parameters(), sign)),
    "estimate": ("Estimate.*others", lambda m: Estimate(m.parameters(), sign)),
    "global norm by a history": ("Remembers.*others", lambda m: Remembers(m.parameters(), sign)),
    "global norm, late": ("Late.*others", lambda m: Late(m.parameters(), sign, limit=1.0, warmup=100)),
    "global norm, very late": ("Late.*others", lambda m: Late(m.parameters(), sign, limit=1.0, warmup=5000)),
    "means beside": (r"Beside.*state\[parameter\]", lambda m: Beside([p for p in m.parameters() if p.ndim], sign)),
    "own list in an object": ("HoldsInAnObject.*'keeper'", lambda m: HoldsInAnObject(m.parameters(), sign)),
    "random": ("Made.*random numbers", lambda m: Made(m.parameters(), noisy)),
    "random by Python": ("Made.*random numbers", lambda m: Made(m.parameters(), noisy_by_python)),
    "own generator": ("Made", generator),
    "closure": ("NeedsClosure.*closure", lambda m: NeedsClosure(m.parameters(), sign)),
    "graph": ("NeedsGraph.*create_graph", lambda m: NeedsGraph(m.parameters(), sign)),
    "own list": ("Holds", lambda m: Holds(m.parameters(), sign)),
    "own table": ("Keyed", lambda m: Keyed(m.parameters(), sign)),
}
"""Name → what the error says, and the optimizer."""


@pytest.mark.parametrize("name", FOUND)
def test_each_kind_is_recognised(name: str) -> None:
    kind, make = FOUND[name]
    assert manner(classify(make(build()))) == kind


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused_by_name_and_reason(name: str) -> None:
    reason, make = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){reason}.*use "):
        classify(make(build()))


def factored(_: Any, group: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
    """Means over channels in and out, for convolutions from 32 channels on."""
    square = grad.square()
    if grad.ndim == 4 and min(grad.shape[:2]) >= 32:
        rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
        square = rows * columns / rows.mean(0, keepdim=True)
    return grad / (square.sqrt() + 1e-3)


def from_size(size: int, measure: Callable[[torch.Tensor], int]) -> Update:
    """The norm of what is of ``size`` or more."""
    return lambda _, group, grad, state: norm(_, group, grad, state) if measure(grad) >= size else grad


def slower_from(size: int) -> Update:
    """By the element, at a rate that follows from the number of rows."""
    return lambda _, group, grad, state: grad * (0.5 if len(grad) >= size else 1.0)


SIZED: dict[str, tuple[Update, tuple[int, ...], str]] = {
    "convolution of 40 by 36 channels": (factored, (40, 36, 3, 3), "by owner"),
    "convolution of 512 channels": (factored, (512, 512, 3, 3), "by owner"),
    "convolution of 31 channels": (factored, (31, 64, 3, 3), "on shards"),
    "matrix of 256 and more": (from_size(256, lambda grad: min(grad.shape)), (300, 260), "by owner"),
    "matrix of less than 256": (from_size(256, lambda grad: min(grad.shape)), (8000, 255), "on shards"),
    "matrix beyond all stand-ins": (from_size(3000, lambda grad: min(grad.shape)), (4096, 16384), "by owner"),
    "vector of 2000 and more": (from_size(2000, len), (2000,), "by owner"),
    "number of elements": (from_size(10**6, torch.Tensor.numel), (1000, 10, 100), "by owner"),
    "few rows": (from_size(-3, lambda grad: -len(grad)), (64, 300), "by owner"),
    "rate by rows": (slower_from(1024), (2000, 30), "by owner"),
    "rate by fewer rows": (slower_from(1024), (1000, 30), "on shards"),
}
"""Case → rule, the user's shape, and how it steps."""


@pytest.mark.parametrize("name", SIZED)
def test_a_rule_that_begins_at_a_size_is_known_on_the_shapes_of_the_parameters(name: str) -> None:
    rule, shape, kind = SIZED[name]
    parameters = [nn.Parameter(torch.empty(each, device="meta")) for each in ((3,), shape)]
    assert manner(classify(Made(parameters, rule))) == kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_rule_of_one_dtype_is_known(dtype: torch.dtype) -> None:
    optimizer = Made(build(dtype).parameters(), lambda *given: norm(*given) if given[2].dtype == dtype else given[2])
    assert manner(classify(optimizer)) == "by owner"


def test_a_model_that_the_optimizer_holds(alone: Ranks) -> None:
    model = build()
    optimizer = Made(model.parameters(), sign)
    optimizer.extra = model
    with pytest.raises(ValueError, match=naming("Made", "model", "'extra'")):
        classify(optimizer)


def test_state_by_rows_is_told_from_state_that_is_alike() -> None:
    (verdict,) = classify(Made(build().parameters(), rows))
    assert verdict.rows == {("row",)}
    assert verdict.replicated == {("count",)}


def exact(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """After steps that are all made sharded, and after two more, made before it is sharded."""
    found = {}
    for prior in (False, True):
        model = build()
        optimizer = FOUND[name][1](model)
        if prior:
            train(model, optimizer, 0, 1, [0, 2])
        shard_over(world_size, model, optimizer)
        train(model, optimizer, rank, world_size, [4, 5, 6])
        found[f"{prior=}"] = parameters(model)
        if name in ("rows", "nested"):
            found[f"{prior=}, state"] = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
    return found


FIRSTS = [next(name for name, (kind, _) in FOUND.items() if kind == each) for each in ("on shards", "by owner")]


@pytest.mark.parametrize("name", all_but(list(FOUND)[::6], FOUND))
def test_each_recognised_kind_equals_one_process(name: str, alone: Ranks, ranks2: Ranks) -> None:
    same(exact, alone, [ranks2], name)


@pytest.mark.rest
@pytest.mark.parametrize("name", [*FIRSTS, "rows", "a setting of one group", "look-ahead, bare, around one by owner"])
def test_each_way_to_step_equals_one_process_on_three_ranks(name: str, alone: Ranks, ranks3: Ranks) -> None:
    same(exact, alone, [ranks3], name)


# Nothing of the user's is touched


@pytest.mark.parametrize("name", all_but([*FOUND, *REFUSED][::4], [*FOUND, *REFUSED]))
def test_trying_leaves_everything_as_it_was(name: str) -> None:
    model = build()
    optimizer = (FOUND | REFUSED)[name][1](model)
    if name in FOUND:
        train(model, optimizer, 0, 1, [0])
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = pictured(model, optimizer)
    try:
        classify(optimizer)
    except ValueError:
        assert name in REFUSED
    after = pictured(model, optimizer)
    assert called == []
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert str(value) == str(after[key]), key


def test_trying_seeds_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the function by which torch seeds accelerators, so that it shows where there is none."""
    optimizer, seeded = Made(build().parameters(), sign), list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    classify(optimizer)
    assert seeded == []


def pictured(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Values and identities of what a trial could have changed."""
    groups = [[(k, id(v), str(v)) for k, v in group.items()] for group in optimizer.param_groups]
    return {
        "values": [(id(p), p.tolist(), p.grad.tolist() if p.grad is not None else None) for p in model.parameters()],
        "groups": groups,
        "members": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "state": [(id(key), id(value), str(value)) for key, value in optimizer.state.items()],
        "attributes": [(key, id(value)) for key, value in vars(optimizer).items()],
        "class": dict(vars(type(optimizer))),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1:3],  # noqa: NPY002
    }


@pytest.mark.parametrize("name", ["LBFGS", "global norm", "random"])
@on_ranks(2)
def test_a_refusal_changes_nothing(rank: int, world_size: int, name: str) -> None:
    """All or nothing: model and optimizers are as they were, and train on."""
    reason, make = REFUSED[name]
    model = build()
    first, second = inner(model), make(model)
    members = list(model.parameters())
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        trueshard.shard(model, first, second)
    assert all(a is b for a, b in zip(members, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(members, first.param_groups[0]["params"], strict=True))
    assert "step" not in vars(first)
    train(model, first, 0, 1)
    held = parameters(model)
    again = build()
    train(again, inner(again), 0, 1)
    assert_same(held, parameters(again))
    trueshard.shard(model, first)
    train(model, first, rank, world_size)


class Rarely(Made):
    """Draws random numbers at its 20th step."""

    def prepare(self) -> None:
        if self.param_groups[0].get("step", 0) == 19:
            torch.rand(())


@on_ranks(2)
def test_what_trying_could_not_see_is_found_when_it_happens(rank: int, world_size: int) -> None:
    model = build()
    optimizer = Rarely(model.parameters(), sign)
    trueshard.shard(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, rank, world_size, range(22))
    words = [str(each.message) for each in caught if "random numbers" in str(each.message)]
    assert len(words) == 1
    assert words[0].startswith("Rarely")


def test_torchs_own_are_known() -> None:
    """Not by trial, which cannot know that Muon reads its parameter as a factor alone."""
    matrix = nn.Parameter(torch.ones(2, 2))
    (muon,) = classify(torch.optim.Muon([matrix]))
    (adam,) = classify(torch.optim.AdamW([matrix]))
    assert muon.whole
    assert muon.decoupled
    assert adam.elementwise
    assert not adam.whole
