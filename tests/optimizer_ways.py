"""The ways in which optimizers are made, and in which a step of them is taken.

Most classes take parameter groups, and `step()` after a backward. The others wrap an optimizer, hold the model, call a
closure, need second derivatives, or make the backward themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import trueshard

Forward = Callable[[], torch.Tensor]
"""The loss of this rank's rows."""
Take = Callable[[nn.Module, list[Any], Forward], None]
"""One whole training step: from the forward to the last ``step()``; (model, optimizers, forward)."""
Make = Callable[[nn.Module, type[Any], dict[str, Any]], list[Any]]
"""The optimizers of a model; (model, class, options)."""

LEARNING_RATE = 0.05
"""Moves every parameter of the tiny model visibly, and is small enough that four steps do not amplify rounding."""
MAX_NORM = 2.0
"""Less than the norm of the tiny model's gradients ever is: every step clips."""


# Parameter groups


def groups(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups with every other parameter, of different settings where the class takes them."""
    members = list(model.parameters())
    found: list[dict[str, Any]] = [{"params": members[::2]}, {"params": members[1::2]}]
    rate = options.get("lr", LEARNING_RATE)
    if takes(cls, "lr"):
        found[0]["lr"], found[1]["lr"] = rate, rate / 2
    if takes(cls, "weight_decay") and "weight_decay" not in options:
        found[0]["weight_decay"], found[1]["weight_decay"] = 0.02, 0.2
    return found


def matrices_first(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and all else."""
    members = list(model.parameters())
    return [p for p in members if p.ndim == 2], [p for p in members if p.ndim != 2]


def takes(cls: type[Any], name: str) -> bool:
    """Whether the constructor has a parameter ``name``."""
    return name in inspect.signature(cls.__init__).parameters


# How an optimizer is made


def plainly(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """The class over two groups."""
    return [cls(groups(model, cls, options), **options)]


def from_model(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """The class over the model itself."""
    return [cls(model, **{"lr": LEARNING_RATE} | options)]


def with_matrices(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """The class over two groups of matrices, AdamW over the rest."""
    matrices, others = matrices_first(model)
    rate = options.get("lr", LEARNING_RATE)
    halves = [
        {"params": matrices[::2], "lr": rate, "weight_decay": 0.02},
        {"params": matrices[1::2], "lr": rate / 2, "weight_decay": 0.2},
    ]
    return [cls(halves, **options), AdamW(others, lr=LEARNING_RATE)]


def with_muon_groups(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """One optimizer in which groups say whether they are stepped as matrices."""
    members = list(model.parameters())
    return [
        cls(
            [
                {"params": [p for p in members if p.ndim > 1], "lr": 0.05, "weight_decay": 0.02, "use_muon": True},
                {"params": [p for p in members if p.ndim < 2], "lr": 0.02, "weight_decay": 0.2, "use_muon": False},
            ],
            **options,
        )
    ]


def with_low_rank_groups(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """Matrices are projected to rank 2, the rest is not."""
    matrices, others = matrices_first(model)
    projected = {"rank": 2, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
    first = {"params": matrices, "lr": LEARNING_RATE, "weight_decay": 0.02} | projected
    return [cls([first, {"params": others, "lr": LEARNING_RATE / 2, "weight_decay": 0.2}], **options)]


def from_groups(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """A wrapper that makes its own AdamW."""
    return [cls(groups(model, AdamW, {}), **options)]


def around_adamw(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """A wrapper around an AdamW of two groups."""
    return [cls(AdamW(groups(model, AdamW, {}), eps=1e-4), **options)]


def around_sgd(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """A wrapper around an SGD of two groups."""
    return [cls(SGD(groups(model, SGD, {}), momentum=0.9), **options)]


def around_one_group(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """A wrapper around an SGD of one group."""
    return [cls(SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9), **options)]


def with_base_class(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """A wrapper that makes its own SGD."""
    return [cls(groups(model, SGD, {}), SGD, momentum=0.9, **options)]


def with_model_and_base(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """A wrapper that takes the model, and makes its own SGD."""
    return [cls(model, groups(model, SGD, {}), SGD, momentum=0.9, **options)]


def with_schedule(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """A wrapper whose radius follows a learning rate schedule."""
    from pytorch_optimizer import ProportionScheduler

    base = SGD(groups(model, SGD, {}), momentum=0.9)
    rates = torch.optim.lr_scheduler.StepLR(base, 1, 0.9)
    radius = ProportionScheduler(rates, max_lr=LEARNING_RATE, max_value=0.1, min_value=0.01)
    return [cls(list(model.parameters()), base, model, radius, **options)]


def with_one_group(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """The class over all parameters alike."""
    return [cls(model.parameters(), **options)]


def with_max_rate(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """Two groups with a largest rate each."""
    first, second = groups(model, cls, options)
    return [cls([first | {"max_lr": 0.2}, second | {"max_lr": 0.1}], **options)]


def with_pairs(model: nn.Module, cls: type[Any], options: dict[str, Any]) -> list[Any]:
    """The two matrices of a low-rank product follow each other, AdamW has the rest."""
    matrices, others = matrices_first(model)
    return [cls(matrices[:2], lr=LEARNING_RATE, **options), AdamW([*matrices[2:], *others], lr=LEARNING_RATE)]


# How a step is taken


def clip(model: nn.Module) -> None:
    """At `MAX_NORM`, over all parameters and ranks."""
    trueshard.clip_grad_norm_(model.parameters(), MAX_NORM)


def mean(loss: torch.Tensor) -> torch.Tensor:
    """Over all ranks: what one device would return."""
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss


def by_step(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """Backward, clip, ``step()``, ``zero_grad()``."""
    forward().backward()
    clip(model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def closure_of(model: nn.Module, optimizer: Any, forward: Forward) -> Callable[[], torch.Tensor]:
    """Clears gradients, makes and clips new ones, returns the loss of the whole batch."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        clip(model)
        return mean(loss)

    return closure


def by_closure(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """``step(closure)`` alone."""
    (optimizer,) = optimizers
    optimizer.step(closure_of(model, optimizer, forward))
    optimizer.zero_grad()


def by_second_closure(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """Gradients at the present weights, then ``step(closure)`` for those at others."""
    (optimizer,) = optimizers
    closure = closure_of(model, optimizer, forward)
    closure()
    optimizer.step(closure)
    optimizer.zero_grad()


def by_pair_closure(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """The closure returns the outputs and the loss."""
    (optimizer,) = optimizers

    def closure() -> tuple[None, torch.Tensor]:
        with torch.enable_grad():
            return None, closure_of(model, optimizer, forward)()

    optimizer.step(closure)
    optimizer.zero_grad()


def by_loss(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """``step`` is told the loss."""
    (optimizer,) = optimizers
    loss = forward()
    loss.backward()
    clip(model)
    told = mean(loss).item()
    optimizer.step(lambda: told)
    optimizer.zero_grad()


def by_graph(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """The backward's graph is kept, for second derivatives."""
    (optimizer,) = optimizers
    forward().backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()


def by_fused_backward(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """Parameters are updated within the backward."""
    (optimizer,) = optimizers
    optimizer.fused_backward(forward(), lr=LEARNING_RATE)


def by_two_losses(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """Gradients of two tasks are made to agree."""
    (optimizer,) = optimizers
    loss = forward()
    optimizer.pc_backward([loss, (loss - 1.0).square()])
    clip(model)
    optimizer.step()
    optimizer.zero_grad()


def by_scaled_backward(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """The optimizer scales the loss and clips."""
    (optimizer,) = optimizers
    optimizer.backward(forward())
    optimizer.clip_main_grads(MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def by_sparse_gradients(model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
    """Gradients are sparse when ``step()`` is called."""
    forward().backward()
    clip(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_sparse() if parameter.ndim else None
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
