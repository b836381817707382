"""Fake tensors for many operators: a result is made again from what is remembered of one of like arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import (
    _DISPATCH_HANDLE_DIRECTLY,
    _DISPATCH_META_HANDLERS,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from trueshard._torch.tensors import storage_identity, tensors_in

#: What sees every operator that runs inside it; it has no public name.
DispatchMode = TorchDispatchMode


class SimulationMode(TorchDispatchMode):
    """A dispatch mode for many operators: nothing wraps its ``__torch_dispatch__`` to keep ``torch.compile`` out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _FakeTensorMode(SimulationMode, FakeTensorMode):
    """``FakeTensorMode`` without what it does around each operator for ``torch.compile``: wrappers, logs, counters.

    It remembers results by their operator's arguments, as torch's mode does, which takes most of an operator's time to
    tell arguments apart, and to make the tensors of a result. Of plain tensors with whole numbers for sizes less does
    the same, and more operators can be remembered: results that are several, views that torch calls unsafe, FSDP2's.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.results: dict[Any, _Make | None] = {}
        """Arguments, as ``key`` tells them apart → function that makes the result; None: it may not be remembered."""
        self._works: dict[Any, tuple[Any, bool]] = {}
        """Collective → the work that it returned, and whether its first argument comes with it."""
        self._attributes: dict[torch.device, Mapping[str, Any]] = {}
        """Attributes of a new fake tensor of a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERED:
            return self.dispatch(func, types, args, kwargs)
        key = self.key(func, args, kwargs)
        if key is None:
            return self._dispatch_impl(func, types, args, kwargs)
        if (make := self.results.get(key)) is not None:
            return make(args)
        result = self._viewed(func, args, kwargs) if func in _VIEWS else self._dispatch_impl(func, types, args, kwargs)
        if key not in self.results:
            self.results[key] = self._making(args, kwargs, result) if _may_be_remembered(func, args) else None
        return result

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a view by its kernel for meta tensors: what torch's tables of rules ask in the end."""
        tensor, *others = args
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        with torch._C._DisableTorchDispatch():
            made = func(_meta_over(tensor.untyped_storage(), tensor.dtype, layout), *others, **kwargs)
        if isinstance(made, torch.Tensor):
            return self.faked(made, tensor.fake_device)
        return [self.faked(part, tensor.fake_device) for part in made]

    def key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Return what tells a call's result from others'; None if there is an argument that is not plain."""
        parts = [func._op, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
        is_plain = self._told_apart(parts, args) and (not kwargs or self._told_apart(parts, kwargs))
        return tuple(parts) if is_plain else None

    def collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a collective of simulated ranks returns: its first argument, and a work that has ended."""
        if func not in self._works:
            result = func(*args, **kwargs)
            work = result[-1] if type(result) is tuple else result
            if type(work) is torch.ScriptObject and (work is result or _is_like(result[0], args[0])):
                self._works[func] = work, work is not result
            return result
        work, has_tensors = self._works[func]
        return (args[0], work) if has_tensors else work

    def _told_apart(self, parts: list[Any], args: Any) -> bool:
        """Append what tells ``args`` from others; False if there is one among them that is not plain."""
        parts += (type(args), len(args))
        if isinstance(args, dict):
            parts += args
            args = args.values()
        for argument in args:
            kind = type(argument)
            if kind is FakeTensor:
                if argument.fake_mode is not self or argument.constant is not None:
                    return False
                parts += _facts(argument)
            elif kind in _PLAIN:
                parts += (kind, argument)
            elif kind not in (list, tuple) or not self._told_apart(parts, argument):
                return False
        return True

    def _making(self, args: Any, kwargs: Any, result: Any) -> _Make | None:
        """Return what makes ``result`` again from like arguments; None if it cannot be made of what is known of it."""
        if result is None:
            return _nothing
        if type(result) not in (list, tuple):
            return self._making_tensor(args, kwargs, result)
        makes = [self._making_tensor(args, kwargs, tensor) for tensor in result]
        new = [storage_identity(tensor) for tensor, make in zip(result, makes, strict=True) if type(make) is _New]
        if None in makes or len(new) > len(set(new)):
            return None
        kind: Any = type(result)  # not the result itself, whose tensors would never be freed
        return lambda args: kind(make(args) for make in makes if make is not None)

    def _making_tensor(self, args: Any, kwargs: Any, tensor: Any) -> _Make | None:
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.requires_grad:
            return None
        for position, argument in enumerate(args):
            if argument is tensor:
                return operator.itemgetter(position)
        number = storage_identity(tensor)
        holds = [type(value) is FakeTensor and storage_identity(value) == number for value in args]
        nested = [value for value in args if isinstance(value, (list, tuple))]
        if any(storage_identity(other) == number for other in tensors_in([nested, *kwargs.values()])):
            return None
        make: _Make = _New(self, tensor)
        if any(holds):
            make = _View(self, tensor, holds.index(True))
        elif tensor.storage_offset():
            return None
        made = make(args)
        return make if _facts(made) == _facts(tensor) else None

    def faked(self, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return ``FakeTensor(self, tensor, device)`` of a meta tensor, with the attributes of the first one."""
        if (attributes := self._attributes.get(device)) is None:
            first = FakeTensor(self, tensor, device)
            self._attributes[device] = dict(vars(first))
            return first
        made: Any = torch.Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return cast(FakeTensor, made)


_Make = Callable[[Any], Any]
"""(arguments) → result."""


class _New:
    """Makes a tensor like one with memory of its own."""

    def __init__(self, mode: _FakeTensorMode, like: FakeTensor) -> None:
        self.mode, self.device, self.dtype = mode, like.fake_device, like.dtype
        self.shape, self.stride = like.shape, like.stride()

    def __call__(self, args: Any) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return self.mode.faked(made, self.device)


class _View:
    """Makes a tensor like one in the memory of an argument."""

    def __init__(self, mode: _FakeTensorMode, like: FakeTensor, position: int) -> None:
        self.mode, self.device, self.dtype = mode, like.fake_device, like.dtype
        self.position, self.layout = position, (like.storage_offset(), like.shape, like.stride())

    def __call__(self, args: Any) -> FakeTensor:
        memory = args[self.position].untyped_storage()
        with torch._C._DisableTorchDispatch():
            made = _meta_over(memory, self.dtype, self.layout)
        return self.mode.faked(made, self.device)


def _meta_over(memory: torch.UntypedStorage, dtype: torch.dtype, layout: tuple[Any, ...]) -> torch.Tensor:
    """Return a meta tensor in a storage; ``layout``: its offset, shape and stride."""
    return torch.empty(0, dtype=dtype, device="meta").set_(memory, *layout)


def _is_like(one: Any, other: Any) -> bool:
    """True if both are the same tensor, or nested lists of the same tensors."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_like, one, other))
    return one is other


def _nothing(args: Any) -> None:
    """Return the result of an operator that has none."""


def _facts(tensor: FakeTensor) -> tuple[Any, ...]:
    # The dispatch keys tell layout, conjugation, negation, quantisation and inference.
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.fake_device,
        torch._C._dispatch_keys(tensor).raw_repr(),
    )


def _may_be_remembered(func: Any, args: Any) -> bool:
    """True if an operator's result depends on nothing but what ``key`` knows of its arguments, which keep their shapes.

    Operators of users are not known to be so.
    """
    if func.namespace not in _KNOWN or torch.Tag.inplace_view in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:
        return not any(index is not None and index.dtype in (torch.bool, torch.uint8, torch.int8) for index in args[1])
    return torch.Tag.data_dependent_output not in func.tags and torch.Tag.dynamic_output_shape not in func.tags


_ATEN = torch.ops.aten
_VIEWS = {
    *(_ATEN.view.default, _ATEN.as_strided.default, _ATEN.detach.default, _ATEN.expand.default, _ATEN.t.default),
    *(_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.unsqueeze.default),
    *(_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unbind.int),
}
"""Views of their first argument."""
_KNOWN = ("aten", "prims", "fsdp", "_c10d_functional")
"""Namespaces of operators whose results may be remembered."""
_ANSWERED = {*_DISPATCH_META_HANDLERS, *_DISPATCH_HANDLE_DIRECTLY}
"""Questions about a tensor, which are no operators."""
_PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside, make tensors with a shape, a dtype, a device and a storage of their size, and no memory.

    ``FakeTensorMode`` is what ``torch.compile`` traces with; it has no public name.
    """
    return _FakeTensorMode()


def run_fake(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator for the dispatch mode that sees it, on fake tensors.

    A result that is remembered needs no dispatcher, which takes as long as making it.
    """
    mode = torch._C._get_dispatch_mode(_FAKE)
    if type(mode) is _FakeTensorMode and torch._C._len_torch_dispatch_stack() == 1:  # no other mode is to see it
        if func.namespace == "c10d":
            return mode.collective(func, args, kwargs)
        key = mode.key(func, args, kwargs)
        if key is not None and (make := mode.results.get(key)) is not None:
            return make(args)
    return func(*args, **kwargs)


_FAKE = torch._C._TorchDispatchModeKey.FAKE
