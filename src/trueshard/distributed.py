"""Process group and mesh: the user's, or made where there is none.

- With a launcher's environment (``torchrun``) the group it describes is joined; without one, a group of one rank is
  made, so that the same script runs in a notebook. A group made here is closed at exit.
- The mesh is on the accelerator where there is one and the process group can use it, else on the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trueshard import _torch
from trueshard.axes import AXES, DATA, FOLDED, MESH, SHARED, ranks_along, sizes_of
from trueshard.errors import TrueShardError
from trueshard.machine import memory_of_process

SIMULATED = "simulated_"
"""Beginning of the names of a simulated mesh's dimensions, whose end is the name of an axis."""
_OTHER_AXES = {"tp", "cp", "sp", "ep", "pp", "tensor", "context", "sequence", "expert", "experts", "pipeline", "stage"}
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_process_group(timeout: datetime.timedelta | None = None, store: dist.Store | None = None) -> None:
    """Initialise the default process group if the user has not; ``store``: where launched ranks meet.

    Raises RuntimeError if the environment describes a launcher only in part, DeviceError if ranks share an accelerator.
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
        if launched:
            torch.accelerator.set_device_index(own_device(os.environ))
        # Both: what rests on the CPU (offload) is reduced there.
        backend = f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
    rank, ranks = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched else (0, 1)
    store = store if launched else dist.HashStore()
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks)
    atexit.register(_close)
    if accelerator is not None and ranks > 1:
        _meet_on(accelerator.type)


class DeviceError(TrueShardError, RuntimeError):
    """A process has no accelerator to itself; the message says how to give it one."""


def own_device(environment: Mapping[str, str]) -> int:
    """Return the index of the accelerator that a launcher meant for this process.

    A scheduler (Slurm's ``--gpus-per-task``, Kubernetes, MIG) may let each process see its own alone: the first,
    whatever its rank. Raises DeviceError if there are fewer than processes.
    """
    count, rank = torch.accelerator.device_count(), environment.get("RANK", "0")
    index = 0 if count == 1 else int(environment.get("LOCAL_RANK", rank))
    if index >= count:
        raise DeviceError(
            f"rank {rank}: this machine has {count} devices, and LOCAL_RANK is "
            f"{environment.get('LOCAL_RANK', 'not set')}; start one process for each device"
        )
    return index


def _meet_on(kind: str) -> None:
    """Let all ranks use their accelerators together once, so that a wrong one shows now and not in a step.

    Not by ``device_id``: with it each new group is split off the first one, in which ranks outside the group take part.
    Raises DeviceError, on all ranks, if two have the same one.
    """
    index = torch.accelerator.current_device_index()
    properties: Any = torch.get_device_module(kind).get_device_properties(index)
    owners: list[Any] = [None] * dist.get_world_size()
    # Two processes that see one device each may see the same one, and only its identifier tells.
    dist.all_gather_object(owners, (platform.node(), str(getattr(properties, "uuid", index))))
    ranks: dict[Any, int] = {}
    for rank, owner in enumerate(owners):
        if (first := ranks.setdefault(owner, rank)) != rank:
            raise DeviceError(
                f"ranks {first} and {rank} have the same device ({owner[1]} of {owner[0]}): start one process for each "
                "device, or let each see another one (CUDA_VISIBLE_DEVICES)"
            )
    dist.all_reduce(torch.zeros(1, device=torch.device(kind, index)))


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Begin ``work`` in a thread that does not keep the process from ending, and return its result to come."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


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


@dataclass(frozen=True)
class Axes:
    """The mesh over which a model is sharded, and the parts of it that serve one purpose each."""

    all: DeviceMesh
    """Every axis that there is, in the order of ``AXES``: the last one's ranks are neighbours."""
    data: DeviceMesh
    """(shard,) or (replicate, shard): the ranks over which gradients are averaged. Those of a context shard, too."""
    along: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """This rank's neighbours along each axis that an option asks for, by name; only axes of more than one rank, or that
    the user's mesh has."""
    alike: DeviceMesh | None = None
    """(shard,) or (replicate, shard): the ranks that have the same experts as this one."""

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis, by name."""
        names = _names(self.all)
        if not names or not set(names) <= set(MESH):
            names = DATA[-self.all.ndim :]
        return dict(zip(names, self.all.shape, strict=True))

    @property
    def groups(self) -> dict[str, list[str]]:
        """The axes of each process group, by the group's name; ``"shard"`` has the ranks of a context, too."""
        groups: dict[str, list[str]] = {}
        for name in (*reversed(SHARED), *FOLDED):  # of several axes with one group, the innermost stands first
            if name in self.along:
                groups.setdefault(str(self.along[name].get_group().group_name), []).append(name)
        for mesh in (self.data, self.alike) if self.alike is not None else (self.data,):
            for dim, name in enumerate(DATA[-mesh.ndim :]):
                groups.setdefault(str(mesh.get_group(dim).group_name), []).append(name)
        return groups

    @property
    def reader(self) -> tuple[int, int]:
        """This rank's number among those that read different samples, and how many there are.

        Ranks of one context, and of one tensor axis, read the same.
        """
        number, count = 0, 1
        for dim, (name, size) in enumerate(self.sizes.items()):
            if name not in SHARED:
                number, count = number * size + self.all.get_local_rank(dim), count * size
        return number, count

    def leads(self, axis: str) -> bool:
        """True for the first rank along an axis, and where there is none."""
        return axis not in self.along or self.along[axis].get_local_rank() == 0


_gloo: WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]] = WeakKeyDictionary()
"""World group → (purpose, ranks) → their gloo group: making one is collective and slow, so it lasts as long as the
world's. Of each purpose one: what a thread sends for one must not come between the collectives of another."""


def gloo_group(purpose: str, ranks: Sequence[int], timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Return a group of gloo for ``purpose``, made once in a world. Collective over ``ranks``."""
    groups = _gloo.setdefault(dist.group.WORLD, {})
    key = purpose, tuple(ranks)
    if key not in groups:
        groups[key] = dist.new_group(
            list(ranks), timeout, "gloo", use_local_synchronization=True, group_desc=f"trueshard-{purpose}"
        )
    return groups[key]


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that sends from CPU to CPU: this one, or one of gloo. Collective."""
    if "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "fake":
        return group
    return gloo_group("hosts", dist.get_process_group_ranks(group), _torch.timeout_of(group))


def connect_hosts(mesh: DeviceMesh) -> None:
    """Make the groups in which hosts along each dimension of a mesh exchange values. Collective; by all stages alike.

    torch names a group by how many groups this rank has. So if the last stage made one later, alone, for its number of
    tokens, the next group of all ranks would have two names, and making it would hang.
    """
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            host_group(mesh.get_group(dim))


def ensure_axes(mesh: DeviceMesh | None, options: Any = None) -> Axes:
    """Return the axes of ``mesh``, or of a mesh over all ranks, that a plan or options ask for.

    Collective where a mesh is made.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: its dimensions or their names do not fit, or the sizes do not fit the mesh or the ranks.
    """
    _settle_at_exit()
    requested = {name: size for name, size in sizes_of(options).items() if size > 1}
    experts = ranks_along(options, "experts")
    if mesh is None:
        ensure_process_group()
        return _parts(_mesh_over_all(requested), experts)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, not {type(mesh).__name__}")
    names = _names(mesh)
    if not set(names) & set(SHARED):
        _check_data_mesh(mesh)
    elif tuple(name for name in MESH if name in names) != tuple(names) or "shard" not in names:
        shown = ", ".join(map(repr, names))
        raise ValueError(
            f"a mesh with an axis for {' or '.join(SHARED)} has axes out of {', '.join(MESH)}, in this order, and "
            f"always shard, if of size 1; this one has {shown}"
        )
    for name, size in requested.items():
        if name not in names or mesh.size(names.index(name)) != size:
            raise ValueError(
                f"{name}={size} is not the mesh's, whose axes are {dict(zip(names, mesh.shape, strict=True))}"
            )
    return _parts(mesh, experts)


def _mesh_over_all(requested: Mapping[str, int]) -> DeviceMesh:
    world = dist.get_world_size()
    shared = math.prod(requested.values())
    if world % shared:
        words = " × ".join(f"{name} {size}" for name, size in requested.items())
        raise ValueError(f"{words} = {shared} ranks do not divide the {world} ranks that there are")
    shape = {"shard": world // shared} | {name: requested[name] for name in SHARED if name in requested}
    mesh = init_device_mesh(_device_type(), tuple(shape.values()), mesh_dim_names=tuple(shape))
    if requested:
        _torch.limit_alike(mesh)
    return mesh


def _check_data_mesh(mesh: DeviceMesh) -> None:
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


def simulated_mesh(device_type: str, sizes: Mapping[str, int], experts: int = 1) -> DeviceMesh:
    """Return a mesh over all ranks of a simulated world; ``sizes`` of its axes by name, in order.

    DTensor remembers meshes and finds their groups by name. So equal meshes must have groups of equal names: neither a
    real mesh may equal a simulated one, whose groups are gone, nor may those of two worlds in which other groups are
    made. Their dimensions are named after the world.
    """
    shape = "x".join(map(str, (*sizes.values(), experts)))
    names = tuple(f"{SIMULATED}{dist.get_rank()}_{shape}_{axis}" for axis in sizes)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's dimensions, without the beginning of simulated ones."""
    names = mesh.mesh_dim_names or ()
    return tuple(name.rpartition("_")[2] if name.startswith(SIMULATED) else name for name in names)


def _part(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Return the part of ``mesh`` along some of its axes."""
    names = dict(zip(_names(mesh), mesh.mesh_dim_names or (), strict=True))
    return mesh[tuple(names[axis] for axis in axes)]


def _refolded(mesh: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh of the same ranks in the same order, with other axes; made once. Collective."""
    made: dict[tuple[str, ...], DeviceMesh] = mesh.__dict__.setdefault("_trueshard_refolded", {})
    first = (mesh.mesh_dim_names or ("",))[0]
    start = first[: first.rindex("_") + 1] if first.startswith(SIMULATED) else ""
    names = tuple(f"{start}{name}" for name in sizes)
    key = (*names, *map(str, sizes.values()))
    if key not in made:
        with _torch.real_tensors():  # also where a model is simulated
            ranks = mesh.mesh.reshape(tuple(sizes.values()))
            made[key] = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)
        _torch.limit_alike(made[key])
    return made[key]


def _parts(mesh: DeviceMesh, experts: int) -> Axes:
    names = _names(mesh)
    folded = _fold_experts(mesh, experts) if experts > 1 else {}
    along = {"experts": folded["experts"]} if folded else {}
    alike = folded.get("alike")
    if not set(names) & set(SHARED):
        return Axes(mesh, mesh, along, alike)
    sizes, rest = dict(zip(names, mesh.shape, strict=True)), mesh
    sharding = [axis.name for axis in AXES if axis.name in SHARED and axis.gradients == "sharded"]
    for name in set(sharding) & set(names):  # its ranks shard, too: FSDP2 takes one dimension over both
        along[name] = _part(mesh, name)
        sizes["shard"] *= sizes.pop(name)
        rest = _refolded(mesh, sizes)
    along |= {name: _part(rest, name) for name in SHARED if name in sizes}
    return Axes(mesh, _part(rest, *(name for name in DATA if name in names)), along, alike)


def _fold_experts(mesh: DeviceMesh, experts: int) -> dict[str, DeviceMesh]:
    """Return the meshes of ranks that share experts, and of those with the same ones: the ranks of a copy, refolded."""
    copies = Axes(mesh, mesh).sizes.get("replicate", 1)
    ranks = mesh.size() // copies
    if ranks % experts:
        raise ValueError(
            f"experts={experts} does not divide the {ranks} ranks that have one copy of the model (shard × context × "
            "tensor): choose a divisor"
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(f"experts={experts} needs a mesh of all {dist.get_world_size()} ranks, not of {mesh.size()}")
    shape = {"replicate": copies, "shard": ranks // experts, "experts": experts}
    if copies == 1:
        del shape["replicate"]
    folded = _refolded(mesh, shape)
    alike = ("replicate", "shard") if copies > 1 else ("shard",)
    return {"experts": _part(folded, "experts"), "alike": _part(folded, *alike)}


def replicated_mesh(copies: int, sizes: Mapping[str, int] | None = None) -> DeviceMesh:
    """Return a mesh (replicate, shard, …) over all ranks, which ``copies`` divides; ``sizes``: of context and tensor.

    Collective. Its ranks wait for one another as long as those of the process group.
    """
    requested = {name: size for name in SHARED if (size := (sizes or {}).get(name, 1)) > 1}
    rest = dist.get_world_size() // copies // math.prod(requested.values())
    mesh = init_device_mesh(
        _device_type(), (copies, rest, *requested.values()), mesh_dim_names=("replicate", "shard", *requested)
    )
    _torch.limit_alike(mesh)
    return mesh


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    # A user's own group for the CPU says "cpu:gloo,cuda:gloo", as if it could gather on the accelerator.
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    usable = backends.get(accelerator.type, "gloo") != "gloo"
    return accelerator.type if usable else "cpu"


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


@contextlib.contextmanager
def made_on_cpu() -> Iterator[None]:
    """Inside, what is made without a device lies on the CPU, as its generators do, whatever torch's default device."""
    with contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


def all_reduce(
    values: torch.Tensor,
    mesh: DeviceMesh,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    dims: Sequence[int] | None = None,
) -> torch.Tensor:
    """Reduce ``values`` in place over ``dims`` of the mesh, all by default, and return them. Collective.

    On the CPU they are a few, and travel between hosts: an accelerator's collectives do not take them.
    """
    for dim in range(mesh.ndim) if dims is None else dims:
        if mesh.size(dim) > 1 and values.device.type == "cpu":
            all_reduce_on_hosts(values, mesh.get_group(dim), device_of(mesh), op)
        elif mesh.size(dim) > 1:
            dist.all_reduce(values, op=op, group=mesh.get_group(dim))
    return values


FEW_HOSTS = 128
"""Ranks up to which small values that hosts know travel between them: gloo's ring takes 2 (ranks - 1) messages, one
after the other. Beyond, a device's collective and the wait for it take less."""


def all_reduce_on_hosts(
    values: torch.Tensor,
    group: dist.ProcessGroup,
    device: torch.device,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    """Reduce a few ``values``, on the CPU, in place over a group that computes on ``device``, and return them.

    Collective. Does not wait for the device, unless ranks are many.
    """
    if device.type == "cpu" or group.size() <= FEW_HOSTS:
        dist.all_reduce(values, op=op, group=host_group(group))
        return values
    on_device = values.to(device)
    dist.all_reduce(on_device, op=op, group=group)
    return values.copy_(on_device)


def gather_parts(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return ``part``, of the same shape on every rank of a group, of all of them: (ranks, *shape). Collective."""
    parts = part.new_empty(group.size() * part.numel())
    # Into one tensor: a list would be copied out of one. The name is that of torch 2.13, which warns of the other.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(parts, part.contiguous().view(-1), group=group)
    return parts.view(group.size(), *part.shape)


def group_over(mesh: DeviceMesh, dims: Sequence[int]) -> dist.ProcessGroup:
    """Return a new group of this rank's neighbours along several dimensions, the last one fastest. Collective."""
    rest = [dim for dim in range(mesh.ndim) if dim not in dims]
    ranks = mesh.mesh.permute(*rest, *dims).reshape(-1, math.prod(mesh.size(dim) for dim in dims))
    made = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("others", "together"))
    _torch.limit_alike(made)
    return made.get_group("together")


def is_simulated(mesh: DeviceMesh) -> bool:
    """True if the mesh's groups are torch's ``fake`` ones: one process simulates many, and nothing can be compared."""
    return dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "fake"


def least_memory(mesh: DeviceMesh) -> int | None:
    """Return the bytes of memory of the rank that has least; None of a simulated mesh. Collective."""
    if is_simulated(mesh):
        return None
    if mesh.device_type == "cpu":
        mine = memory_of_process(int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size())))
    else:
        mine = torch.get_device_module(mesh.device_type).get_device_properties(device_of(mesh)).total_memory
    return int(min(gather_objects(mine, mesh)))


def gather_objects(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Return ``value`` of every rank of the mesh, in mesh order. Collective; picklable values only."""
    values = [value]
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        if group.size() == 1 or is_simulated(mesh):
            continue
        received: list[Any] = [None] * group.size()
        dist.all_gather_object(received, values, group=group)
        values = [value for part in received for value in part]
    return values
