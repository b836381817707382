"""This rank's shards of many tensors, sorted so that one operation and one collective serve all that are alike.

- Which ranks hold the other shards of a tensor is asked once for neighbours that are placed alike.
- FSDP2 reduces the gradients of a unit into one buffer, of which each gradient is a slice. Slices that follow one
  another in memory are one tensor to an operation that does not care where one ends: a *run*.
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
from trueshard.distributed import device_of

Ranks: TypeAlias = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its dimensions over which a tensor is in shards."""
Cut: TypeAlias = Ranks | None
"""None: every rank has all of the tensor."""


@dataclass
class Part:
    """Shards of tensors that are alike in dtype, device, and the ranks that hold the other shards."""

    cut: Cut
    dtype: torch.dtype
    device: torch.device
    shards: list[torch.Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """The tensors' places in the list that was given."""

    @functools.cached_property
    def runs(self) -> list[torch.Tensor]:
        """The memory of the shards in as few tensors as it has pieces, without empty ones."""
        return runs_of(self.shards)


def runs_of(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of ``shards``, all of one dtype, in as few tensors as it has pieces, in their order.

    Empty ones are left out; one that is there twice is in two runs. What lies alone stays as it is, the rest is 1-D.
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
    runs: list[torch.Tensor] = []
    for first, after in itertools.pairwise((0, *breaks, len(shards))):
        if after - first == 1:
            runs.append(shards[first])
            continue
        try:
            runs.append(shards[first].as_strided(((ends[after - 1] - starts[first]) // size,), (1,)))
        except RuntimeError:  # neighbours by chance: the storage of the first ends before the last
            runs += shards[first:after]
    return runs


def flat(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """1-D: copies of contiguous tensors behind one another; the piece itself where it is the only one."""
    if len(pieces) == 1:
        return pieces[0].view(-1)
    if pieces[0].dim() and len(set(map(torch.Tensor.dim, pieces))) == 1:
        with contextlib.suppress(RuntimeError):  # rows of one length: views of hundreds would cost more than the copy
            return torch.cat(list(pieces)).view(-1)
    return torch.cat([piece.view(-1) for piece in pieces])


def parts_of(tensors: Sequence[torch.Tensor]) -> list[Part]:
    """Plain tensors and DTensors by kind, in an order that is the same on every rank."""
    if (shards := _torch.shards_placed_alike(tensors)) is not None:
        first = shards[0]
        return [Part(cut_of(tensors[0]), first.dtype, first.device, shards, list(range(len(shards))))]
    parts: dict[tuple[Cut, torch.dtype, torch.device], Part] = {}
    for number, tensor in enumerate(tensors):
        shard = _torch.local(tensor)
        kind = cut_of(tensor), shard.dtype, shard.device
        part = parts.setdefault(kind, Part(*kind))
        part.shards.append(shard)
        part.numbers.append(number)
    return list(parts.values())


def cut_of(tensor: torch.Tensor) -> Cut:
    """Over which ranks ``tensor`` is in parts; None for a plain or replicated one."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    dims = (dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    cut = tuple(dim for dim in dims if mesh.size(dim) > 1)
    return (mesh, cut) if cut else None


def reduce_over(values: torch.Tensor, cut: Ranks, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """``values``, summed (or what else ``op`` says) over the ranks of ``cut``, on the device they came from."""
    mesh, dims = cut
    # Shards that rest in host memory are not what an accelerator's collectives take.
    reduced = values.to(device_of(mesh))
    for dim in dims:
        dist.all_reduce(reduced, op=op, group=mesh.get_group(dim))
    return reduced.to(values.device)


def wide(device: torch.device) -> torch.dtype:
    """The dtype in which ranks add: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
