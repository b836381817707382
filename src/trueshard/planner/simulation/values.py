"""The numbers that a program reads back from small tensors, followed beside fake ones.

An optimizer asks how many steps it has made, a sharded step whether all counters are equal. Fake tensors have no
values, so small tensors whose values follow from constants (counters, flags) have real twins here. What depends on
data is unknown, and stands for itself by a usual value.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.planner.simulation.operations import run_operator, tensors_of
from trueshard.planner.simulation.selections import Selections

LARGEST = 32 << 10
"""Bytes of a storage up to which its values are followed."""

_MADE = {"zeros", "ones", "full", "arange", "scalar_tensor", "new_zeros", "new_ones", "new_full", "eye", "linspace"}
_SET = {"zero_", "fill_", "copy_"}
_SELDOM = {"ne", "isnan", "isinf", "isneginf", "isposinf"}
"""Comparisons that usually find nothing: what was remembered is as it was, and numbers are finite."""
_EXTREMES = {("max", "ge"), ("max", "gt"), ("amax", "ge"), ("amax", "gt"), ("min", "lt"), ("amin", "lt")}
"""A largest number compared with what it must stay below, a smallest one with what it must reach: checks of input."""
_PASSED_ON = {"any", "all", "bitwise_or", "bitwise_and", "logical_or", "logical_and", "clone", "view", "_to_copy"}
_UNREAD = {"allreduce_", "broadcast_", "wait_tensor", "_amp_foreach_non_finite_check_and_unscale_"}
"""Operations after which what is written to is taken to be as before: ranks agree, and nothing is infinite."""


class Values:
    """Real twins of small fake storages."""

    def __init__(self) -> None:
        self._twins: dict[int, torch.Tensor] = {}
        """By identity of the fake storage: its values, as a 1-D tensor of bytes."""
        self._seldom: set[int] = set()
        """Storages of unknown truth values that are usually false."""
        self._extremes: dict[int, str] = {}
        """By identity of a storage that holds a largest or smallest number: the operation that found it."""
        self.selections = Selections(self._twin)

    def forget(self, storage: int) -> None:
        """The storage is gone."""
        self._unknown(storage)
        self._extremes.pop(storage, None)
        self.selections.forget(storage)

    def _unknown(self, storage: int) -> None:
        """Nobody knows what is in the storage now."""
        self._twins.pop(storage, None)
        self._seldom.discard(storage)

    def run(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """``func`` on fake tensors, and on their twins where there are some.

        Args:
            func: the operator.
            args: its arguments.
            kwargs: the rest of them.
            inputs: the tensors among both.

        Returns:
            What it returned, and the tensors in that.
        """
        if self.selections.concerns(func, args):
            out, real = self.selections.run(func, args, kwargs)
            outputs = tensors_of([out])
            if real is not None:
                with _torch.real_tensors():
                    self._remember(outputs, _torch.tensors_in(real))
            return out, outputs
        out = run_operator(func, args, kwargs)
        outputs = tensors_of([out])
        self._follow(func, args, kwargs, inputs, outputs)
        return out, outputs

    def read(self, tensor: torch.Tensor) -> bool | int | float:
        """What ``tensor.item()`` returns: its value, or a usual one where it is unknown (0.5, 1, True;
        False if it says that numbers differ or are not finite)."""
        twin = self._twin(tensor) if _torch.is_fake(tensor) or tensor.is_meta else tensor
        if twin is not None:
            with _torch.real_tensors():
                return twin.item()
        if tensor.dtype == torch.bool:
            return _torch.storage_identity(tensor) not in self._seldom
        return 0.5 if tensor.is_floating_point() else 1

    def _follow(
        self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """After ``func`` ran on fake tensors: run it on the twins too, if all of its inputs have some."""
        name = func._schema.name.partition("::")[2]
        self._follow_truth(name, inputs, outputs)
        self.selections.follow(name, args, outputs)
        if name in _UNREAD or not self._concerns(name, inputs, outputs):
            return
        written = [tensor for tensor in inputs if _is_written(func, tensor, args, kwargs)]
        known = self._knows(name, inputs, written)
        if not known or torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in (*written, *outputs):
                self._unknown(_torch.storage_identity(tensor))
            return
        for tensor in written:
            if self._twin(tensor) is None:
                self._twins[_torch.storage_identity(tensor)] = _blank(tensor)
        with _torch.real_tensors():
            real_args, real_kwargs = _torch.map_only(torch.Tensor, self._twin_or_self, (args, kwargs))
            real = func(*real_args, **{**real_kwargs, **_on_cpu(real_kwargs)})
            self._remember(outputs, _torch.leaves_of(real))

    def _remember(self, outputs: list[torch.Tensor], values: list[Any]) -> None:
        for fake, value in zip(outputs, values, strict=False):
            key = _torch.storage_identity(fake)
            size = fake.untyped_storage().nbytes()
            if key not in self._twins and isinstance(value, torch.Tensor) and size <= LARGEST and _torch.is_fake(fake):
                self._twins[key] = _bytes_of(value, fake)

    def _follow_truth(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if name in ("max", "min", "amax", "amin"):
            self._extremes[_torch.storage_identity(outputs[0])] = name
        if len(outputs) != 1 or outputs[0].dtype != torch.bool:
            return
        passed = name in _PASSED_ON and any(_torch.storage_identity(each) in self._seldom for each in inputs)
        check = bool(inputs) and (self._extremes.get(_torch.storage_identity(inputs[0]), ""), name) in _EXTREMES
        if name in _SELDOM or passed or check:
            self._seldom.add(_torch.storage_identity(outputs[0]))

    def _concerns(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        if any(tensor.untyped_storage().nbytes() > LARGEST for tensor in outputs):
            return False
        if not inputs:
            return bool(outputs)
        return any(
            _torch.storage_identity(tensor) in self._twins or not _torch.is_fake(tensor) for tensor in inputs
        ) or (name in _SET)

    def _knows(self, name: str, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
        if not inputs:
            return name in _MADE
        read = inputs if name not in _SET else [each for each in inputs if not any(each is w for w in written)]
        if any(each.untyped_storage().nbytes() > LARGEST for each in inputs):
            return False
        whole = all(each.numel() * each.itemsize == each.untyped_storage().nbytes() for each in written)
        if name in _SET and not whole and any(self._twin(each) is None for each in written):
            return False
        return all(not _torch.is_fake(each) or self._twin(each) is not None for each in read)

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        memory = self._twins.get(_torch.storage_identity(tensor))
        if memory is None:
            return None
        if memory.numel() % tensor.itemsize:
            return None  # a view of a part, in another dtype
        with _torch.real_tensors():
            return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _twin_or_self(self, tensor: torch.Tensor) -> torch.Tensor:
        twin = self._twin(tensor)
        return tensor if twin is None else twin


def _is_written(func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
    for spec, value in zip(func._schema.arguments, args, strict=False):
        if (
            spec.alias_info is not None
            and spec.alias_info.is_write
            and any(x is tensor for x in _torch.leaves_of(value))
        ):
            return True
    return any(
        spec.alias_info is not None
        and spec.alias_info.is_write
        and spec.name in kwargs
        and any(x is tensor for x in _torch.leaves_of(kwargs[spec.name]))
        for spec in func._schema.arguments
    )


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}


def _blank(fake: torch.Tensor) -> torch.Tensor:
    with _torch.real_tensors():
        return torch.zeros(fake.untyped_storage().nbytes(), dtype=torch.uint8)


def _bytes_of(value: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """A copy of ``value`` laid out as ``fake`` lies in its storage."""
    memory = torch.zeros(fake.untyped_storage().nbytes(), dtype=torch.uint8)
    memory.view(fake.dtype).as_strided(fake.shape, fake.stride(), int(fake.storage_offset())).copy_(value)
    return memory


class Following(_torch.DispatchMode):
    """Inside, on fake tensors, ``values`` follows what runs before anything is recorded."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        if not _torch.makes_fake_tensors():
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.values.read(args[0])
        out, outputs = self.values.run(func, args, kwargs, tensors_of((*args, *kwargs.values())))
        for tensor in outputs:
            if _torch.is_fake(tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if key not in self._seen:
            self._seen.add(key)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._seen.discard(key)
        self.values.forget(key)
