"""Gradient hooks of the user, and parameters that only some ranks reached.

``GradientHooks``: a hook means the gradient of the global batch, as on one device. FSDP2 drops hooks, and reduces after
autograd has called its own; so hooks are called here, on the whole reduced gradient, which costs one all-gather of the
hooked parameter. The dictionaries of hooks stay torch's, so a handle made before sharding still removes.

``Usage``: FSDP2 reduces the gradients that a rank has, packed together. If ranks reached different parameters (an
expert without a token), the packs do not fit, or worse, fit by accident.

- Units that hold a list of modules (experts) are reduced whole, with zeros for a missing gradient, which is exact. A
  parameter that no rank reached keeps its gradient None, as on one device: one small all-reduce a backward tells.
- Anywhere else a rank that misses a gradient compares with the others, and a difference is an error. If all packs fit
  by accident, all ranks miss some; so no rank waits for one that has nothing to compare.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import all_reduce, device_of, gather_objects


@torch.no_grad()
def add_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Add ``grad``, placed like ``parameter``, to ``parameter.grad`` on local shards."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        _torch.local(parameter.grad).add_(_torch.local(grad))


def call_after_gradient(parameter: torch.Tensor, method: Callable[[torch.Tensor], Any]) -> RemovableHandle:
    """Call a bound method when ``parameter``'s gradient is accumulated, as long as something else holds its object.

    Python frees no circle through a hook of ``register_post_accumulate_grad_hook``: one that holds what reaches the
    model would keep the model for ever.
    """
    weak = weakref.WeakMethod(method)

    def hook(tensor: torch.Tensor) -> None:
        if (alive := weak()) is not None:
            alive(tensor)

    return parameter.register_post_accumulate_grad_hook(hook)


class GradientHooks:
    """The user's hooks on one parameter, in torch's own dictionaries; ``gathers``: gather the gradient for them."""

    def __init__(self, original: torch.Tensor, gathers: bool = False) -> None:
        self.before, self.after = _torch.gradient_hooks(original)
        self.gathers = gathers
        self._earlier: torch.Tensor | None = None
        """Gradient of earlier backwards, between the beginning of a backward and the reduction."""

    @staticmethod
    def on(tensor: torch.Tensor) -> bool:
        return any(_torch.gradient_hooks(tensor))

    def transform(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the full gradient as the hooks of ``register_hook`` leave it."""
        for hook in list((self.before or {}).values()):
            with torch.no_grad():
                answer = hook(grad)
            grad = grad if answer is None else answer
        return grad

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Call the hooks of ``register_post_accumulate_grad_hook``."""
        for hook in list((self.after or {}).values()):
            hook(parameter)

    def set_aside(self, parameter: torch.Tensor) -> None:
        """Move accumulated gradients aside, before a reduction: hooks see this backward's gradient alone."""
        if self.gathers and parameter.grad is not None:
            self._earlier, parameter.grad = parameter.grad, None

    def reduced(self, parameter: torch.Tensor) -> None:
        """Call the hooks: FSDP2 has put the reduced gradient into the sharded ``parameter``."""
        grad = parameter.grad
        if self.gathers and isinstance(grad, DTensor):
            full = self.transform(grad.full_tensor())
            parameter.grad = distribute_tensor(full, grad.device_mesh, grad.placements, src_data_rank=None)
        self.put_back(parameter)
        self.accumulated(parameter)

    def put_back(self, parameter: torch.Tensor) -> None:
        """Add this backward's gradient, if any, to what was set aside."""
        if self._earlier is not None:
            grad, parameter.grad, self._earlier = parameter.grad, self._earlier, None
            if grad is not None:
                add_gradient(parameter, grad)


class HookedParameters:
    """Sharded parameters on which the user set gradient hooks."""

    def __init__(self) -> None:
        self.units: set[ShardedModule] = set()
        """Units that hold one: they reduce in every backward, since a hook means the global gradient."""
        self._hooks: dict[int, tuple[torch.Tensor, GradientHooks]] = {}
        """``id`` of a parameter → the parameter, and its hooks."""

    def add(self, parameter: torch.Tensor, hooks: GradientHooks, unit: ShardedModule) -> None:
        """Call ``hooks`` whenever the gradient of the sharded ``parameter`` of ``unit`` is reduced."""
        self._hooks[id(parameter)] = parameter, hooks
        trainable = parameter.requires_grad
        # torch takes such hooks on trainable tensors only; a frozen one may be unfrozen later.
        handle = call_after_gradient(parameter.requires_grad_(True), hooks.reduced)
        parameter.requires_grad_(trainable)
        _torch.call_first(parameter, handle)
        self.units.add(unit)

    def adopt(self, units: Mapping[ShardedModule, Sequence[torch.Tensor]]) -> None:
        """Take over hooks set on shards after ``shard()``: FSDP2 writes their gradients, so autograd calls none."""
        for unit, parameters in units.items():
            for parameter in parameters:
                if _torch.gradient_hooks(parameter)[0] and id(parameter) not in self._hooks:
                    hooks = GradientHooks(parameter, gathers=True)
                    hooks.after = None  # FSDP2 calls those itself
                    self.add(parameter, hooks, unit)

    def begin(self) -> None:
        """Begin a backward."""
        for parameter, hooks in self._hooks.values():
            hooks.set_aside(parameter)

    def end(self) -> None:
        """End a backward, or give it up."""
        for parameter, hooks in self._hooks.values():
            hooks.put_back(parameter)


class Usage:
    """Tracks which parameters of one sharded model get gradients."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._lists: list[tuple[ShardedModule, list[nn.Parameter]]] = []
        """Units that hold a list of modules, with their sharded parameters: reduced whole."""
        self._elsewhere: list[tuple[str, nn.Parameter]] = []
        """All other sharded parameters: ranks must reach the same ones."""
        self._marked: dict[int, int] = {}
        """Identity of each gathered parameter that has a hook → that of its shards."""
        self._used: set[int] = set()
        """Identity of the shards that this backward reached on this rank."""
        self._empty: set[int] | None = None
        """Identity of shards without a gradient when the first backward since the last reduction began; None: none."""

    def add(self, module: ShardedModule, parameters: Sequence[tuple[str, nn.Parameter]], *, holds_list: bool) -> None:
        """Track the sharded ``parameters`` of a unit; ``holds_list``: of which ranks may use different ones."""
        if holds_list and self.mesh.size() > 1:
            _torch.reduce_unused(module)
            self._lists.append((module, [parameter for _, parameter in parameters]))
        elif self.mesh.size() > 1:
            self._elsewhere += parameters

    def begin(self) -> None:
        if self._empty is None:
            self._empty = {id(p) for _, parameters in self._lists for p in parameters if p.grad is None}
        for _, sharded, gathered in _torch.gathered_parameters(module for module, _ in self._lists):
            if gathered.requires_grad and id(gathered) not in self._marked:
                self._marked[id(gathered)] = id(sharded)
                call_after_gradient(gathered, self._mark)

    def _mark(self, gathered: torch.Tensor) -> None:
        self._used.add(self._marked[id(gathered)])

    def end(self) -> None:
        """End a backward that reduced gradients; raise if ranks reached different parameters. May be collective."""
        self._forget_zeros()
        missing = [name for name, parameter in self._elsewhere if parameter.requires_grad and parameter.grad is None]
        if missing and len(missing) < len(self._elsewhere):
            self._compare(missing)

    def forget(self) -> None:
        """Drop the record of a backward that was cut short."""
        self._used.clear()
        self._empty = None

    def _forget_zeros(self) -> None:
        empty, self._empty = self._empty, None
        parameters = [p for _, parameters in self._lists for p in parameters if p.requires_grad]
        if empty is None or not parameters:
            return
        used = torch.tensor([id(p) in self._used for p in parameters], dtype=torch.uint8, device=device_of(self.mesh))
        reached = all_reduce(used, self.mesh, dist.ReduceOp.MAX).tolist()
        for parameter, flag in zip(parameters, reached, strict=True):
            if not flag and id(parameter) in empty:
                parameter.grad = None
        self._used.clear()

    def _compare(self, missing: list[str]) -> None:
        digest = int.from_bytes(hashlib.sha256("\n".join(missing).encode()).digest()[:7], "big")
        both = torch.tensor([digest, -digest], dtype=torch.int64, device=device_of(self.mesh))
        most, least = all_reduce(both, self.mesh, dist.ReduceOp.MAX).tolist()
        if most == -least:
            return
        everyone: list[Any] = gather_objects(missing, self.mesh)
        name = next(name for name in sorted(set().union(*everyone)) if not all(name in names for names in everyone))
        without = [rank for rank, names in enumerate(everyone) if name in names]
        raise RuntimeError(
            f"{name!r} got a gradient on some ranks but not on ranks {without}, so this step's gradients are mixed up: "
            "let every rank use the same parameters (add 0 * module(x).sum() where one is skipped)"
        )
