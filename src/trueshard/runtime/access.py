"""What the user's code reads from sharded tensors, and assigns to them, as if they were whole.

A rank has a part of a sum or a norm, so all ranks must read it, at the same place. Before they exchange their parts
they meet in the store that they were started with, not in a collective: a collective would pair with whatever the
others do next, and give a wrong number or wait for ever.
"""

from __future__ import annotations

import hashlib
import os
import sys
import types
import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from trueshard import _torch
from trueshard.distributed import is_simulated

_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))
_reads: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""Process group → ranks of a mesh → number of reads so far."""


def agree_to_read(value: DTensor) -> None:
    """Return when every rank of the mesh reads this number.

    Raises:
        RuntimeError: a rank reads another, or none until the process group's time limit.
    """
    mesh = value.device_mesh
    if is_simulated(mesh):
        return
    world, store = _torch.world(), _torch.store()
    ranks, mine, site = tuple(mesh.mesh.flatten().tolist()), dist.get_rank(), _site()
    counts = _reads.setdefault(world, Counter())
    counts[ranks] += 1
    place = f"trueshard/read/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    keys = {rank: f"{place}/{counts[ranks]}/{rank}" for rank in ranks}
    store.set(keys[mine], f"{site}|{tuple(value.shape)}|{value.dtype}|{value.placements}")
    limit = _torch.timeout_of(world) or timedelta(minutes=30)
    try:
        store.wait(list(keys.values()), limit)
    except RuntimeError:
        missing = [rank for rank in ranks if not store.check([keys[rank]])]
        raise RuntimeError(_words(site, f"ranks {missing} read none")) from None
    texts = dict(zip(ranks, store.multi_get(list(keys.values())), strict=True))
    for rank, text in texts.items():
        if text != texts[mine]:
            raise RuntimeError(_words(site, f"rank {rank} reads one at {text.decode().partition('|')[0]}"))
    # Whoever is here has left the read before it.
    store.delete_key(f"{place}/{counts[ranks] - 1}/{mine}")


def _site() -> str:
    """Return file and line of the user's code that is running."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "?" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@torch.no_grad()
def assign_data(tensor: DTensor, value: torch.Tensor) -> None:
    """Do ``tensor.data = value``: write the values of a DTensor, or of a whole plain tensor, into the shards.

    FSDP2 gathers from memory of its own, so the values are copied. Collective for a DTensor that is placed otherwise.

    Raises:
        RuntimeError: ``value`` has another shape or dtype.
    """
    given, own = ((tuple(each.shape), each.dtype) for each in (value, tensor))
    if given != own:
        raise RuntimeError(
            f"p.data = w: w has shape {given[0]} and {given[1]}, the whole parameter {own[0]} and {own[1]}. Assign "
            "a tensor of the parameter's own shape and dtype, or convert the model before shard()"
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    if isinstance(value, DTensor):
        part = value.redistribute(mesh, placements)
    else:
        part = distribute_tensor(value.to(_torch.local(tensor).device), mesh, placements, src_data_rank=None)
    _torch.local(tensor).copy_(_torch.local(part))


def _words(site: str, others: str) -> str:
    return (
        f"at {site} this rank reads a number of a sharded tensor, of which each rank has a part, and {others}: call "
        "full_tensor() on every rank, outside `if rank == 0`, and read the number of what it returns"
    )
