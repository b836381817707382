"""Hooks on gradients, on optimizers, and at the end of a backward."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether ``register_post_accumulate_grad_hook`` was called on ``tensor`` (and its handle not removed)."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def call_first(tensor: torch.Tensor, handle: RemovableHandle) -> None:
    """Put one hook of ``register_post_accumulate_grad_hook`` before the others, where FSDP2 calls them in turn."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    hooks.move_to_end(handle.id, last=False)


def at_end_of_backward(function: Any) -> None:
    """Call ``function()`` once when the running backward has finished. FSDP2 itself has only this way."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Whether this thread runs a backward now (activation recomputation included)."""
    return torch._C._current_graph_task_id() != -1


def make_hookable(optimizer: torch.optim.Optimizer) -> None:
    """What ``Optimizer.__init__`` does for step hooks; wrappers of optimizers often do without it."""
    for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
        optimizer.__dict__.setdefault(f"_optimizer_{kind}_hooks", OrderedDict())
    if not getattr(type(optimizer).step, "hooked", False):
        optimizer._patch_step_function()
