"""Operators whose results are as large as the data says: how large they usually are.

Fake tensors have no values. Where values are followed all the same (see ``values``), they decide. Elsewhere, tokens go
to experts in equal shares, and a mask selects everything. Both are said in a warning, which a forecast shows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trueshard import _torch

EQUAL_SHARES = "Which tokens go to which expert depends on data: all experts are taken to get equal shares."
EVERYTHING = "How many elements are selected depends on data: where that is unknown, all are taken to be."

_ATEN = torch.ops.aten
_INDICES = {"topk": 1, "sort": 1, "argsort": 0, "argmax": 0, "argmin": 0}
"""Operators that make indices along a dimension, and which of their results these are."""
_COPIES = {"_to_copy", "clone"}
_FOLLOWED = {*_INDICES, *_COPIES, "sum", "scatter", "scatter_", "eq", "ne", "gt"}
_TESTS = {("ne", 0), ("gt", 0), ("eq", 1)}
"""Comparisons that leave a mask what it was."""


class Selections:
    """What is known of indices and masks: how large an index can be, and which part of a mask is true."""

    def __init__(self, known: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """``known`` gives the values of a fake tensor, or None."""
        self._known = known
        self._below: dict[int, int] = {}
        """By identity of a storage of indices: the first number that they do not reach."""
        self._parts: dict[int, float] = {}
        """By identity of a mask's storage: which part of it is true."""

    def forget(self, storage: int) -> None:
        """The storage is gone."""
        self._below.pop(storage, None)
        self._parts.pop(storage, None)

    def follow(self, name: str, args: Any, outputs: Sequence[torch.Tensor]) -> None:
        """After the operator ``name`` ran: what is known of its results."""
        if name not in _FOLLOWED:
            return
        if name in _INDICES and len(outputs) > _INDICES[name]:
            self._below[_torch.storage_identity(outputs[_INDICES[name]])] = _size(args[0], _dim(name, args))
        elif name in _COPIES:
            self._copied(args[0], outputs[0])
        elif name == "sum":
            if _torch.storage_identity(args[0]) in self._parts:
                self._parts[_torch.storage_identity(outputs[0])] = 1.0  # every expert has some
        elif name in ("scatter", "scatter_") and outputs[0].dim():
            index, dim = args[2], args[1]
            below = self._below.get(_torch.storage_identity(index), _size(outputs[0], dim))
            self._parts[_torch.storage_identity(outputs[0])] = min(1.0, _size(index, dim) / max(1, below))
        elif name == "eq" and (below := self._below.get(_torch.storage_identity(args[0]), 0)):
            self._parts[_torch.storage_identity(outputs[0])] = 1 / below  # how fake tensors make one_hot, too
        elif not isinstance(args[1], torch.Tensor) and (name, args[1]) in _TESTS:
            self._copied(args[0], outputs[0])

    def _copied(self, source: torch.Tensor, result: torch.Tensor) -> None:
        for table in (self._below, self._parts):
            found = table.get(_torch.storage_identity(source))
            if found is not None:
                table[_torch.storage_identity(result)] = found  # type: ignore[assignment]

    def concerns(self, func: Any, args: Any) -> bool:
        """Whether the shapes of ``func``'s results depend on data."""
        if func is _ATEN.index.Tensor:
            return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        if func is _ATEN.repeat_interleave.Tensor:
            return len(args) < 2
        return func in _USUAL

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """``func`` on fake tensors, and its result's values where they are known, else None.

        Call it where ``concerns`` says so.
        """
        with _torch.real_tensors():
            real = self._really(func, args, kwargs)
        if real is not None:
            return _torch.map_only(torch.Tensor, _blank_like, real), real
        made = _USUAL[func](self, *args, **kwargs)
        return made, _every(args[0]) if func is _ATEN.nonzero.default and len(made) == args[0].numel() else None

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = {id(each): self._known(each) for each in _torch.tensors_in((args, kwargs))}
        if any(each is None for each in given.values()):
            return None
        return func(*_torch.map_only(torch.Tensor, lambda each: given[id(each)], args), **kwargs)

    def _count(self, mask: torch.Tensor) -> int:
        """How many elements of ``mask`` are true."""
        if (values := self._known(mask)) is not None:
            with _torch.real_tensors():
                return int(values.count_nonzero())
        part = self._parts.get(_torch.storage_identity(mask))
        warnings.warn(EVERYTHING if part is None else EQUAL_SHARES, stacklevel=2)
        return math.ceil(mask.numel() * (1.0 if part is None else part) - 1e-6)

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        count = self._count(mask)
        return torch.empty_strided((count, mask.dim()), (1, max(1, count)), dtype=torch.int64)

    def _index(self, source: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
        given: list[Any] = []
        for each in indices:
            is_mask = each is not None and each.dtype in (torch.bool, torch.uint8)
            given += self._nonzero(each).unbind(1) if is_mask else [each]
        found: torch.Tensor = _ATEN.index.Tensor(source, given)
        return found

    def _masked_select(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        times = math.prod(torch.broadcast_shapes(source.shape, mask.shape)) // max(1, mask.numel())
        return source.new_empty(self._count(mask) * times)

    def _repeat_interleave(self, repeats: torch.Tensor) -> torch.Tensor:
        warnings.warn(EVERYTHING, stacklevel=2)
        return repeats.new_empty(repeats.numel())

    def _unique(self, source: torch.Tensor, *options: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        """All are taken to be different."""
        warnings.warn(EVERYTHING, stacklevel=2)
        count = source.numel()
        return source.new_empty(count), *(source.new_empty(n, dtype=torch.int64) for n in (source.shape, (count,)))

    def _bincount(self, source: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
        below = self._below.get(_torch.storage_identity(source), 1)
        return source.new_empty(max(minlength, below), dtype=torch.int64 if weights is None else weights.dtype)

    def _ctc(self, scores: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Targets in one row for all samples are taken to be equally long. Source: ``ctc_loss_cpu`` of LossCTC.cpp."""
        times, samples = scores.shape[:2]
        longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // samples)
        return scores.new_empty(samples), scores.new_empty(samples, times, 2 * longest + 1)


_USUAL: dict[Any, Callable[..., Any]] = {
    _ATEN.nonzero.default: Selections._nonzero,
    _ATEN.index.Tensor: Selections._index,
    _ATEN.masked_select.default: Selections._masked_select,
    _ATEN.repeat_interleave.Tensor: Selections._repeat_interleave,
    _ATEN._unique2.default: Selections._unique,
    _ATEN.unique_consecutive.default: Selections._unique,
    _ATEN.bincount.default: Selections._bincount,
    _ATEN._ctc_loss.Tensor: Selections._ctc,
}


def _dim(name: str, args: Any) -> int:
    """Along which dimension indices run: what the operator was told, else the last."""
    place = 2 if name == "topk" else 1
    given = args[place] if len(args) > place else -1
    return given if isinstance(given, int) and not isinstance(given, bool) else -1


def _size(tensor: torch.Tensor, dim: int) -> int:
    return int(tensor.shape[dim]) if tensor.dim() else 1


def _blank_like(real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)


def _every(mask: torch.Tensor) -> torch.Tensor | None:
    """Indices of all elements of a small mask, as ``nonzero`` returns them."""
    if mask.numel() > 4096:
        return None
    with _torch.real_tensors():
        return torch.ones(mask.shape, dtype=torch.bool).nonzero()
