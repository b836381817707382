"""What the tests of optimizer steps share: a model whose shards are uneven, its batches, and two ways to be exact.

- ``same``: a case on several ranks gives what it gives on one process, where nothing is sharded.
- ``Twin``: a plain copy of the parameters, stepped by an optimizer of its own with the very same gradients. It tells an
  inexact step from an inexact gradient, so it holds to the last bits where compute is in low precision.
- Optimizers that the library cannot know: by the element (``OwnSGD``), by the whole tensor (``Whole``), or both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import trueshard
from gathering import parameters, whole
from parity import Ranks, assert_same

SAMPLES = 12
"""rows of the global batch: divides by 1, 2, 3 and 4 ranks"""
EPS = 1e-3
"""Adam's, large enough that float32 sums in another order stay small in the update"""


class Layer(nn.Module):
    """The repeated unit: a matrix of 5 rows, one of 7, their biases, and a gate without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.down(torch.tanh(self.up(x)))


class Uneven(nn.Module):
    """No parameter's rows divide by 2, 3 or 4. ``aside`` takes no part in a forward that does not ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.aside = nn.Linear(7, 7)
        self.last = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor, aside: bool = True) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x + torch.tanh(self.aside(x)) if aside else x)


def build(dtype: torch.dtype = torch.float32) -> Uneven:
    torch.manual_seed(0)
    return Uneven().to(dtype)


def batch(step: int, rank: int, world_size: int) -> torch.Tensor:
    """This rank's rows of step ``step``'s batch, [SAMPLES / world_size, 6]."""
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]


def loss_of(model: nn.Module, step: int, rank: int, world_size: int, aside: bool = True) -> torch.Tensor:
    x = batch(step, rank, world_size).to(next(model.parameters()).dtype)
    return (model(x, aside) - x.sum(-1, keepdim=True)).square().mean()


def train(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    rank: int,
    world_size: int,
    steps: Sequence[int] = range(3),
) -> None:
    """Forward, backward, step and ``zero_grad`` for each number in ``steps``; in odd ones ``aside`` has no gradient."""
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for step in steps:
        loss_of(model, step, rank, world_size, aside=step % 2 == 0).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def told(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and, of element-wise optimizers, state dicts: what is the same however many ranks there are."""
    found = [each.state_dict() for each in optimizers]
    state = [each | {"state": dict(sorted(each["state"].items()))} for each in found]
    return {"parameters": parameters(model), "state": state}


def same(
    case: Callable[..., Any],
    alone: Ranks,
    sizes: Sequence[Ranks],
    *args: Any,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """``case(rank, world_size, *args)`` on each of ``sizes`` gives what it gives on one process."""
    (expected,) = alone.run(case, *args)
    for ranks in sizes:
        for found in ranks.run(case, *args):
            assert_same(found, expected, rtol=rtol, atol=atol)


def shard_over(world_size: int, model: nn.Module, *optimizers: torch.optim.Optimizer, **words: Any) -> None:
    """Shard on several ranks; one is the plain PyTorch that they are held against."""
    if world_size > 1:
        trueshard.shard(model, *optimizers, **words)


def accumulate(model: nn.Module, last: bool, gradients: Any = None) -> contextlib.AbstractContextManager[None]:
    """`trueshard.accumulate`; nothing for a model that is not sharded."""
    if not isinstance(model, FSDPModule):
        return contextlib.nullcontext()
    return trueshard.accumulate(model, last=last, gradients=gradients)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


class Twin:
    """Plain whole copies of a model's parameters, updated by an optimizer of their own.

    Args:
        model: before it is sharded.
        make: the optimizer, from (name, parameter) pairs.
    """

    def __init__(self, model: nn.Module, make: Callable[[list[tuple[str, nn.Parameter]]], Any]) -> None:
        self.parameters = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
        self.optimizer = make(list(self.parameters.items()))

    def step(self, model: nn.Module) -> None:
        """With the gradients that ``model`` has now."""
        for name, grad in whole({n: p.grad for n, p in model.named_parameters()}).items():
            self.parameters[name].grad = grad
        self.optimizer.step()

    def compare(self, case: str, model: nn.Module, rtol: float = 0.0, atol: float = 0.0) -> None:
        expected = {name: p.detach() for name, p in self.parameters.items()}
        assert_same({case: parameters(model)}, {case: expected}, rtol=rtol, atol=atol)


def shown(optimizer: torch.optim.Optimizer) -> None:
    """Nothing of a step is left: groups and state hold DTensors, and every tensor key of the state is a parameter."""
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(isinstance(p, DTensor) for p in members)
    known = {id(p) for p in members}
    assert all(id(key) in known for key in optimizer.state if isinstance(key, torch.Tensor))


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Two groups of different settings, the second in reverse order."""
    members = list(model.parameters())
    groups = [{"params": members[::2]}, {"params": members[1::2][::-1], "lr": 0.02, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, **{"lr": 0.01, "eps": EPS} | options)


class ByParameter(torch.optim.Optimizer):
    """Updates one parameter after the other; calls its closure inside the step, and counts its steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"lr": lr} | settings)

    def prepare(self) -> None:
        """Do what comes before the updates of a step."""

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, self.state[p])
        return loss


class OwnSGD(ByParameter):
    """Element-wise, unknown to the library."""

    calls, fail_at = 0, -1

    def prepare(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ArithmeticError("as told")

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.5)
        p.sub_(state["mean"], alpha=group["lr"] * getattr(p, "rate", 1.0))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda model: adamw(model),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.05),
    "own": lambda model: OwnSGD(model.parameters()),
}


class Whole(ByParameter):
    """Divides rows and columns by their norms and scales by the parameter's own: no element is updated by itself.

    Keeps state of a parameter's shape, of one row, of one column, and of none.
    """

    def __init__(self, params: Any, lr: float = 0.05, trust: bool = True) -> None:
        super().__init__(params, lr, trust=trust)

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["mean"] = torch.zeros_like(p)
            state["sums"] = {"row": p.new_zeros(p.shape[:1]), "column": p.new_zeros(p.shape[-1:])}
            state["seen"] = []
        state["seen"].append(group["step"])
        state["mean"].lerp_(p.grad, 0.5)
        update = state["mean"].clone()
        if p.ndim == 2:
            state["sums"]["row"].add_(update.norm(dim=1))
            state["sums"]["column"].add_(update.norm(dim=0))
            update /= state["sums"]["row"][:, None] + state["sums"]["column"] + 0.1
        scale = group["lr"] / (1 + 0.1 * group["step"]) / (update.norm() + 0.1)
        p.sub_(scale * (p.norm() + 0.1) * update if group["trust"] else scale * update)


class Mixed(ByParameter):
    """Groups of two kinds in one class, as Muon's forks have: `whole` ones by the tensor, the others by the element."""

    def __init__(self, groups: Any, lr: float = 0.05) -> None:
        super().__init__(groups, lr, whole=False)

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p))
        mean.lerp_(p.grad, 1 / group["step"])
        scale = mean.norm() + 0.1 if group["whole"] else mean.abs() + 0.1
        p.sub_(group["lr"] * mean / scale)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


WHOLE: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "Muon": lambda m: [torch.optim.Muon(matrices(m), lr=0.05), torch.optim.SGD(vectors(m), lr=0.05)],
    "Muon, two groups": lambda m: [
        torch.optim.Muon(
            [{"params": matrices(m)[:2][::-1], "lr": 0.1}, {"params": matrices(m)[2:], "weight_decay": 0.5}],
            lr=0.05,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
        )
    ],
    "Adafactor": lambda m: [
        torch.optim.Adafactor(
            [{"params": matrices(m)}, {"params": vectors(m), "lr": 0.02, "weight_decay": 0.1}], lr=0.05
        )
    ],
    "Whole": lambda m: [Whole(m.parameters())],
    "Whole, two groups": lambda m: [
        Whole([{"params": vectors(m)}, {"params": matrices(m)[::-1], "lr": 0.1, "trust": False}])
    ],
    "Mixed": lambda m: [Mixed([{"params": matrices(m), "whole": True}, {"params": vectors(m)}])],
}
