"""This rank's shards of many tensors, sorted so that one operation and one collective serve all that are alike.

- Which ranks hold the other shards of a tensor is asked once for neighbours that are placed alike.
- FSDP2 reduces the gradients of a unit into one buffer, of which each gradient is a slice. Slices that follow one
  another in memory are one tensor to an operation that does not care where one ends: a *run*.
"""

from __future__ import annotations

import functools
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
        """The memory of the shards in as few tensors as it has pieces; a shard that is there twice is in two runs."""
        runs: list[tuple[torch.Tensor, int]] = []
        end = -1  # where the run so far ends, in elements of its storage; what is no slice of another never fits
        for shard in self.shards:
            offset, count = shard.storage_offset(), shard.numel()
            if offset == end and _follows(shard, *runs[-1]):
                first, so_far = runs[-1]
                runs[-1] = first, so_far + count
            else:
                runs.append((shard, count))
            end = offset + count
        return [first if first.numel() == count else first.as_strided((count,), (1,)) for first, count in runs]


def _follows(shard: torch.Tensor, first: torch.Tensor, count: int) -> bool:
    """Whether ``shard`` goes on where the run of ``count`` elements that begins with ``first`` ends."""
    return (
        shard.data_ptr() == first.data_ptr() + count * first.itemsize
        and first.is_contiguous()
        and shard.is_contiguous()
        and count + shard.numel() <= _LONGEST
    )


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
