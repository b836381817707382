"""What the ranks of a checkpoint tell one another: small values, through a group of its own.

A group of its own, so that a save in the background does not come between the collectives of training, and so that a
rank that calls ``save`` or ``load`` alone ends in an error instead of being answered by another's gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trueshard import _torch

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


class Together:
    """Ranks that save or load together.

    Args:
        tensors: what they hold; a mesh of some of the ranks makes those the ranks that are asked.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.rank, self.world, self._group = 0, 1, None
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return
        meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
        ranks = sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten()})
        members = tuple(ranks or range(dist.get_world_size()))
        self.rank, self.world = members.index(dist.get_rank()), len(members)
        if self.world > 1:
            self._group = _group_of(members)

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in order. Collective; values that can be pickled."""
        if self._group is None:
            return [value]
        received: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(received, value, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                "save() and load() are collective, and not every rank came: call them on all ranks, with the same "
                f"arguments ({str(error).splitlines()[0]})"
            ) from error
        return received

    def settle(self, error: BaseException | None, what: str, value: Any = None) -> list[Any]:
        """``value`` of every rank, if none has an ``error``; otherwise all raise: their own, or the first other's."""
        told = self.gather((None if error is None else f"{type(error).__name__}: {error}", value))
        failed = [(rank, message) for rank, (message, _) in enumerate(told) if message is not None]
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(f"{what}: rank {failed[0][0]} failed: {failed[0][1]}")
        return [value for _, value in told]


def compare(function: str, digests: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless all ranks were given the same; the message names the first difference.

    Args:
        function: which was called.
        digests: of each rank, what must be the same, by what it is called.
    """
    first = digests[0]
    for rank, digest in enumerate(digests):
        for key in [*first, *(key for key in digest if key not in first)]:
            if digest.get(key) != first.get(key):
                one, other = (str(each.get(key, "missing"))[:200] for each in (first, digest))
                raise ValueError(
                    f"{function} was given different things on different ranks: {key!r} is {one} on rank 0 and {other} "
                    f"on rank {rank}; give all ranks the same"
                )


def _group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    known = _groups.setdefault(_torch.world(), {})
    if members not in known:
        try:
            known[members] = dist.new_group(
                list(members),
                backend="gloo",
                timeout=_torch.timeout_of(_torch.world()),
                use_local_synchronization=True,
                group_desc="trueshard-checkpoint",
            )
        except RuntimeError as error:
            raise RuntimeError(
                "save() and load() are collective, and not every rank came: call them on all ranks "
                f"({str(error).splitlines()[0]})"
            ) from error
    return known[members]
