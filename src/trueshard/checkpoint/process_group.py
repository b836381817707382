"""Ranks that save or load together: the values they exchange, and which rows of a tensor each holds and writes.

They exchange values over a gloo group of their own, so that a rank that calls ``save`` or ``load`` alone ends in an
error; a save in the background over one more, so that it comes between the collectives of nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trueshard import _torch
from trueshard.distributed import device_of, gloo_group
from trueshard.model.regions import (
    common,
    extent,
    has_one_run,
    inside,
    put,
    region_of,
    replicated_dims,
    rows_here,
    take,
)
from trueshard.optim.owners import Holders


class RankGroup:
    """The ranks that save or load together: those of the meshes of ``tensors``, or all.

    If ``staged`` it is all ranks, and those of the meshes are one stage of a pipeline, whose ranks have the same
    tensors; otherwise all are that one stage.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = (), *, staged: bool = False) -> None:
        self.rank, self.world = 0, 1
        self._group: dist.ProcessGroup | None = None
        self._members: tuple[int, ...] = ()
        self.staged = staged
        """True if other ranks may have other tensors: their names are exchanged, too."""
        self.stage = [0]
        """The ranks of this rank's stage, in order."""
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return
        meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
        ranks = sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten()})
        members = tuple(range(dist.get_world_size()) if staged or not ranks else ranks)
        self.rank, self.world, self._members = members.index(dist.get_rank()), len(members), members
        self.stage = [members.index(rank) for rank in ranks or members]
        self._connect("checkpoint")

    def _connect(self, purpose: str) -> None:
        if self.world > 1:
            timeout = _torch.timeout_of(dist.group.WORLD)
            self._group = _collective(lambda: gloo_group(purpose, self._members, timeout))

    def for_background(self, purpose: str = "background") -> RankGroup:
        """Return the same ranks, connected once more: for a thread beside which others exchange values. Collective.

        On one group the exchanges of two threads would mix, in another order on each rank. Threads of one ``purpose``
        never run at the same time.
        """
        result = copy.copy(self)
        result._connect(purpose)
        return result

    def exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Send uint8 tensors on the CPU to ranks, and fill others from ranks, all at once. Collective over those."""
        member = self._members.__getitem__
        works = [dist.isend(tensor, member(rank), self._group) for rank, tensor in sent.items()]
        works += [dist.irecv(tensor, member(rank), self._group) for rank, tensor in received.items()]
        for work in filter(None, works):
            _collective(work.wait)

    def attempt(self, failed: str, function: Callable[[], Any]) -> list[Any]:
        """Call ``function`` on every rank, and return every rank's result (pickled), in rank order. Collective."""
        value, error = None, None
        try:
            value = function()
        except BaseException as caught:
            error = caught
        outcomes: list[Any] = [(None if error is None else f"{type(error).__name__}: {error}", value)]
        if self._group is not None:
            outcomes *= self.world
            _collective(lambda: dist.all_gather_object(outcomes, outcomes[0], group=self._group))
        if error is not None:
            raise error
        for rank, (message, _) in enumerate(outcomes):
            if message is not None:
                raise RuntimeError(f"{failed}: rank {rank} failed: {message}")
        return [value for _, value in outcomes]


def _collective(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except RuntimeError as error:
        raise RuntimeError(
            "save() and load() are collective, and not every rank came: call them on all ranks, with the same "
            f"arguments ({str(error).splitlines()[0]})"
        ) from error


def check_equal(function: str, arguments: Sequence[tuple[int, Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Raise ``ValueError``, naming the first difference, unless the ranks' arguments (name → value) are equal.

    ``arguments``: of each rank, (first rank of its stage, what all ranks have in common, what those of a stage have).
    """
    pairs = [(0, rank, arguments[0][1], common) for rank, (_, common, _) in enumerate(arguments)]
    pairs += [(first, rank, arguments[first][2], of_stage) for rank, (first, _, of_stage) in enumerate(arguments)]
    for first_rank, rank, first, other in pairs:
        for key in {**first, **other}:
            if other.get(key) != first.get(key):
                was, is_now = (str(values.get(key, "missing"))[:200] for values in (first, other))
                raise ValueError(
                    f"{function} was given different things on different ranks: {key!r} is {was} on rank "
                    f"{first_rank} and {is_now} on rank {rank}; give all ranks the same"
                )


def bytes_here(tensor: torch.Tensor, nbytes: int | None = None) -> tuple[int, int]:
    """Return (begin, end) of this rank's shard, as ``by_rows`` places it, among the bytes of the whole tensor."""
    runs = rows_here(tensor, row_placements(tensor) if isinstance(tensor, DTensor) else None)
    assert len(runs) == 1
    size = tensor.dtype.itemsize if nbytes is None else nbytes // max(tensor.numel(), 1)
    width = math.prod(tensor.shape[1:]) * size
    return runs[0][0] * width, runs[0][1] * width


def row_placements(tensor: DTensor) -> tuple[Any, ...]:
    """Return the placements by which a tensor is written and read: by which each rank has one run of whole rows."""
    if has_one_run(tensor):
        return tuple(tensor.placements)
    result: list[Any] = []
    inner = 1  # parts into which the dimensions of the mesh that follow cut rows
    for placement, size in zip(reversed(tensor.placements), reversed(tensor.device_mesh.shape), strict=True):
        if not (placement.is_replicate() or placement == Shard(0)):
            # Rows are cut within those that the later dimensions leave, so that ranks along this one alone exchange
            # them; DTensor's word for that is the one for packed halves.
            placement = Shard(0) if inner == 1 else _torch.packed(0, inner)
        inner *= 1 if placement.is_replicate() else size
        result.append(placement)
    return tuple(reversed(result))


def by_rows(tensor: DTensor) -> torch.Tensor:
    """Return this rank's rows as ``row_placements`` says: ``tensor`` itself, or a copy in host memory.

    Collective over the ranks that cut it.
    """
    placements = row_placements(tensor)
    if placements == tuple(tensor.placements):
        return tensor
    rows = torch.empty(extent(region_of(tensor, placements=placements)), dtype=tensor.dtype)
    _exchange(tensor, (tuple(tensor.placements), _torch.local(tensor)), (placements, rows))
    return rows


def like_rows(tensor: DTensor) -> DTensor:
    """Return a tensor without values that is placed as ``row_placements`` says."""
    placements, mesh = row_placements(tensor), tensor.device_mesh
    local = _torch.local(tensor).new_empty(extent(region_of(tensor, placements=placements)))
    return _torch.dtensor_from(local, mesh, placements, tensor.shape, tensor.stride())


def from_rows(rows: DTensor, tensor: DTensor) -> None:
    """Fill ``tensor`` with the values of what ``like_rows`` made for it. Collective over the ranks that cut it."""
    _exchange(tensor, *((tuple(placed.placements), _torch.local(placed)) for placed in (rows, tensor)))


Placed: TypeAlias = tuple[tuple[Any, ...], torch.Tensor]
"""Placements, and this rank's part by them."""

_holders: WeakKeyDictionary[Any, dict[tuple[DeviceMesh, tuple[int, ...]], Holders]] = WeakKeyDictionary()
"""World group → (mesh, dimensions) → the ranks along them: a group is made once."""


def _exchange(like: DTensor, source: Placed, target: Placed) -> None:
    """Fill the part of ``target`` from the parts of ``source``, both of a tensor of the shape and mesh of ``like``."""
    mesh = like.device_mesh
    dims = tuple(dim for dim, (a, b) in enumerate(zip(source[0], target[0], strict=True)) if a != b)
    cache, device = _holders.setdefault(dist.group.WORLD, {}), device_of(mesh)
    if (mesh, dims) not in cache:
        cache[mesh, dims] = Holders(mesh, dims)
    holders = cache[mesh, dims]
    here, there = (region_of(like, placements=placements) for placements, _ in (source, target))
    places = holders.places()
    sent = [common(here, region_of(like, place, target[0])) for place in places]
    taken = [common(region_of(like, place, source[0]), there) for place in places]
    parts = [take(source[1].detach(), inside(here, part)).reshape(-1).to(device) for part in sent]
    arriving, leaving = ([math.prod(extent(part)) for part in regions] for regions in (taken, sent))
    buffer = torch.empty(sum(arriving), dtype=like.dtype, device=device)
    dist.all_to_all_single(buffer, torch.cat(parts), arriving, leaving, group=holders.group)
    for part, piece in zip(taken, buffer.split(arriving), strict=True):
        put(target[1], inside(there, part), piece.view(extent(part)))


def own_part(tensor: DTensor, number: int, nbytes: int | None = None) -> tuple[int, int]:
    """Return ``bytes_here``, or (0, 0) if another rank that holds the same is to handle them."""
    return bytes_here(tensor, nbytes) if has_turn(tensor, number) else (0, 0)


def has_turn(tensor: DTensor, number: int) -> bool:
    """True if, of the ranks that hold the same part, this one handles tensor ``number``: they take turns."""
    mesh = tensor.device_mesh
    return all(mesh.get_local_rank(dim) == number % mesh.size(dim) for dim in replicated_dims(tensor))


def groups_of_replicas(tensor: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return the process groups, one a mesh dimension, whose ranks hold the same shard.

    None of a tensor that is whole on every rank, or that lies where the mesh's group may not reach (offloaded).
    """
    if not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements):
        return []
    mesh = tensor.device_mesh
    if _torch.local(tensor).device.type != mesh.device_type:
        return []
    return [mesh.get_group(dim) for dim in replicated_dims(tensor) if mesh.size(dim) > 1]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of this rank's shard in row order, without a copy if it is on the CPU and contiguous."""
    local = _torch.local(tensor).detach().cpu().contiguous().resolve_conj().resolve_neg()
    elements: Any = local.view(-1).view(torch.uint8).numpy()
    return memoryview(elements)
