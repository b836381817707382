"""Functions of torch that are replaced while this process has sharded models; each patch returns what undoes it.

``sharding/process_patches.py`` lists them all, says why each cannot be left to one model, and how far each reaches.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor

from trueshard._torch.capabilities import IS_2_11

Undo = Callable[[], None]


def replace(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute of a class or module. Undoing leaves it if somebody else has put a function over ours since."""
    inherits = name not in vars(owner)
    before = None if inherits else vars(owner)[name]
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if inherits:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def together(*undos: Undo) -> Undo:
    """Return what undoes several patches, the last one first."""
    stack = contextlib.ExitStack()
    for undo in undos:
        stack.callback(undo)
    return stack.close


def hide_worker() -> None:
    """Let ``get_worker_info()`` return None in this process: a stream that asks splits itself. Only torch sets it."""
    torch.utils.data._utils.worker._worker_info = None


def call_after_zero_grad(function: Callable[[Any], None]) -> Undo:
    """Call ``function(self)`` after ``zero_grad`` of any optimizer or module, for which torch has no hook."""

    def patch(cls: Any) -> Undo:
        inner = cls.zero_grad

        @functools.wraps(inner)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            inner(self, *args, **kwargs)
            function(self)

        return replace(cls, "zero_grad", zero_grad)

    return together(patch(torch.optim.Optimizer), patch(nn.Module))


def check_replicas(check: Callable[[nn.Module], None]) -> Undo:
    """Call ``check(module)`` before ``DistributedDataParallel`` wraps a module, of which it asks nothing."""
    cls = nn.parallel.DistributedDataParallel
    inner = cls.__init__

    @functools.wraps(inner)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        check(module)
        inner(self, module, *args, **kwargs)

    return replace(cls, "__init__", init)


def differentiate_with(differentiate: Callable[..., Any]) -> Undo:
    """Let ``autograd.grad()`` and ``backward(inputs=)`` for parameters or DTensors call ``differentiate``.

    It is called with the engine, and torch's ``inputs``, ``create_graph``, ``allow_unused`` and ``accumulate_grad``.
    The engine takes inputs, ``allow_unused`` and ``accumulate_grad``. All public entrances call one private function.
    """
    inner: Any = torch.autograd._engine_run_backward

    @functools.wraps(inner)
    def run(
        outputs: Any,
        grads: Any,
        retain: bool,
        create: bool,
        inputs: Any = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        def engine(inputs: Any, allow_unused: bool, accumulate: bool) -> Any:
            return inner(outputs, grads, retain, create, tuple(inputs), allow_unused, accumulate_grad=accumulate)

        if not any(isinstance(tensor, nn.Parameter | DTensor) for tensor in inputs):
            return engine(inputs, allow_unreachable, accumulate_grad)
        return differentiate(engine, inputs, create, allow_unreachable, accumulate_grad)

    return replace(torch.autograd, "_engine_run_backward", run)


def check_functional_calls(check: Callable[[nn.Module, Mapping[str, torch.Tensor]], None]) -> Undo:
    """Call ``check(module, tensors)`` before ``torch.func.functional_call``, for which torch has no hook."""
    stateless: Any = torch.nn.utils.stateless
    inner = stateless._functional_call

    @functools.wraps(inner)
    def call(module: nn.Module, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        check(module, tensors)
        return inner(module, tensors, *args, **kwargs)

    return replace(stateless, "_functional_call", call)


def complete_units() -> Undo:
    """Let units take forward-mode derivatives through their inputs, and on torch 2.11 frozen parameters of integers.

    torch lacks the rule for the former (before 2.13), or gives one that returns no view, which autograd refuses.
    """
    undos = [replace(_fsdp_param_group.RegisterPostBackwardFunction, "jvp", staticmethod(_tangents))]
    if IS_2_11:
        initialise = _fsdp_param.FSDPParam.init_dtype_attrs

        def without_casts(self: Any, policy: MixedPrecisionPolicy) -> None:
            initialise(self, policy if self.sharded_param.is_floating_point() else MixedPrecisionPolicy())

        names = types.SimpleNamespace(**{**vars(nn), "Parameter": _parameter})
        undos += [replace(_fsdp_param, "nn", names), replace(_fsdp_param.FSDPParam, "init_dtype_attrs", without_casts)]
    return together(*undos)


def _tangents(ctx: Any, group: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


def _parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
    """Make a parameter for FSDP2's file, which says only afterwards that one of integers requires no grad."""
    return nn.Parameter(data, requires_grad and (data.is_floating_point() or data.is_complex()))
