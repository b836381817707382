"""What an operator does with memory until it returns, as data: the words in which rules are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Result:
    """Here an operator makes its result number ``index``."""

    index: int


Script: TypeAlias = list[int | Result]
"""What an operator does in turn: takes bytes (> 0), gives a block of that size back (< 0), makes a result."""
Rule: TypeAlias = Callable[[Any, Any, Sequence[torch.Tensor]], Script]
"""(arguments, named arguments, results) → script."""

SMALL = (torch.bfloat16, torch.float16)
"""Floats that are added up in float32."""


def every(results: Sequence[torch.Tensor]) -> Script:
    """All results, and nothing else."""
    return [Result(i) for i in range(len(results))]


def within(taken: Iterable[int], inner: Script) -> Script:
    """Take, do what is inside, give back in turn."""
    taken = [size for size in taken if size]
    return [*taken, *inner, *(-size for size in reversed(taken))]


def size_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of a tensor's elements, in its dtype or another."""
    return int(tensor.numel()) * (dtype or tensor.dtype).itemsize


def accumulated(tensor: torch.Tensor) -> int:
    """Bytes of a number in which small floats are added up."""
    return max(4, tensor.itemsize)


def summed_apart(tensor: torch.Tensor, dims: Sequence[int], made: torch.Tensor) -> Script:
    """What a sum of small floats takes beside its result, where the dimensions lie apart.

    Source: ``should_use_acc_buffer`` of ReduceOps.cpp.
    """
    reduced = {dim % tensor.dim() for dim in dims if tensor.shape[dim] > 1}
    apart = sum(dim - 1 not in reduced for dim in reduced)
    if tensor.dtype not in SMALL or apart < 2:
        return []
    cast = size_of(tensor, torch.float32)
    return within([size_of(made, torch.float32)], [cast, -cast])
