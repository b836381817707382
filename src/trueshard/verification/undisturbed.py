"""Whether something that should only read a training has changed it: every bit of this rank's part is compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trueshard.verification import states

Snapshot = dict[str, Any]


def snapshot(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Snapshot:
    """A copy of what this rank has: parameters, buffers, gradients, optimizer state, groups, modes, random state."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in _walk(model, optimizers)}


def changed(before: Snapshot, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """What is not as it was, in words."""
    after = dict(_walk(model, optimizers))
    words = [f"removed {key}" for key in before if key not in after]
    words += [f"made {key}" for key in after if key not in before]
    for key, value in before.items():
        if key in after and not _same(value, after[key]):
            words.append(f"changed {key}{_by(value, after[key])}")
    return words


def _walk(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield f"parameter {name!r}", states.local(parameter)
        yield f"requires_grad of {name!r}", parameter.requires_grad
        yield f"the gradient of {name!r}", None if parameter.grad is None else states.local(parameter.grad)
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", states.local(buffer)
    for name, value in states.state_of(model, optimizers).items():
        yield f"optimizer state {name!r}", states.local(value) if isinstance(value, torch.Tensor) else value
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{key!r} of optimizer {number}, group {place}", value
    for name, module in model.named_modules():
        yield f"the mode of module {name!r}", module.training
    yield "the random state", torch.get_rng_state()


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        unequal = one != two
        if one.is_floating_point():
            unequal &= ~(one.isnan() & two.isnan())
        return not bool(unequal.any())
    return type(one) is type(two) and bool(one is two or one == two)


def _by(one: Any, two: Any) -> str:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape and one.numel():
        return f" by up to {float((two.double() - one.double()).abs().max()):.3g}"
    return ""
