"""What an operator takes for itself on a CPU, as a script of allocations; and those of what counts and sorts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Result:
    """The operator allocates its result number ``index``."""

    index: int


Script: TypeAlias = list[int | Result]
"""An operator's steps: allocate bytes (> 0), free a block of that size (< 0), allocate a result."""
Rule: TypeAlias = Callable[[Any, Any, Sequence[torch.Tensor]], Script]
"""(arguments, named arguments, results) → script."""


def every(results: Sequence[torch.Tensor]) -> Script:
    """Allocate all results, and nothing else."""
    return [Result(i) for i in range(len(results))]


def within(taken: Iterable[int], inner: Script) -> Script:
    """Allocate, run the inner script, free in reverse order."""
    taken = [size for size in taken if size]
    return [*taken, *inner, *(-size for size in reversed(taken))]


def shift(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """A number of bits is a tensor. Source: ``__lshift__`` of BinaryOps.cpp."""
    return within([] if isinstance(args[1], torch.Tensor) else [args[0].itemsize], every(results))


def sort(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Indices are counted up, and copied to the result. Source: ``sort_stable_kernel`` of cpu/SortingKernel.cpp."""
    return [*every(results), *within([results[1].shape[-1] * 8 if results[1].ndim else 0], [])]


def bincount(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """The smallest and the largest value are looked at. Source: SummaryOps.cpp."""
    one = args[0].itemsize
    return [one, -one, one, -one, *every(results)]


def repeat_interleave(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Repetitions are added up. Source: ``repeat_interleave_common`` of Repeat.h."""
    return within([args[0].nbytes], every(results))


def histc(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Edges of the bins, and a count for each thread. Source: ``histogramdd_linear_kernel`` of Histogram.cpp.

    Where both ends are equal (one bin), those of the values are looked for: ``select_outer_bin_edges``, same file.
    """
    low, high = (args[place] if place < len(args) else kwargs.get(name, 0) for place, name in ((2, "min"), (3, "max")))
    edges = results[0].nbytes + results[0].itemsize
    found = within([args[0].itemsize] * 2, []) if low == high else []
    return [edges, *every(results), *found, *within([results[0].nbytes], []), -edges]


COUNTING: dict[str, Rule] = {
    "__lshift_": shift,
    "sort": sort,
    "bincount": bincount,
    "repeat_interleave": repeat_interleave,
    "histc": histc,
}
"""By the operator's name, without its last underscore."""
