"""This rank's shards of many tensors, sorted so that one operation and one collective serve all that are alike.

- Which ranks hold the other shards of a tensor is asked once for neighbours that are placed alike.
- FSDP2 reduces the gradients of a unit into one buffer, of which each gradient is a slice. Slices that follow one
  another in memory are one tensor to an operation that does not care where one ends: a *run*.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

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

_LONGEST = 1 << 20
"""elements in a run: for longer ones calls cost little, and sums in float32 lose digits"""


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
        """The memory of the shards in as few tensors as it has pieces, without empty ones.

        A shard that is there twice is in two runs.
        """
        shards = self.shards
        offsets: list[Any] = list(map(torch.Tensor.storage_offset, shards))
        counts = list(map(torch.Tensor.numel, shards))
        if not all(counts):
            shards = [shard for shard in shards if shard.numel()]
            offsets, counts = [shard.storage_offset() for shard in shards], [shard.numel() for shard in shards]
        if not any(offsets) or not all(map(torch.Tensor.is_contiguous, shards)):  # each begins a storage
            return shards
        addresses = list(map(torch.Tensor.data_ptr, shards))
        itemsize = shards[0].itemsize
        runs: list[list[int]] = []  # first shard, elements
        end = address = -1  # where the run so far ends: in elements of its storage, and in memory
        for i, (offset, count, start) in enumerate(zip(offsets, counts, addresses, strict=True)):
            # Both numbers together say that it is the same storage.
            if offset == end and start == address and runs[-1][1] + count <= _LONGEST:
                runs[-1][1] += count
            else:
                runs.append([i, count])
            end, address = offset + count, start + count * itemsize
        return [shards[i] if count == counts[i] else shards[i].as_strided((count,), (1,)) for i, count in runs]


def parts_of(tensors: Sequence[torch.Tensor]) -> list[Part]:
    """Plain tensors and DTensors by kind, in an order that is the same on every rank."""
    parts: dict[tuple[Cut, torch.dtype, torch.device], Part] = {}
    before, part = None, None
    for number, tensor in enumerate(tensors):
        shard = _torch.local(tensor)
        mesh, placements = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())
        kind = mesh, placements, shard.dtype, shard.device
        # Neighbours are mostly alike, and comparing them costs less than asking the mesh, or than hashing placements.
        if part is None or kind != before:
            before, cut = kind, cut_of(tensor)
            part = parts.setdefault((cut, shard.dtype, shard.device), Part(cut, shard.dtype, shard.device))
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
