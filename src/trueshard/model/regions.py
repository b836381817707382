"""Regions: which indices of a whole tensor a rank holds, for any placements of a DTensor.

A region has for each dimension its runs, (start, stop) in the order in which they lie in the rank's part. Rows that
FSDP2 cut are one run; a weight of which each rank has a slice of every packed half has two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch

Runs: TypeAlias = tuple[tuple[int, int], ...]
Region: TypeAlias = tuple[Runs, ...]


def rows_of(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (first row, rows) of ``total`` rows on ``rank`` by torch.chunk's rule, which FSDP2 follows.

    Equal pieces of ceil(total / ranks), the last ones shorter or empty.
    """
    piece = -(-total // ranks)
    start = min(piece * rank, total)
    return start, min(piece, total - start)


def region_of(
    tensor: torch.Tensor, coordinate: Sequence[int] | None = None, placements: Sequence[Any] | None = None
) -> Region:
    """Return the region of ``tensor`` at a coordinate of its mesh, or here; all of it if it is no DTensor.

    ``placements``: instead of the tensor's own. Raises ValueError for a partial sum.
    """
    if not isinstance(tensor, DTensor):
        return tuple(((0, size),) for size in tensor.shape)
    mesh = tensor.device_mesh
    here = coordinate_of(mesh) if coordinate is None else tuple(coordinate)
    placed = tensor.placements if placements is None else placements
    return placed_region(tuple(tensor.shape), tuple(placed), tuple(mesh.shape), here)


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's place along each dimension of a mesh."""
    return tuple(mesh.get_local_rank(dim) for dim in range(mesh.ndim))


@functools.lru_cache(maxsize=1 << 14)
def placed_region(
    shape: tuple[int, ...], placements: tuple[Any, ...], sizes: tuple[int, ...], here: tuple[int, ...]
) -> Region:
    """Return the region of a tensor with these placements, at coordinate ``here`` of a mesh of these sizes."""
    region: list[Runs] = [((0, size),) for size in shape]
    later: list[tuple[int, int]] = []
    for at, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(f"a tensor of shape {shape} is placed as {placement}, a partial sum")
        dim, factor = placement.dim % len(shape), _torch.split_factor(placement)
        if factor > 1 and not _is_packed(placements, at, sizes, len(shape)):
            later.append((dim, at))  # so FSDP2 says that it cuts what the later dimensions have cut before
        elif factor > 1:  # a part of each of several halves
            total = sum(stop - start for start, stop in region[dim])
            halves = [_chunk(region[dim], number, factor) for number in range(factor)] if total else [region[dim]]
            region[dim] = _joined(run for half in halves for run in _chunk(half, here[at], sizes[at]))
        else:
            region[dim] = _chunk(region[dim], here[at], sizes[at])
    for dim, at in reversed(later):
        region[dim] = _chunk(region[dim], here[at], sizes[at])
    return tuple(region)


def _is_packed(placements: Sequence[Any], at: int, sizes: Sequence[int], ndim: int) -> bool:
    """True if a rank has a part of each of several halves along one dimension of the mesh."""
    dim, factor = placements[at].dim % ndim, _torch.split_factor(placements[at])
    inner = math.prod(sizes[i] for i in range(at + 1, len(sizes)) if _cuts(placements[i], dim, ndim))
    return factor not in (1, inner)


def _cuts(placement: Any, dim: int, ndim: int) -> bool:
    return not placement.is_replicate() and not placement.is_partial() and placement.dim % ndim == dim


def _chunk(runs: Runs, rank: int, ranks: int) -> Runs:
    """Return the part of ``runs`` that torch.chunk gives one of ``ranks``."""
    skip, left = rows_of(sum(stop - start for start, stop in runs), rank, ranks)
    result = []
    for start, stop in runs:
        first = min(start + skip, stop)
        last = min(first + left, stop)
        skip -= first - start
        left -= last - first
        if last > first:
            result.append((first, last))
    return _joined(result)


def _joined(runs: Any) -> Runs:
    result: list[tuple[int, int]] = []
    for start, stop in runs:
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return tuple(result) or ((0, 0),)


def extent(region: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(sum(stop - start for start, stop in runs) for runs in region)


def common(one: Region, two: Region) -> Region:
    """Return the indices that are in both."""
    return tuple(
        _joined((max(a, c), min(b, d)) for a, b in mine for c, d in theirs if max(a, c) < min(b, d))
        for mine, theirs in zip(one, two, strict=True)
    )


def inside(region: Region, part: Region) -> Region:
    """Return where the indices of ``part``, all in ``region``, lie within the memory that holds ``region``."""
    return tuple(_joined(_within(runs, inner)) for runs, inner in zip(region, part, strict=True))


def _within(runs: Runs, inner: Runs) -> Iterator[tuple[int, int]]:
    for start, stop in inner:
        at = 0
        for first, last in runs:
            a, b = max(start, first), min(stop, last)
            if a < b:
                yield at + a - first, at + b - first
            at += last - first


def take(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the part of ``tensor`` in ``region``: a view where each dimension has one run."""
    for dim, runs in enumerate(region):
        if runs == ((0, tensor.shape[dim]),):
            continue
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in runs]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def put(tensor: torch.Tensor, region: Region, part: torch.Tensor) -> None:
    """Copy ``part`` to the indices of ``tensor`` in ``region``."""
    if not region:
        tensor.copy_(part)
    for block in product(*region):
        target, source = tensor, part
        for dim, (start, stop) in enumerate(block):
            before = sum(b - a for a, b in region[dim][: region[dim].index((start, stop))])
            target, source = target.narrow(dim, start, stop - start), source.narrow(dim, before, stop - start)
        target.copy_(source)


def rows_here(tensor: torch.Tensor, placements: tuple[Any, ...] | None = None) -> Runs:
    """Return the runs of rows that this rank holds, whole rows; a 0-dim tensor is one row.

    ``placements``: instead of the tensor's own. Raises ValueError where it holds parts of rows.
    """
    region = region_of(tensor, placements=placements)
    if any(runs != ((0, size),) for runs, size in zip(region[1:], tensor.shape[1:], strict=True)):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is cut inside its rows")
    return region[0] if region else ((0, 1),)


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """True if every rank holds whole rows."""
    if not isinstance(tensor, DTensor):
        return True
    sizes: Any = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return all(placement.is_replicate() or size == 1 or placement.dim % tensor.ndim == 0 for placement, size in sizes)


def has_one_run(tensor: torch.Tensor) -> bool:
    """True if every rank holds whole rows that follow one another."""
    if not isinstance(tensor, DTensor) or not has_whole_rows(tensor):
        return not isinstance(tensor, DTensor)
    placements, sizes = tensor.placements, tensor.device_mesh.shape
    cuts = [at for at, placement in enumerate(placements) if not placement.is_replicate() and sizes[at] > 1]
    return not any(_is_packed(placements, at, sizes, tensor.ndim) for at in cuts)


def replicated_dims(tensor: DTensor) -> list[int]:
    """Return the dimensions of the mesh along which ranks hold the same part."""
    return [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]


def copy_here(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of ``full``, the same on every rank and of the shape of ``target``."""
    _torch.local(target).copy_(take(full, region_of(target)))
