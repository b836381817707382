"""Which rows of a tensor are on this rank, which bytes of the whole these are, and which rank writes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from trueshard import _torch
from trueshard.distributed import rows_of


def rows_here(tensor: torch.Tensor) -> tuple[int, int]:
    """(first row, rows) of this rank's piece; a 0-dim or plain tensor is whole everywhere, a 0-dim one is one row."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, rows
    mesh, start, count = tensor.device_mesh, 0, rows
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            if placement.dim != 0:
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is cut along dimension {placement.dim}")
            first, count = rows_of(count, mesh.get_local_rank(dim), mesh.size(dim))
            start += first
        elif not placement.is_replicate():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is placed as {placement}, a partial sum")
    return start, count


def placement(tensor: torch.Tensor) -> str:
    """How a tensor is spread, in a word."""
    return str(tensor.placements) if isinstance(tensor, DTensor) else "plain"


def bytes_here(tensor: torch.Tensor, nbytes: int | None = None) -> tuple[int, int]:
    """(begin, end) of this rank's piece among the bytes of the whole, row after row.

    Args:
        tensor: any; ``nbytes``: of the whole where it is stored, if that is in another dtype.
    """
    start, rows = rows_here(tensor)
    size = tensor.dtype.itemsize if nbytes is None else nbytes // max(tensor.numel(), 1)
    width = math.prod(tensor.shape[1:]) * size
    return start * width, (start + rows) * width


def is_writer(tensor: torch.Tensor, number: int) -> bool:
    """Whether this rank is the one to write its piece, among those that hold the same.

    Args:
        tensor: a DTensor.
        number: its place in the list of tensors; ranks take turns.
    """
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    dims = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(dim) == number % mesh.size(dim) for dim in dims)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of this rank's piece, row after row; its own memory where that is on the CPU and in order."""
    local = _torch.local(tensor).detach().cpu().contiguous()
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    elements: Any = local.view(-1).view(torch.uint8).numpy()
    return memoryview(elements)


def is_unpadded(tensor: DTensor) -> bool:
    """Whether this rank's shard is as large as every other's, so that FSDP2 keeps it as it is, without padding."""
    dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tensor.ndim > 0 and tensor.shape[0] % math.prod(tensor.device_mesh.size(dim) for dim in dims) == 0
