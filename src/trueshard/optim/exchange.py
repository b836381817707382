"""Moves whole tensors between ranks that hold rows of them and the one rank that owns each: in batches, by all-to-all.

Bytes received by a rank for P elements of which each of N ranks owns an equal share: (N-1)/N² · P · element size each
way. Splits are uneven where rows are, so nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.distributed import device_of, rows_of


@dataclass
class Owned:
    """A sharded parameter and the rank, within the ranks that shard it, that updates it."""

    parameter: DTensor
    owner: int
    place: tuple[int, int]
    """(group, position) in the optimizer."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return _torch.local(self.parameter)


class Arrival:
    """A message on its way; ``wait`` gives what it brings."""

    def __init__(self, buffer: torch.Tensor, work: Any, sent: torch.Tensor) -> None:
        self._buffer, self._work = buffer, work
        self._sent = sent  # alive until it has left

    def wait(self) -> torch.Tensor:
        """The flat received buffer."""
        if self._work is not None:
            self._work.wait()
        return self._buffer


class Exchange:
    """One batch of parameters, all of one mesh and dtype, with owners among its ranks.

    Args:
        members: in the same order on every rank.
        mesh: its last dimension is the one that shards.
    """

    def __init__(self, members: Sequence[Owned], mesh: DeviceMesh) -> None:
        self.members = list(members)
        self._mesh = mesh
        self._group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
        self.ranks = mesh.size(mesh.ndim - 1)
        self.rank = mesh.get_local_rank(mesh.ndim - 1)
        self._of_owner = [[each for each in self.members if each.owner == rank] for rank in range(self.ranks)]
        self.mine = self._of_owner[self.rank]

    def to_owners(self, rows_of: Callable[[Owned], torch.Tensor]) -> Arrival:
        """Send ``rows_of`` each member to its owner; ``wholes`` reads what arrives."""
        parts = [rows_of(each) for owned in self._of_owner for each in owned]
        sent = [sum(each.local.numel() for each in owned) for owned in self._of_owner]
        received = [sum(_elements(each, rank, self.ranks) for each in self.mine) for rank in range(self.ranks)]
        return self._start(parts, sent, received)

    def wholes(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The whole tensors of ``mine``, each in memory of its own."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.mine]
        at = 0
        for rank in range(self.ranks):
            for i, each in enumerate(self.mine):
                count = _elements(each, rank, self.ranks)
                parts[i].append(buffer[at : at + count])
                at += count
        return [
            torch.cat(pieces).view(each.parameter.shape).to(each.local.device)
            for each, pieces in zip(self.mine, parts, strict=True)
        ]

    def from_owners(self, wholes: Sequence[torch.Tensor]) -> Arrival:
        """Send the rows of ``wholes`` (those of ``mine``) to the ranks that hold them; ``rows`` reads what arrives."""
        parts, sent = [], []
        for rank in range(self.ranks):
            sent.append(sum(_elements(each, rank, self.ranks) for each in self.mine))
            for each, whole in zip(self.mine, wholes, strict=True):
                start, count = rows_of(each.parameter.shape[0], rank, self.ranks)
                parts.append(whole.detach()[start : start + count])
        received = [sum(each.local.numel() for each in owned) for owned in self._of_owner]
        return self._start(parts, sent, received)

    def rows(self, buffer: torch.Tensor) -> list[tuple[Owned, torch.Tensor]]:
        """Every member with this rank's rows of it, views of ``buffer``."""
        found = []
        at = 0
        for owned in self._of_owner:
            for each in owned:
                local = each.local
                found.append((each, buffer[at : at + local.numel()].view(local.shape)))
                at += local.numel()
        return found

    def _start(self, parts: list[torch.Tensor], sent: list[int], received: list[int]) -> Arrival:
        device = device_of(self._mesh)
        flat = [part.reshape(-1) for part in parts]
        dtype = flat[0].dtype if flat else self.members[0].parameter.dtype
        outgoing = torch.cat(flat).to(device) if flat else torch.empty(0, dtype=dtype, device=device)
        incoming = torch.empty(sum(received), dtype=dtype, device=device)
        work = dist.all_to_all_single(incoming, outgoing, received, sent, group=self._group, async_op=True)
        return Arrival(incoming, work, outgoing)


def _elements(each: Owned, rank: int, ranks: int) -> int:
    rows, *rest = each.parameter.shape
    return rows_of(rows, rank, ranks)[1] * math.prod(rest)
