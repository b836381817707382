"""Whole-tensor optimizers, by owner: each sharded parameter is updated on one rank, which holds its whole state.

- Owners are balanced by bytes and by the cost of an update, and follow from shapes alone: every rank knows all of them.
- A step goes in batches. While one is updated, the gradients of the next are on their way, and the results of the one
  before.
- Most such optimizers read the whole parameter too. Sending it each step would cost half as much traffic again, so the
  owner keeps it (memory: about 1/N of the parameters a rank) and fetches it anew when someone wrote to a shard. Where
  the parameter enters the update as a factor alone (decoupled weight decay and nothing else), the owner updates zeros,
  the result is the difference, and nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trueshard import _torch
from trueshard.distributed import device_of
from trueshard.optim.exchange import Exchange, Owned
from trueshard.optim.shards import leaf_over, local_gradient

BATCH_BYTES = 32 << 20
"""Bytes that an owner takes in one batch, unless one parameter has more."""


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether ranks hold different rows of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return False
    mesh = parameter.device_mesh
    return isinstance(parameter.placements[-1], Shard) and mesh.size(mesh.ndim - 1) > 1


def update_cost(shape: Sequence[int]) -> int:
    """Of a matrix (or what has more dimensions, flattened to one): products with its smaller Gram matrix."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return rows * columns * min(rows, columns)


def assign(shapes: Sequence[Sequence[int]], ranks: int, loads: list[list[float]] | None = None) -> list[int]:
    """The owner of each of ``shapes``, balanced by elements and by ``update_cost``.

    Greedy: the largest first, each to the rank that it leaves with the least of whichever of both is more.

    Args:
        shapes: of the parameters.
        ranks: how many own.
        loads: [elements, cost] that each rank has already; added to.

    Returns:
        A rank for each shape.
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


class Owners:
    """The owned parameters of one optimizer."""

    def __init__(self) -> None:
        self._of: dict[int, Owned] = {}
        self._loads: dict[DeviceMesh, list[list[float]]] = {}
        self._kept: dict[int, nn.Parameter] = {}
        """``id`` of a parameter of this rank → its whole value."""
        self._seen: dict[int, tuple[int, torch.Tensor]] = {}
        """``id`` of each parameter → version and bits of its shard as the owner knows it."""

    def of(self, parameters: Sequence[tuple[DTensor, tuple[int, int]]]) -> list[Owned]:
        """The records of ``(parameter, (group, position))`` as they are now, with owners for those that are new."""
        if new := [(p, place) for p, place in parameters if id(p) not in self._of]:
            for mesh in dict.fromkeys(p.device_mesh for p, _ in new):
                members = [(p, place) for p, place in new if p.device_mesh == mesh]
                ranks = mesh.size(mesh.ndim - 1)
                loads = self._loads.setdefault(mesh, [[0.0, 0.0] for _ in range(ranks)])
                owners = assign([tuple(p.shape) for p, _ in members], ranks, loads)
                for (parameter, place), owner in zip(members, owners, strict=True):
                    self._of[id(parameter)] = Owned(parameter, owner, place)
        if len(self._of) > len(parameters):
            held = {id(p) for p, _ in parameters}
            for table in (self._of, self._kept, self._seen):
                for key in [key for key in table if key not in held]:
                    del table[key]
        found = []
        for parameter, place in parameters:
            found.append(each := self._of[id(parameter)])
            each.place = place
        return found

    @staticmethod
    def is_mine(each: Owned) -> bool:
        """Whether this rank is the owner."""
        mesh = each.parameter.device_mesh
        return mesh.get_local_rank(mesh.ndim - 1) == each.owner

    def walk(
        self, members: Sequence[Owned], groups: list[dict[str, Any]], decoupled: Sequence[bool]
    ) -> Iterator[tuple[list[tuple[Owned, nn.Parameter]], bool]]:
        """Gradients travel to the owners; each batch is given out to be updated; what was updated travels back.

        Args:
            members: all owned parameters, with a gradient or without.
            groups: the optimizer's.
            decoupled: by group, whether the parameter enters as a factor alone.

        Yields:
            This rank's (record, leaf with the whole gradient) of a batch, and whether it is the last. When asked for
            the next, the leaves must be updated. Leaves without a gradient are in the last, as far as they are known.
        """
        keeping = [each for each in members if not decoupled[each.place[0]] and each.parameter.requires_grad]
        if self._agree(members, keeping):
            self._fetch(keeping)
        taking = [each for each in members if each.parameter.grad is not None]
        resting = [each for each in keeping if each.parameter.grad is None and self.is_mine(each)]
        batches = list(_batches(taking))
        coming = {0: batches[0].to_owners(_gradient)} if batches else {}
        going: list[tuple[Exchange, Any]] = []
        if not batches and resting:
            yield [(each, self._kept[id(each.parameter)]) for each in resting], True
        for k, batch in enumerate(batches):
            if k + 1 < len(batches):
                coming[k + 1] = batches[k + 1].to_owners(_gradient)
            grads = batch.wholes(coming.pop(k).wait())
            leaves = [self._leaf(each, decoupled[each.place[0]]) for each in batch.mine]
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf.grad = grad
            del grads
            last = k + 1 == len(batches)
            rest = [(each, self._kept[id(each.parameter)]) for each in resting] if last else []
            yield [*zip(batch.mine, leaves, strict=True), *rest], last
            for leaf in leaves:
                leaf.grad = None
            going.append((batch, batch.from_owners(leaves)))
            if len(going) > 1:
                self._land(*going.pop(0), groups, decoupled)
        for each in going:
            self._land(*each, groups, decoupled)

    def _leaf(self, each: Owned, decoupled: bool) -> nn.Parameter:
        if not decoupled:
            return self._kept[id(each.parameter)]
        zeros = torch.zeros(each.parameter.shape, dtype=each.parameter.dtype, device=each.local.device)
        return leaf_over(zeros, each.parameter)

    def _land(self, batch: Exchange, arrival: Any, groups: list[dict[str, Any]], decoupled: Sequence[bool]) -> None:
        with torch.no_grad():
            for each, rows in batch.rows(arrival.wait()):
                if decoupled[each.place[0]]:
                    group = groups[each.place[0]]
                    each.local.mul_(1 - group["lr"] * group["weight_decay"]).add_(rows)
                else:
                    each.local.copy_(rows)
                    self._note(each)

    def _note(self, each: Owned) -> None:
        self._seen[id(each.parameter)] = _torch.version(each.parameter), bits(each.local)

    def _is_stale(self, each: Owned) -> bool:
        """Someone wrote to this rank's rows; ``parameter.data`` has no version, so the bits are asked too."""
        version, sum_of_bits = self._seen.get(id(each.parameter), (-1, None))
        if sum_of_bits is None or version != _torch.version(each.parameter):
            return True
        return bool(sum_of_bits != bits(each.local))

    def _agree(self, members: Sequence[Owned], keeping: Sequence[Owned]) -> bool:
        """Whether some rank wrote to a shard since its owner fetched it; ranks must have the same gradients.

        Raises:
            RuntimeError: they have not; on every rank.
        """
        any_stale = False
        for mesh in dict.fromkeys(each.parameter.device_mesh for each in members):
            here = [each for each in members if each.parameter.device_mesh == mesh]
            stale = any(self._is_stale(each) for each in keeping if each.parameter.device_mesh == mesh)
            present = tuple(each.parameter.grad is not None for each in here)
            digest = hash(present) >> 2
            told = torch.tensor([int(stale), digest, -digest], dtype=torch.int64, device=device_of(mesh))
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
            anyone, most, least = told.tolist()
            if most != -least:
                shapes = [tuple(each.parameter.shape) for each, has in zip(here, present, strict=True) if not has]
                raise RuntimeError(
                    "ranks do not have gradients for the same parameters, so they cannot be sent to their owners; "
                    f"here {len(shapes)} have none, of shapes {shapes[:3]}: let every rank reach the same parameters"
                )
            any_stale |= bool(anyone)
        return any_stale

    def _fetch(self, members: Sequence[Owned]) -> None:
        """Give every owner the whole values of its parameters."""
        for batch in _batches(members):
            values = batch.wholes(batch.to_owners(lambda each: each.local).wait())
            for each, value in zip(batch.mine, values, strict=True):
                kept = self._kept.get(id(each.parameter))
                if kept is None:
                    self._kept[id(each.parameter)] = leaf_over(value, each.parameter)
                else:
                    with torch.no_grad():
                        kept.copy_(value)
            for each in batch.members:
                self._note(each)


def _gradient(each: Owned) -> torch.Tensor:
    return local_gradient(each.parameter)


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over the bits of ``tensor``: int64, 0-dim."""
    return tensor.detach().contiguous().view(_INTEGER[tensor.itemsize]).sum(dtype=torch.int64)


def _batches(members: Sequence[Owned]) -> Iterator[Exchange]:
    """Members of one mesh and dtype together, each owner's costly ones first, about ``BATCH_BYTES`` an owner."""
    kinds: dict[Any, list[Owned]] = {}
    for each in members:
        grad = each.parameter.grad
        key = each.parameter.device_mesh, each.parameter.dtype, None if grad is None else grad.dtype
        kinds.setdefault(key, []).append(each)
    for (mesh, dtype, _), alike in kinds.items():
        taken: dict[int, int] = {}
        batches: dict[int, list[Owned]] = {}
        for each in sorted(alike, key=lambda each: -update_cost(each.parameter.shape)):
            before = taken.get(each.owner, 0)
            taken[each.owner] = before + each.parameter.numel() * dtype.itemsize
            batches.setdefault(before // BATCH_BYTES, []).append(each)
        for number in sorted(batches):
            yield Exchange(batches[number], mesh)
