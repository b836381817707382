"""Work that is divided over ranks: each does its part, all get all parts, and an error of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from trueshard.errors import RankFailed, UserError

Item = TypeVar("Item")
Part = TypeVar("Part")


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def divided(items: Sequence[Item], work: Callable[[list[Item]], Sequence[Part]]) -> list[Part]:
    """Return ``work``'s part for each of ``items``, which are the same on every rank. Collective.

    ``work`` is called on each rank with every N-th item, and returns a part for each. Parts must be picklable.

    Raises:
        UserError: ``work`` raised it on any rank.
        RankFailed: ``work`` raised something else on another rank.
    """
    rank, ranks = rank_and_ranks()
    parts = on_every_rank(lambda: list(work(list(items[rank::ranks]))))
    return [parts[number % ranks][number // ranks] for number in range(len(items))]


def on_every_rank(work: Callable[[], Part]) -> list[Part]:
    """Return what ``work`` returns on each rank, in their order. Collective; raises as ``divided``."""
    ranks = rank_and_ranks()[1]
    found: Any = None
    error: Exception | None = None
    try:
        found = work()
    except Exception as caught:
        error = caught
    mine = found, None if error is None else str(error), isinstance(error, UserError)
    told = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(told, mine)
    if error is not None:
        raise error
    for other, (_, message, by_user) in enumerate(told):
        if message is not None:
            raise UserError(message) if by_user else RankFailed(f"rank {other} failed: {message}")
    return [part for part, _, _ in told]
