"""Process group and mesh: the user's, or made where there is none.

- With a launcher's environment (``torchrun``) the group it describes is joined; without one, a group of one rank is
  made, so that the same script runs in a notebook. A group made here is closed at exit.
- The mesh is on the accelerator where there is one and the process group can use it, else on the CPU.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trueshard import _torch

_OTHER_AXES = {"tp", "cp", "sp", "ep", "pp", "tensor", "context", "sequence", "expert", "experts", "pipeline", "stage"}
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_process_group(timeout: datetime.timedelta | None = None, store: dist.Store | None = None) -> None:
    """Initialise the default process group if the user has not; ``store``: where launched ranks meet.

    Raises RuntimeError if the environment describes a launcher only in part.
    """
    if dist.is_initialized():
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if missing and "RANK" in os.environ:
        raise RuntimeError(f"RANK is set but {', '.join(missing)} is not: start through torchrun, or unset RANK")
    launched = not missing
    backend = "gloo"
    if accelerator is not None:
        if launched and "LOCAL_RANK" in os.environ:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        # Both: what rests on the CPU (offload) is reduced there.
        backend = f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
    rank, ranks = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched else (0, 1)
    store = store if launched else dist.HashStore()
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks)
    atexit.register(_close)


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def _settle_at_exit() -> None:
    """Let gloo's threads drop the tensors of the last collective before the interpreter ends.

    They need the interpreter's lock for it, may come to it a moment after the collective is done, and abort the process
    if the interpreter is gone by then (torch 2.13, with or without sharding). Sleeping gives them the lock.
    """
    atexit.register(time.sleep, 0.1)


def ensure_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return ``mesh`` itself after a check of its type, dimensions and their names, or a 1-D mesh over all ranks."""
    _settle_at_exit()
    if mesh is None:
        ensure_process_group()
        return init_device_mesh(_device_type(), (dist.get_world_size(),), mesh_dim_names=("shard",))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh must be 1-D (shard) or 2-D (replicate, shard), not {mesh.ndim}-D; slice it by name")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError('a 2-D mesh needs names: init_device_mesh(..., mesh_dim_names=("replicate", "shard"))')
    for number, name in enumerate(mesh.mesh_dim_names or ()):
        is_other = bool(_OTHER_AXES & set(name.lower().split("_"))) or (number == 1 and "replica" in name)
        if mesh.ndim == 2 and is_other:
            raise ValueError(
                f"a 2-D mesh has dimensions for copies and shards, in this order, which {name!r} is not: give a slice "
                'of the mesh by name, such as mesh["replicate", "shard"]'
            )
    return mesh


def replicated_mesh(copies: int) -> DeviceMesh:
    """Return a 2-D mesh (replicate, shard) over all ranks, which ``copies`` divides. Collective.

    Its ranks wait for one another as long as those of the process group.
    """
    shape = (copies, dist.get_world_size() // copies)
    mesh = init_device_mesh(_device_type(), shape, mesh_dim_names=("replicate", "shard"))
    _torch.limit_alike(mesh)
    return mesh


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    # A group that the user made for the CPU only cannot gather on the accelerator.
    usable = accelerator.type in str(dist.get_backend_config()) or dist.get_backend() != "gloo"
    return accelerator.type if usable else "cpu"


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def all_reduce(values: torch.Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce ``values`` in place over all dimensions of the mesh, and return them. Collective."""
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(values, op=op, group=mesh.get_group(dim))
    return values


def rows_of(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (first row, rows) of ``total`` rows on ``rank`` by torch.chunk's rule, which FSDP2 follows.

    Equal pieces of ceil(total / ranks), the last ones shorter or empty.
    """
    piece = -(-total // ranks)
    start = min(piece * rank, total)
    return start, min(piece, total - start)


def rows_here(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (first row, rows) of this rank's shard; a plain tensor is whole on every rank, a 0-dim one is one row."""
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


def copy_rows(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's rows of ``whole``, the same on every rank and of the shape of ``target``."""
    start, rows = rows_here(target)
    local = _torch.local(target)
    (local[:rows] if local.ndim else local).copy_(whole[start : start + rows] if local.ndim else whole)


def is_simulated(mesh: DeviceMesh) -> bool:
    """True if the mesh's groups are torch's ``fake`` ones: one process simulates many, and nothing can be compared."""
    return dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "fake"


def gather_objects(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Return ``value`` of every rank of the mesh, in mesh order. Collective; picklable values only."""
    values = [value]
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        if group.size() == 1 or is_simulated(mesh):
            continue
        received: list[Any] = [None] * group.size()
        dist.all_gather_object(received, values, group=group)
        values = [each for part in received for each in part]
    return values
