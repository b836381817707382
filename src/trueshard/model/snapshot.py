"""Snapshots of a model and its optimizers, from which a failed ``shard()`` is undone.

``Snapshot`` remembers objects, not copies of data: what ``fully_shard`` and the hooks around it change are the module's
class, entries of its ``__dict__``, hooks, and which tensor a parameter points at. ``Trace`` is the difference between
two moments; with it a sharded model can be looked at as it was, which is how it is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trueshard import _torch

#: nn.Module's own containers: the object stays, its content is remembered.
_CONTAINERS = frozenset(key for key, value in nn.Module().__dict__.items() if isinstance(value, (dict, set)))
_HOOKS = frozenset(key for key in _CONTAINERS if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")))


def _refill(holder: Any, content: Any) -> None:
    """Put back what a dictionary or a set held; the object stays."""
    holder.clear()
    holder.update(content)


class ModuleState:
    """The present class, attributes and containers of one module, which ``shard()`` may change."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.cls, self.attributes = module, type(module), dict(module.__dict__)
        held = [(key, self.attributes[key]) for key in _CONTAINERS if key in self.attributes]
        # Nearly all are empty: copies of them would be most of what a snapshot of many small modules takes.
        self.contents = {key: content.copy() if content else () for key, content in held}

    def restore(self) -> None:
        object.__setattr__(self.module, "__class__", self.cls)
        _refill(self.module.__dict__, self.attributes)
        for key, content in self.contents.items():
            _refill(self.attributes[key], content)


class _TensorState:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.data, self.attributes = tensor, tensor.data, dict(tensor.__dict__)
        self.hooks = _torch.gradient_hooks(tensor)
        self.grad = tensor.grad if tensor.is_leaf else None

    def restore(self) -> None:
        self.tensor.data = self.data
        _refill(self.tensor.__dict__, self.attributes)
        _torch.set_gradient_hooks(self.tensor, self.hooks)
        if self.tensor.is_leaf:
            self.tensor.grad = self.grad


class Snapshot:
    """The state of ``model`` and ``optimizers`` when it is made."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self.modules = module_states(model)
        modules = [state.module for state in self.modules]
        held = [t for m in modules for t in (*_torch.own_parameters(m).values(), *_torch.own_buffers(m).values())]
        tensors = {id(tensor): tensor for tensor in held if tensor is not None}
        for optimizer in optimizers:
            for entries in optimizer.state.values():
                values = entries.values() if isinstance(entries, dict) else ()
                tensors |= {id(value): value for value in values if isinstance(value, torch.Tensor)}
        grads = [tensor.grad for tensor in tensors.values() if tensor.is_leaf and tensor.grad is not None]
        tensors |= {id(grad): grad for grad in grads}
        self.tensors = [_TensorState(tensor) for tensor in tensors.values()]
        self.groups = [(group, list(group["params"])) for o in optimizers for group in o.param_groups]
        self.holders: list[tuple[Any, dict[Any, Any]]] = []
        """Attributes, state and hooks of optimizers, each with what it holds."""
        for optimizer in optimizers:
            hooks = [value for key, value in vars(optimizer).items() if key.endswith("_hooks")]
            self.holders += [(holder, dict(holder)) for holder in (vars(optimizer), optimizer.state, *hooks)]

    def restore(self) -> None:
        """Restore everything."""
        _torch.forget(state.module for state in self.modules)
        for module in self.modules:
            module.restore()
        for tensor in self.tensors:
            tensor.restore()
        for group, parameters in self.groups:
            group["params"][:] = parameters
        for holder, content in self.holders:
            _refill(holder, content)


def module_states(model: nn.Module) -> list[ModuleState]:
    """Return the state of every module, wrappers included, whatever ``named_modules`` shows."""
    return list(map(ModuleState, _torch.every_module(model)))


class Trace:
    """The changes to modules since their state was taken; it keeps no tensor alive."""

    def __init__(self, before: Sequence[ModuleState]) -> None:
        self._modules: list[tuple[nn.Module, type, set[str], dict[str, Any], dict[str, set[Any]]]] = []
        for state in before:
            held = state.module.__dict__
            added = held.keys() - state.attributes.keys()
            changed = {
                key: value
                for key, value in state.attributes.items()
                if held.get(key) is not value and key not in _CONTAINERS
            }
            hooks = {
                key: set(held[key]).difference(content)
                for key, content in state.contents.items()
                if held[key] and key in _HOOKS
            }
            if added or changed or any(hooks.values()) or type(state.module) is not state.cls:
                self._modules.append((state.module, state.cls, added, changed, hooks))

    @contextlib.contextmanager
    def undone(self, model: nn.Module) -> Iterator[None]:
        """Inside, undo the changes to the modules of ``model``, which keep the tensors that they have now."""
        now = module_states(model)
        try:
            for module, cls, added, changed, hooks in self._modules:
                object.__setattr__(module, "__class__", cls)
                for key in added:
                    module.__dict__.pop(key, None)
                module.__dict__.update(changed)
                for key, ids in hooks.items():
                    for handle in ids:
                        module.__dict__[key].pop(handle, None)
            yield
        finally:
            for state in now:
                state.restore()
