"""Whole-tensor optimizers, by owner: each sharded parameter is updated on one rank, which holds its whole state.

- Owners are balanced by elements and by the cost of an update, and follow from shapes alone: every rank knows all of
  them.
- Gradients and results travel in batches, by all-to-all with uneven splits, so nothing is padded: for P elements of
  which each of N ranks owns an equal share, a rank receives (N-1)/N² · P · element size each way. While one batch is
  updated, the gradients of the next are on their way, and the results of the one before.
- Most such optimizers read the whole parameter too. Sending it each step would cost half as much traffic again, so the
  owner keeps it (memory: about 1/N of the parameters a rank) and fetches it anew when someone wrote to a shard. Where
  the parameter enters the update as a factor alone (decoupled weight decay and nothing else), the owner updates zeros,
  the result is the difference, and nothing is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.distributed import all_reduce_on_hosts, device_of, group_over
from trueshard.errors import TrueShardRuntimeError
from trueshard.model.agreement import bits_of
from trueshard.model.regions import Region, coordinate_of, extent, has_whole_rows, put, region_of, take
from trueshard.optim.local_params import leaf_over, local_gradient
from trueshard.optim.shards import Ranks, sharded_over

BATCH_BYTES = 32 << 20
"""Bytes that an owner takes in one batch, unless one parameter has more."""

Place = tuple[int, int]
"""(group, position) of a parameter in the optimizer."""


class Holders:
    """Ranks that hold the parts of a parameter: those along the dimensions of a mesh that cut it, in the mesh's order.

    Made on all ranks of the mesh together.
    """

    def __init__(self, mesh: DeviceMesh, dims: tuple[int, ...]) -> None:
        self.mesh, self._dims = mesh, dims
        self.group = mesh.get_group(dims[0]) if len(dims) == 1 else group_over(mesh, dims)
        self.size = math.prod(mesh.size(dim) for dim in dims)
        self._coordinates = list(itertools.product(*(range(mesh.size(dim)) for dim in dims)))
        self._here = coordinate_of(mesh)
        self.in_order = len(dims) == 1
        self.rank = self._coordinates.index(tuple(self._here[dim] for dim in dims))

    def places(self) -> list[list[int]]:
        """Return the coordinate of each holder in the mesh."""
        varying = [dict(zip(self._dims, coordinate, strict=True)) for coordinate in self._coordinates]
        return [[fixed.get(dim, here) for dim, here in enumerate(self._here)] for fixed in varying]

    def regions(self, parameter: DTensor) -> list[Region]:
        """Return which indices of ``parameter`` each holder has."""
        return [region_of(parameter, place) for place in self.places()]


@dataclass(eq=False)
class Owned:
    """A sharded parameter and the rank, among its holders, that updates it."""

    parameter: DTensor
    holders: Holders
    owner: int
    place: Place
    full: nn.Parameter | None = None
    """The full value, on the owner alone, from its first step on; None where the update needs no value."""
    fetched: tuple[int, torch.Tensor] | None = None
    """Fingerprint of this rank's rows when the owner had them last."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's part."""
        return _torch.local(self.parameter)

    @property
    def is_mine(self) -> bool:
        return self.holders.rank == self.owner

    def note(self) -> None:
        """Remember that the owner has this rank's rows as they are."""
        self.fetched = _torch.version(self.parameter), self.bit_sum()

    def is_stale(self) -> bool:
        """True if torch counted writes to this rank's rows since the owner had them.

        The count misses writes through ``parameter.data``, which has a counter of its own: ``bit_sum`` shows them.
        """
        return self.fetched is None or self.fetched[0] != _torch.version(self.parameter)

    def bit_sum(self) -> torch.Tensor:
        """Return a sum over the bits of this rank's rows: 0-dim int64."""
        return bits_of(self.parameter).sum(dtype=torch.int64)


def update_cost(shape: Sequence[int]) -> int:
    """Return the multiplications of a matrix (or what flattens to one) with its smaller Gram matrix."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return rows * columns * min(rows, columns)


def assign(shapes: Sequence[Sequence[int]], ranks: int, loads: list[list[float]] | None = None) -> list[int]:
    """Return the owner of each of ``shapes`` among ``ranks``, balanced by elements and by ``update_cost``.

    Greedy: largest first, each to the rank whose larger load (elements or cost) stays smallest. ``loads``: [elements,
    cost] that each rank has already; added to.
    """
    sizes = [(math.prod(shape), update_cost(shape)) for shape in shapes]
    loads = [[0.0, 0.0] for _ in range(ranks)] if loads is None else loads
    totals = [max(1.0, sum(load[i] for load in loads) + sum(size[i] for size in sizes)) for i in (0, 1)]
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i][1], -sizes[i][0], i)):
        after = [max((load[j] + sizes[i][j]) / totals[j] for j in (0, 1)) for load in loads]
        owners[i] = min(range(ranks), key=lambda rank: (after[rank], sum(loads[rank]), rank))
        for j in (0, 1):
            loads[owners[i]][j] += sizes[i][j]
    return owners


class Arrival:
    """A message on its way."""

    def __init__(self, batch: Batch, parts: Sequence[torch.Tensor], sent: list[int], received: list[int]) -> None:
        device = device_of(batch.holders.mesh)
        flat = [part.reshape(-1) for part in parts]
        dtype = flat[0].dtype if flat else batch.members[0].parameter.dtype
        # Kept alive until it has left.
        self._sent = torch.cat(flat).to(device) if flat else torch.empty(0, dtype=dtype, device=device)
        self._buffer = torch.empty(sum(received), dtype=dtype, device=device)
        group = batch.holders.group
        self._work = dist.all_to_all_single(self._buffer, self._sent, received, sent, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the flat received buffer."""
        self._work.wait()
        return self._buffer


class Batch:
    """Parameters of one dtype, with the same holders, that travel together."""

    def __init__(self, members: Sequence[Owned], holders: Holders) -> None:
        self.holders = holders
        by_owner = [[member for member in members if member.owner == owner] for owner in range(holders.size)]
        self.members = [member for owned in by_owner for member in owned]
        self.mine = by_owner[holders.rank]
        self._here = [sum(member.local.numel() for member in owned) for owned in by_owner]
        """Elements of this rank's parts, by owner."""
        by_member = [holders.regions(member.parameter) for member in self.mine]
        self._regions = [[regions[rank] for regions in by_member] for rank in range(holders.size)]
        """Indices that each rank has of each of ``mine``."""
        self._counts = [[math.prod(extent(region)) for region in regions] for regions in self._regions]
        """Elements in ``_regions``."""

    def to_owners(self, *, gradients: bool) -> Arrival:
        """Send this rank's part of each member, or of its gradient, to its owner; ``full`` reads what arrives."""
        parts = [local_gradient(member.parameter) if gradients else member.local for member in self.members]
        return Arrival(self, parts, self._here, list(map(sum, self._counts)))

    def full(self, arrival: Arrival) -> list[torch.Tensor]:
        """Return the full tensors of ``mine``, each in memory of its own."""
        pieces = arrival.wait().split([count for counts in self._counts for count in counts])
        count = len(self.mine)
        return [
            _full_of(member, pieces[i::count], [regions[i] for regions in self._regions])
            for i, member in enumerate(self.mine)
        ]

    def from_owners(self, updated: Sequence[torch.Tensor]) -> Arrival:
        """Send the parts of ``updated`` (of ``mine``) to the ranks that hold them; ``parts`` reads what arrives."""
        parts = [
            take(tensor.detach(), region)
            for regions in self._regions
            for tensor, region in zip(updated, regions, strict=True)
        ]
        return Arrival(self, parts, list(map(sum, self._counts)), self._here)

    def parts(self, arrival: Arrival) -> list[tuple[Owned, torch.Tensor]]:
        """Return every member with this rank's part of it."""
        pieces = arrival.wait().split([member.local.numel() for member in self.members])
        return [(member, piece.view(member.local.shape)) for member, piece in zip(self.members, pieces, strict=True)]


def _full_of(member: Owned, pieces: Sequence[torch.Tensor], regions: Sequence[Region]) -> torch.Tensor:
    """Return the full tensor of which these flat ``pieces`` are the parts, in memory of its own."""
    shape, device = member.parameter.shape, member.local.device
    in_rows = member.holders.in_order and has_whole_rows(member.parameter)
    if in_rows and all(len(region[0]) == 1 for region in regions):
        return torch.cat(list(pieces)).view(shape).to(device)
    full = pieces[0].new_empty(shape)
    for piece, region in zip(pieces, regions, strict=True):
        put(full, region, piece.view(extent(region)))
    return full.to(device)


def _batches(members: Sequence[Owned]) -> Iterator[Batch]:
    """Yield members of the same holders and dtype together, about ``BATCH_BYTES`` an owner, its costly ones first."""
    kinds: dict[Any, list[Owned]] = {}
    for member in members:
        grad = member.parameter.grad
        key = member.holders, member.parameter.dtype, None if grad is None else grad.dtype
        kinds.setdefault(key, []).append(member)
    for (holders, dtype, _), of_kind in kinds.items():
        taken: dict[int, int] = {}
        batches: dict[int, list[Owned]] = {}
        for member in sorted(of_kind, key=lambda member: -update_cost(member.parameter.shape)):
            before = taken.get(member.owner, 0)
            taken[member.owner] = before + member.parameter.numel() * dtype.itemsize
            batches.setdefault(before // BATCH_BYTES, []).append(member)
        for number in sorted(batches):
            yield Batch(batches[number], holders)


class Owners:
    """Owners of the parameters of one optimizer. An owner stays the owner, since it has all of the state."""

    def __init__(self) -> None:
        self._of: dict[int, Owned] = {}
        """``id`` of a parameter → its record."""
        self._holders: dict[Ranks, Holders] = {}
        """Made once, since more than one dimension of a mesh needs a process group of its own."""
        self._loads: dict[Holders, list[list[float]]] = {}
        """[elements, cost] that each of the holders owns so far, for parameters that are added later."""

    def of(self, parameters: Sequence[tuple[DTensor, Place]]) -> list[Owned]:
        """Return the records of ``parameters`` and their places now, with owners for those that are new."""
        if new := [(p, place) for p, place in parameters if id(p) not in self._of]:
            by_ranks: dict[Ranks, list[tuple[DTensor, Place]]] = {}
            for parameter, place in new:
                ranks = sharded_over(parameter)
                assert ranks is not None
                by_ranks.setdefault(ranks, []).append((parameter, place))
            for ranks, members in by_ranks.items():
                if ranks not in self._holders:
                    self._holders[ranks] = Holders(*ranks)
                holders = self._holders[ranks]
                loads = self._loads.setdefault(holders, [[0.0, 0.0] for _ in range(holders.size)])
                owners = assign([tuple(p.shape) for p, _ in members], holders.size, loads)
                for (parameter, place), owner in zip(members, owners, strict=True):
                    self._of[id(parameter)] = Owned(parameter, holders, owner, place)
        if len(self._of) > len(parameters):
            held = {id(p) for p, _ in parameters}
            self._of = {key: owned for key, owned in self._of.items() if key in held}
        for parameter, place in parameters:
            self._of[id(parameter)].place = place
        return [self._of[id(parameter)] for parameter, _ in parameters]

    def walk(
        self, members: Sequence[Owned], groups: list[dict[str, Any]], decoupled: Sequence[bool]
    ) -> Iterator[tuple[list[tuple[Owned, nn.Parameter]], bool]]:
        """Send gradients to the owners, give out each batch to be updated, and send back what was updated.

        ``members``: with a gradient or without. ``decoupled``: by group, True if parameters enter as a factor alone.

        Yields:
            This rank's (record, leaf with the whole gradient) of a batch, and whether it is the last. When asked for
            the next, the leaves must be updated. Leaves without a gradient are in the last, as far as they are known.
        """
        keeping = [m for m in members if not decoupled[m.place[0]] and m.parameter.requires_grad]
        any_stale = _agree(members, keeping)
        batches = list(_batches([member for member in members if member.parameter.grad is not None]))
        # Two batches of gradients are on their way at a time, and one of results: the next batch travels while this
        # one is updated, and no more lie in memory.
        coming = [batch.to_owners(gradients=True) for batch in batches[:1]]
        if any_stale:  # of a device the one wait, of owners that keep values; it has gradients to send meanwhile
            _fetch(keeping)
        resting = [(member, _full(member)) for member in keeping if member.parameter.grad is None and member.is_mine]
        if not batches and resting:
            yield resting, True
        going: list[tuple[Batch, Arrival]] = []
        for k, batch in enumerate(batches):
            coming += [following.to_owners(gradients=True) for following in batches[k + 1 : k + 2]]
            grads = batch.full(coming.pop(0))
            leaves = [_full(member, zeros=decoupled[member.place[0]]) for member in batch.mine]
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf.grad = grad
            del grads
            last = k + 1 == len(batches)
            yield [*zip(batch.mine, leaves, strict=True), *(resting if last else [])], last
            for leaf in leaves:
                leaf.grad = None
            going.append((batch, batch.from_owners(leaves)))
            if len(going) > 1:
                _land(*going.pop(0), groups, decoupled)
        for batch, arrival in going:
            _land(batch, arrival, groups, decoupled)


def _full(member: Owned, zeros: bool = False) -> nn.Parameter:
    if zeros:
        return leaf_over(member.local.new_zeros(member.parameter.shape), member.parameter)
    assert member.full is not None
    return member.full


@torch.no_grad()
def _land(batch: Batch, arrival: Arrival, groups: list[dict[str, Any]], decoupled: Sequence[bool]) -> None:
    """Write what the owners made of a batch to this rank's parts."""
    for member, part in batch.parts(arrival):
        if decoupled[member.place[0]]:
            group = groups[member.place[0]]
            member.local.mul_(1 - group["lr"] * group["weight_decay"]).add_(part.to(member.local.device))
        else:
            member.local.copy_(part)
            member.note()


def _agree(members: Sequence[Owned], keeping: Sequence[Owned]) -> bool | torch.Tensor:
    """True if some rank wrote to a shard since its owner fetched it; raise if ranks lack different gradients.

    Returns:
        bool; where a device has to tell, 0-dim bool on it: torch counts no writes through ``parameter.data`` or by
        kernels of others, so only the bits show them, and what travels depends on them.
    """
    any_stale, unread = False, []
    for holders in dict.fromkeys(member.holders for member in members):
        here = [member for member in members if member.holders is holders]
        kept = [member for member in keeping if member.holders is holders]
        stale = any(member.is_stale() for member in kept)
        on_host = device_of(holders.mesh).type == "cpu"
        if on_host and kept and not stale:
            stale = bool(_are_changed(kept))
        present = tuple(member.parameter.grad is not None for member in here)
        digest = hash(present) >> 2  # of a tuple of bools: the same in every process; negated below without overflow
        # Between hosts, which know it: a device would have to be waited for.
        message = torch.tensor([int(stale), digest, -digest], dtype=torch.int64)
        all_reduce_on_hosts(message, holders.group, device_of(holders.mesh), dist.ReduceOp.MAX)
        anyone, most, least = message.tolist()
        if most != -least:
            shapes = [tuple(member.parameter.shape) for member, has in zip(here, present, strict=True) if not has]
            raise TrueShardRuntimeError(
                "ranks do not have gradients for the same parameters, so they cannot be sent to their owners; "
                f"here {len(shapes)} have none, of shapes {shapes[:3]}: let every rank reach the same parameters"
            )
        any_stale |= bool(anyone)
        if kept and not anyone and not on_host:
            changed = _are_changed(kept).to(device_of(holders.mesh), torch.int64)
            dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=holders.group)
            unread.append(changed)
    return torch.stack(unread).any() if unread and not any_stale else any_stale


def _are_changed(members: Sequence[Owned]) -> torch.Tensor:
    """Return whether bits of this rank's rows differ from those that owners have: 0-dim bool."""
    before = [member.fetched[1] for member in members if member.fetched is not None]
    return (torch.stack([member.bit_sum() for member in members]) != torch.stack(before)).any()


@torch.no_grad()
def _fetch(members: Sequence[Owned]) -> None:
    """Give every owner the full values of its parameters."""
    for batch in _batches(members):
        values = batch.full(batch.to_owners(gradients=False))
        for member, value in zip(batch.mine, values, strict=True):
            if member.full is None:
                member.full = leaf_over(value, member.parameter)
            else:
                member.full.copy_(value)
        for member in batch.members:
            member.note()
