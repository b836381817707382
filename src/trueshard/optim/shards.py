"""This rank's shards of many tensors, grouped so that one operation and one collective serve all that are alike.

FSDP2 reduces the gradients of a unit into one buffer, of which each gradient is a slice. Slices that follow one another
in memory are one tensor to an operation that does not care where one ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.distributed import all_reduce

Ranks: TypeAlias = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its dimensions over which a tensor is sharded."""


@dataclass
class ShardGroup:
    """Shards of tensors that are alike in dtype, device, and the ranks that hold the other shards."""

    ranks: Ranks | None
    """None: every rank has all of the tensor."""
    dtype: torch.dtype
    device: torch.device
    shards: list[torch.Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """The tensors' places in the list that was given."""

    @functools.cached_property
    def pieces(self) -> list[torch.Tensor]:
        """The memory of the shards in as few tensors as possible, without empty ones."""
        return contiguous_pieces(self.shards)


def group_shards(tensors: Sequence[torch.Tensor]) -> list[ShardGroup]:
    """Group plain tensors and DTensors by kind, in an order that is the same on every rank."""
    if (shards := _torch.shards_placed_alike(tensors)) is not None:
        first = shards[0]
        return [ShardGroup(sharded_over(tensors[0]), first.dtype, first.device, shards, list(range(len(shards))))]
    groups: dict[tuple[Ranks | None, torch.dtype, torch.device], ShardGroup] = {}
    for index, tensor in enumerate(tensors):
        shard = _torch.local(tensor)
        kind = sharded_over(tensor), shard.dtype, shard.device
        group = groups.setdefault(kind, ShardGroup(*kind))
        group.shards.append(shard)
        group.indices.append(index)
    return list(groups.values())


def sharded_over(tensor: torch.Tensor) -> Ranks | None:
    """Return the ranks that hold different parts of ``tensor``; None for a plain or replicated one."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    dims = (dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    sharding = tuple(dim for dim in dims if mesh.size(dim) > 1)
    return (mesh, sharding) if sharding else None


def all_reduce_over(ranks: Ranks, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Return ``values`` reduced over ``ranks``, on the device they came from."""
    mesh, dims = ranks
    return all_reduce(values, mesh, op, dims)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype in which ranks add: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def contiguous_pieces(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory of ``shards``, all of one dtype, in as few tensors as possible, in their order.

    Empty ones are left out; one that is given twice is in two pieces. What lies alone stays as it is, the rest is 1-D.
    """
    # In C, not in a loop: this is asked of hundreds of small tensors in every step.
    counts = list(map(torch.Tensor.numel, shards))
    if not all(counts):
        shards = [shard for shard in shards if shard.numel()]
        counts = [count for count in counts if count]
    if len(shards) < 2 or not all(map(torch.Tensor.is_contiguous, shards)):
        return list(shards)
    size = shards[0].itemsize
    starts = _torch.addresses(shards)
    ends = [start + count * size for start, count in zip(starts, counts, strict=True)]
    breaks = itertools.compress(range(1, len(shards)), map(operator.ne, ends, starts[1:]))
    pieces: list[torch.Tensor] = []
    for first, after in itertools.pairwise((0, *breaks, len(shards))):
        if after - first == 1:
            pieces.append(shards[first])
            continue
        try:
            pieces.append(_torch.flat_memory(shards[first], (ends[after - 1] - starts[first]) // size))
        except RuntimeError:  # neighbours by chance: the storage of the first ends before the last
            pieces += shards[first:after]
    return pieces


def concatenate(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return contiguous tensors as one 1-D tensor: a copy, or a view of the piece where there is only one."""
    if len(pieces) == 1:
        return pieces[0].view(-1)
    if pieces[0].dim() and len(set(map(torch.Tensor.dim, pieces))) == 1:
        with contextlib.suppress(RuntimeError):  # rows of one length: views of hundreds would cost more than the copy
            return torch.cat(list(pieces)).view(-1)
    return torch.cat([piece.view(-1) for piece in pieces])
