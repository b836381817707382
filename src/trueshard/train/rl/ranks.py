"""Work that is divided over ranks: each does its part, all get all parts, and all raise the first one's error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trueshard.distributed import host_group, in_thread
from trueshard.errors import RankFailed, UserError

Item = TypeVar("Item")
Part = TypeVar("Part")
BEAT = 0.2
"""Seconds between two signs of a rank that waits for another program: less than the shortest ``run.timeout``, 1."""


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def divided(items: Sequence[Item], work: Callable[[list[Item]], Sequence[Part]]) -> list[Part]:
    """Return ``work``'s part for each of ``items``, which are the same on every rank. Collective; raises likewise.

    ``work`` is called on each rank with every N-th item, and returns a part for each. Parts must be picklable.
    """
    rank, ranks = rank_and_ranks()
    parts = on_every_rank(lambda: list(work(list(items[rank::ranks]))))
    return [parts[number % ranks][number // ranks] for number in range(len(items))]


def awaited(work: Callable[[], Part]) -> list[Part]:
    """Return what ``on_every_rank`` does, of work without collectives that waits for another program, however long.

    A rank that is done waits for the others in a collective, and would give the run up after ``run.timeout``, with the
    wrong cause. So ``work`` runs in a thread, and meanwhile all ranks tell one another that they are there.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return on_every_rank(work)
    future, group, working = in_thread(work), host_group(world), torch.ones(())
    while working:
        wait([future], BEAT)
        working = torch.tensor(float(not future.done()))
        dist.all_reduce(working, dist.ReduceOp.MAX, group)
    return on_every_rank(future.result)


def on_every_rank(work: Callable[[], Part]) -> list[Part]:
    """Return what ``work`` returns on each rank, in their order. Collective.

    Raises:
        UserError: ``work`` raised it on the first rank on which it failed.
        RankFailed: ``work`` raised something else there, which that rank itself raises.
    """
    rank, ranks = rank_and_ranks()
    part: Any = None
    error: Exception | None = None
    try:
        part = work()
    except Exception as caught:
        error = caught
    local = part, None if error is None else str(error), isinstance(error, UserError)
    parts = [local] * ranks
    if ranks > 1:
        dist.all_gather_object(parts, local)
    for other, (_, message, is_user_error) in enumerate(parts):
        if message is None:
            continue
        if error is not None and other == rank:
            raise error
        raise UserError(message) if is_user_error else RankFailed(f"rank {other} failed: {message}") from error
    return [part for part, _, _ in parts]


def on_first_rank(work: Callable[[], Part], collect: Callable[..., list[Any]] = on_every_rank) -> Part:
    """Return on every rank what ``work`` returns on the first; ``collect``: ``on_every_rank``, or ``awaited``."""
    first: Part = collect(lambda: None if rank_and_ranks()[0] else work())[0]
    return first
