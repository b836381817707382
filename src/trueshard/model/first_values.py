"""Initialise tensors on the meta device: find their initialisers, and detect tensors that none has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trueshard import _torch

_UNWRITTEN = 0xA5
"""Byte that fills an unwritten tensor."""


def initialisers(root: nn.Module) -> dict[int, Callable[[nn.Module], Any]]:
    """Return ``id`` of a module → the ``_init_weights`` of the nearest transformers model around it."""
    found: dict[int, Callable[[nn.Module], Any]] = {}
    for owner in root.modules():  # from the outside inwards
        own = getattr(owner, "_init_weights", None)
        if callable(own) and isinstance(getattr(owner, "base_model_prefix", None), str):
            found |= {id(module): own for module in owner.modules()}
    return found


def mark_unwritten(tensor: torch.Tensor) -> None:
    """Fill the memory of a tensor, or of its local shard, with bytes that no initialisation writes throughout."""
    _bytes(tensor).fill_(_UNWRITTEN)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """True if nothing was written to a tensor since ``mark_unwritten``."""
    return bool((_bytes(tensor) == _UNWRITTEN).all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    local = _torch.local(tensor)
    return torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
