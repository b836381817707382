"""Gradient hooks of the user, and parameters that only some ranks reached.

``GradientHooks``: a hook means the gradient of the global batch, as on one device. FSDP2 drops hooks, and reduces after
autograd has called its own; so hooks are called here, on the whole reduced gradient, which costs one all-gather of the
hooked parameter. The dictionaries of hooks stay torch's, so a handle made before sharding still removes.

``Usage``: FSDP2 reduces the gradients that a rank has, packed together. If ranks reached different parameters (an
expert without a token), the packs do not fit, or worse, fit by accident.

- Units that hold a list of modules (experts) are reduced whole, with zeros for a missing gradient, which is exact; so
  are those that reduce each microbatch of a step (``accumulation.py``). A parameter that no rank reached keeps its
  gradient None, as on one device: one small all-reduce a step tells. It also tells if ranks have reduced these units in
  different orders, whose packs would fit.
- Anywhere else a rank that misses a gradient compares with the others, and a difference is an error. If all packs fit
  by accident, all ranks miss some; so no rank waits for one that has nothing to compare.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import all_reduce, device_of, gather_objects
from trueshard.errors import TrueShardRuntimeError


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
            parameter.grad = _torch.cut_like(full, grad)
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
        self._units: dict[ShardedModule, list[tuple[str, nn.Parameter]]] = {}
        """Unit → its sharded parameters with their names, in one order on all ranks."""
        self._numbers: dict[ShardedModule, int] = {}
        """Unit → its place among all."""
        self._lists: set[ShardedModule] = set()
        """Units that hold a list of modules: reduced whole in every backward."""
        self._filled: set[ShardedModule] = set()
        """Units that are reduced whole in each microbatch of this step."""
        self._empty: dict[ShardedModule, set[int]] = {}
        """Unit that is reduced whole → ``id`` of its shards without a gradient when the step's first backward began."""
        self._used: set[int] = set()
        """``id`` of the shards of these units of which this rank has reduced a gradient in this step."""
        self._order: list[int] = []
        """Numbers of these units in the order in which this rank has reduced them in this step."""

    def add(self, module: ShardedModule, parameters: Sequence[tuple[str, nn.Parameter]], *, holds_list: bool) -> None:
        """Track the sharded ``parameters`` of a unit; ``holds_list``: of which ranks may use different ones."""
        if self.mesh.size() > 1:
            self._numbers[module], self._units[module] = len(self._units), list(parameters)
            if holds_list:
                self._lists.add(module)

    def fill(self, units: Collection[ShardedModule]) -> None:
        """Reduce ``units`` whole until a backward has reduced the last microbatch of this step."""
        self._filled.update(unit for unit in units if unit in self._units)

    def fills(self, unit: ShardedModule) -> bool:
        """Return True if a unit reduces zeros for a parameter that this rank did not use."""
        return unit in self._lists or unit in self._filled

    def reduces(self, unit: ShardedModule, used: Iterable[nn.Parameter]) -> None:
        """Take note that a unit is reduced whole, with gradients of the parameters ``used``."""
        self._used.update(map(id, used))
        self._order.append(self._numbers[unit])

    def begin(self) -> None:
        """Begin a backward."""
        for unit in self._units:
            if self.fills(unit) and unit not in self._empty:
                self._empty[unit] = {id(p) for _, p in self._units[unit] if p.grad is None}

    def end(self) -> None:
        """End a backward that reduced gradients; raise if ranks reached different parameters. May be collective."""
        try:
            if self._empty:
                self._forget_zeros()
        finally:
            self.forget()
        rest = [member for unit, members in self._units.items() if unit not in self._lists for member in members]
        missing = [name for name, parameter in rest if parameter.requires_grad and parameter.grad is None]
        if missing and len(missing) < len(rest):
            self._compare(missing)

    def forget(self, of: Collection[int] | None = None) -> None:
        """Drop the record of this step, whose gradients were dropped; ``of``: of parameters with these ids alone."""
        if of is None:
            self._used, self._empty, self._filled, self._order = set(), {}, set(), []
            return
        self._used.difference_update(of)
        for unit, empty in self._empty.items():
            empty |= {id(p) for _, p in self._units[unit] if id(p) in of}

    def has_sums(self, but: Collection[int]) -> bool:
        """Return True if a unit that reduces each microbatch has a gradient, but of parameters with these ids."""
        members = (p for unit in self._filled for _, p in self._units[unit])
        return any(p.grad is not None and id(p) not in but for p in members)

    def _forget_zeros(self) -> None:
        parameters = [p for unit in self._empty for _, p in self._units[unit] if p.requires_grad]
        if not parameters:
            return
        # A byte a parameter, and eight that are alike on all ranks if the largest are the smallest, too.
        digest = hashlib.sha256(repr(self._order).encode()).digest()[:8]
        flags = [*(id(p) in self._used for p in parameters), *digest, *(255 - byte for byte in digest)]
        sent = torch.tensor(flags, dtype=torch.uint8, device=device_of(self.mesh))
        reached = all_reduce(sent, self.mesh, dist.ReduceOp.MAX).tolist()
        if any(most + other != 255 for most, other in zip(reached[-16:-8], reached[-8:], strict=True)):
            self._refuse_orders()
        empty = set().union(*self._empty.values())
        for parameter, flag in zip(parameters, reached, strict=False):
            if not flag and id(parameter) in empty:
                parameter.grad = None

    def _refuse_orders(self) -> None:
        orders: list[list[int]] = gather_objects(self._order, self.mesh)
        place = next(i for i, numbers in enumerate(itertools.zip_longest(*orders)) if len(set(numbers)) > 1)
        numbers = [order[place] if place < len(order) else None for order in orders]
        unit = list(self._units)[next(number for number in numbers if number is not None)]
        name = self._units[unit][0][0] if self._units[unit] else "?"
        raise TrueShardRuntimeError(
            f"ranks reduced gradients in different orders, the unit of {name!r} where others had another: this step's "
            "gradients are mixed up. Let every rank use the same units in backward (add 0 * output.sum() where one is "
            "skipped)"
        )

    def _compare(self, missing: list[str]) -> None:
        digest = int.from_bytes(hashlib.sha256("\n".join(missing).encode()).digest()[:7], "big")
        both = torch.tensor([digest, -digest], dtype=torch.int64, device=device_of(self.mesh))
        most, least = all_reduce(both, self.mesh, dist.ReduceOp.MAX).tolist()
        if most == -least:
            return
        everyone: list[Any] = gather_objects(missing, self.mesh)
        name = next(name for name in sorted(set().union(*everyone)) if not all(name in names for names in everyone))
        without = [rank for rank, names in enumerate(everyone) if name in names]
        raise TrueShardRuntimeError(
            f"{name!r} got a gradient on some ranks but not on ranks {without}, so this step's gradients are mixed up: "
            "let every rank use the same parameters (add 0 * module(x).sum() where one is skipped)"
        )
