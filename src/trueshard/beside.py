"""What reads parameters beside ``forward``: other methods, submodules called from outside, and plain reading.

FSDP2 gathers for a unit's ``forward`` alone. Here each of the others becomes a pass of its own, or gathers as it reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.runtime import KEY, Runtime


def in_a_pass(
    runtime: Runtime, module: nn.Module, function: Callable[..., Any], gathered: Callable[..., Any]
) -> Callable[..., Any]:
    """``function``, so that outside a pass of ``module`` it is one itself.

    Args:
        module: the unit whose parameters it reads.
        function: what to call inside a pass.
        gathered: the same, behind FSDP2's forward hooks.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (runtime.depth and module is runtime.root) or _torch.in_pass(module):
            return function(*args, **kwargs)
        if module is not runtime.root:
            return gathered(*args, **kwargs)
        try:
            runtime.begin()
            output = gathered(*args, **kwargs)
            runtime.end(output)
            return output
        finally:
            runtime.leave()

    return call


def gather_in_methods(runtime: Runtime, module: ShardedModule, methods: Iterable[str]) -> None:
    """Make ``methods`` of a unit work like its forward."""
    for name in methods:
        function = getattr(module, name)
        register_fsdp_forward_method(module, name)
        gathered = module.__dict__.pop(name)
        module.__dict__[name] = in_a_pass(runtime, module, function, gathered)


def gather_in_submodules(runtime: Runtime) -> None:
    """Make the root's own layers work when they are called from outside a pass (``model.encoder(x)``)."""
    root: Any = runtime.root
    root.__dict__["_trueshard_call"] = lambda function, *args, **kwargs: function(*args, **kwargs)
    register_fsdp_forward_method(root, "_trueshard_call")
    behind_hooks = root.__dict__["_trueshard_call"]
    mine = {id(p) for module, parameters in runtime.units if module is runtime.root for p in parameters}
    for module in root.modules():
        direct = {id(p) for p in module._parameters.values()}
        if module is root or not direct & mine:
            continue
        forward = module.forward
        gathered = functools.partial(behind_hooks, forward)
        module.__dict__["forward"] = in_a_pass(runtime, root, forward, gathered)


def keep_gathered_in(runtime: Runtime, method: str) -> None:
    """Passes inside ``method`` of the root (a ``generate``) keep what the plan keeps; it is freed at its end."""
    function = getattr(runtime.root, method)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set(runtime.gathered())
        runtime.kept += 1
        try:
            return function(*args, **kwargs)
        finally:
            runtime.kept -= 1
            if not runtime.kept and not runtime.depth:
                runtime.free_but(before)

    runtime.root.__dict__[method] = call


class GatheredOnAccess(nn.Module):
    """Mixed into the class of a unit that holds parameters itself: reading one of them in a pass gathers it.

    Its forward does so by FSDP2's hooks; but ``F.linear(hidden, embedding.weight)`` reads it from outside, and some
    modules are never called at all (the output projection of ``nn.MultiheadAttention``).
    """

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, DTensor) and name in self._parameters and isinstance(self, ShardedModule):
            runtime = self.__dict__.get(KEY + "_root")
            if runtime is not None and (runtime.depth or _torch.in_backward()) and not runtime.gathering:
                runtime.gather_for_reader(self)
                return super().__getattr__(name)
        return value


def after_gathering(unit: nn.Module, function: Callable[[], Any]) -> Any:
    """Call ``function()`` when ``unit`` has gathered, before the user's own forward pre-hooks; returns the handle."""
    call = torch.compiler.disable(function)
    hooks: Any = unit._forward_pre_hooks
    gather = next(iter(hooks))  # FSDP2 puts its hook first
    handle = unit.register_forward_pre_hook(lambda *_: call() and None, prepend=True)
    hooks.move_to_end(gather, last=False)
    return handle


class CarryOnce:
    """At the first pass, gives the gathered parameter the attributes that the user set on the original.

    FSDP2 makes the gathered parameter when it gathers for the first time, and keeps that object.

    Args:
        module: the module that holds the parameter as ``attribute``.
        attribute: its attribute there.
        found: the user's attributes.
    """

    def __init__(self, module: nn.Module, attribute: str, found: dict[str, Any]) -> None:
        self.module, self.attribute, self.found = module, attribute, found

    def install(self, unit: nn.Module) -> None:
        """Wait for the first pass of ``unit``, which gathers the parameter."""
        self._handle = after_gathering(unit, self._carry)

    def _carry(self) -> None:
        gathered = self.module._parameters[self.attribute]
        if gathered is not None and not isinstance(gathered, DTensor):
            self._handle.remove()
            gathered.__dict__.update(self.found)
