"""Threads of this process that stand for the ranks of one axis, so that a trial needs no other process.

torch has such a group for its own tests only, under a private name, and that one changes the whole process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
_ProcessGroup: Any = dist.ProcessGroup  # its methods have overloads, of which a group in Python needs one each


class ThreadGroup(_ProcessGroup):
    """Process group of one thread, for the collectives of ``parallel``, on tensors of the CPU."""

    def __init__(self, rank: int, ranks: int, exchange: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        super().__init__(rank, ranks)
        self._exchange = exchange

    def allreduce(self, tensors: Any, options: Any = None) -> None:
        tensors[0].copy_(torch.stack(self._exchange(tensors[0])).sum(0))

    def all_gather_single(self, output: Any, tensor: Any, options: Any = None) -> None:
        output.copy_(torch.cat(self._exchange(tensor)))

    _allgather_base = all_gather_single  # its name before torch 2.13

    def reduce_scatter_single(self, output: Any, tensor: Any, options: Any = None) -> None:
        output.copy_(torch.stack(self._exchange(tensor)).sum(0).chunk(self.size())[self.rank()])

    _reduce_scatter_base = reduce_scatter_single  # its name before torch 2.13


def run_as_ranks(
    ranks: int,
    function: Callable[[int, dist.ProcessGroup], Result],
    take: Callable[[], Any] = lambda: None,
    give: Callable[[Any], None] = lambda taken: None,
) -> list[Result]:
    """Return what ``function(rank, group)`` returns on each of ``ranks`` threads; raise the first error of one.

    One thread runs at a time, so what a forward changes for a while is its own; an error leaves no other one waiting.
    ``give(take())`` gives a thread back what others have changed in between (random states).
    """
    turn, barrier = threading.Lock(), threading.Barrier(ranks)
    values, results = [None] * ranks, [None] * ranks
    errors: list[BaseException] = []

    def wait() -> None:
        own = take()
        turn.release()
        try:
            barrier.wait()
        finally:
            turn.acquire()
            give(own)

    def exchange(rank: int, value: Any) -> Any:
        values[rank] = value.clone()
        wait()
        everyone = list(values)
        wait()  # before the next exchange writes
        return everyone

    def run(rank: int) -> None:
        with turn:
            try:
                group: Any = ThreadGroup(rank, ranks, functools.partial(exchange, rank))
                results[rank] = function(rank, group)  # type: ignore[call-overload]
            except threading.BrokenBarrierError:
                pass  # another one has raised
            except BaseException as error:
                errors.append(error)
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
