"""Modules that stand around the user's: compiled ones, and those that recompute activations."""

from __future__ import annotations

import sys

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper


def wrapper_attribute(module: nn.Module) -> str | None:
    """The attribute under which a naming wrapper holds the user's module, or None for any other module.

    ``torch.compile(module)`` and activation checkpointing's ``checkpoint_wrapper`` put an attribute of their own into
    every name below them; no public function tells which.
    """
    # Asked through sys.modules: a module cannot be an OptimizedModule unless dynamo is imported, which costs a second.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
        return "_orig_mod"
    if isinstance(module, CheckpointWrapper):
        return "_checkpoint_wrapped_module"
    return None


def renames_when_loading(wrapper: nn.Module) -> bool:
    """Whether a naming wrapper itself puts its attribute into the keys of a state dict that is loaded."""
    return isinstance(wrapper, CheckpointWrapper)


def is_compiled_in_place(module: nn.Module) -> bool:
    """True after ``module.compile()``, which no public attribute shows."""
    return module._compiled_call_impl is not None
