"""Modules and their registries, hooks on gradients and optimizers, the running backward, process groups."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.hooks import RemovableHandle

#: The class of every batch normalisation, which torch exports under its subclasses only.
BatchNorm = nn.modules.batchnorm._BatchNorm


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the registry in which ``module`` itself holds its parameters.

    ``named_parameters(recurse=False)`` leaves out a tie's second name and None, and reading an attribute may run a
    user's ``__getattr__``; neither can be written.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the registry in which ``module`` itself holds its buffers."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the registry in which ``module`` holds its children; ``named_children`` leaves out a second name."""
    return module._modules


def every_module(root: nn.Module) -> list[nn.Module]:
    """Return every module at and below ``root`` once, in the order of ``root.modules()``, whatever that shows.

    Wrappers are among them. A loop: torch's own generator is one inside another for each level of the tree.
    """
    modules: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules[module] = None
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(modules)


def forward_pre_hooks(module: nn.Module) -> Any:
    """Return the forward pre-hooks of ``module`` in the order of their calls, which no public method changes."""
    return module._forward_pre_hooks


def count_forward_hooks(module: nn.Module) -> tuple[int, int]:
    """Return the number of forward hooks and of forward pre-hooks."""
    return len(module._forward_hooks), len(module._forward_pre_hooks)


def gradient_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return the hooks of ``register_hook`` and of ``register_post_accumulate_grad_hook`` by handle; None: never any.

    They are the very dictionaries that handles remove from.
    """
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


def set_gradient_hooks(tensor: torch.Tensor, hooks: tuple[Any, Any]) -> None:
    """Give ``tensor`` the dictionaries that ``gradient_hooks`` returned."""
    now = gradient_hooks(tensor)
    if now[0] is not hooks[0]:
        tensor._backward_hooks = hooks[0]
    if now[1] is not hooks[1]:
        tensor._post_accumulate_grad_hooks = hooks[1]


def call_first(tensor: torch.Tensor, handle: RemovableHandle) -> None:
    """Put one hook of ``register_post_accumulate_grad_hook`` before the others, where FSDP2 calls them in turn."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    hooks.move_to_end(handle.id, last=False)


def at_end_of_backward(function: Any) -> None:
    """Call ``function()`` once when the running backward has finished. FSDP2 itself has only this way."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """True if this thread runs a backward (activation recomputation included)."""
    return torch._C._current_graph_task_id() != -1


def make_hookable(optimizer: torch.optim.Optimizer) -> None:
    """Do what ``Optimizer.__init__`` does for step hooks; wrappers of optimizers often do not call it."""
    for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
        optimizer.__dict__.setdefault(f"_optimizer_{kind}_hooks", OrderedDict())
    if not getattr(type(optimizer).step, "hooked", False):
        optimizer._patch_step_function()


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """Return an optimizer's step pre-hooks and post-hooks in the order of their calls."""
    made: Any = optimizer
    return made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks


def wrapper_attribute(module: nn.Module) -> str | None:
    """Return the attribute under which a naming wrapper holds the user's module; None for any other module.

    ``torch.compile(module)``, activation checkpointing's ``checkpoint_wrapper`` and FSDP 1 put an attribute of their
    own into every name below them; no public function tells which.
    """
    # Asked through sys.modules: a module cannot be an OptimizedModule unless dynamo is imported, which costs a second.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
        return "_orig_mod"
    if isinstance(module, CheckpointWrapper):
        return "_checkpoint_wrapped_module"
    return "_fsdp_wrapped_module" if isinstance(module, FullyShardedDataParallel) else None


def renames_when_loading(wrapper: nn.Module) -> bool:
    """True if a naming wrapper itself puts its attribute into the keys of a state dict that is loaded."""
    return isinstance(wrapper, CheckpointWrapper)


COMPILED_CALL = "_compiled_call_impl"
"""Attribute in which ``module.compile()`` leaves what is called instead of the forward of that very module."""


def is_compiled_in_place(module: nn.Module) -> bool:
    """True after ``module.compile()``, which no public attribute shows."""
    return getattr(module, COMPILED_CALL) is not None


def store() -> Any:
    """Return the store through which the ranks of the default process group met."""
    return torch.distributed.distributed_c10d._get_default_store()


def collectives_begun() -> int:
    """Return how many collectives this rank has begun, over all process groups."""
    groups: list[Any] = list(torch.distributed.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def timeout_of(group: Any) -> Any:
    """Return the time limit that the user gave a process group; None if torch does not say."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None


def limit_alike(mesh: DeviceMesh) -> None:
    """Give the process groups of ``mesh`` the time limit of the default one.

    ``init_device_mesh`` makes them with torch's own limit, and takes no other.
    """
    if (limit := timeout_of(torch.distributed.group.WORLD)) is None:
        return
    for dim in range(mesh.ndim):
        for device in ("cpu", "cuda"):
            with contextlib.suppress(RuntimeError, AttributeError):  # no backend for this device, or a simulated one
                backend: Any = mesh.get_group(dim)._get_backend(torch.device(device))
                backend._set_default_timeout(limit)


def group_named(name: Any) -> torch.distributed.ProcessGroup:
    """Return the process group that a functional collective names."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)
