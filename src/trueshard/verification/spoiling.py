"""Gives everything that a checkpoint holds another value, so that a load has to bring all of it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trueshard.names import unwrap
from trueshard.verification import states


@torch.no_grad()
def spoil(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Change this rank's part of all parameters, persistent buffers, optimizer state and numbers of groups."""
    for value in unwrap(model).state_dict(keep_vars=True).values():
        if isinstance(value, torch.Tensor):
            _change(value)
    for value in states.state_of(model, optimizers).values():
        if isinstance(value, torch.Tensor):
            _change(value)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({key: _other(value) for key, value in group.items() if key != "params"})


def _change(tensor: torch.Tensor) -> None:
    local = states.local(tensor)
    if local.dtype == torch.bool:
        local.logical_not_()
    else:
        local.add_(1)


def _other(value: Any) -> Any:
    if isinstance(value, float):
        return value / 2
    if isinstance(value, tuple) and value and all(isinstance(each, float) for each in value):
        return tuple(each / 2 for each in value)
    return value
