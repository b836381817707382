"""Threads of this process that stand for the ranks of one axis, so that a trial needs no other process.

torch has such a group for its own tests only, under a private name, and that one changes the whole process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
_ProcessGroup: Any = dist.ProcessGroup
"""Its methods have overloads of which a group in Python needs one each."""


class ThreadGroup(_ProcessGroup):
    """Process group of one thread, for the collectives of ``parallel``, on tensors of the CPU."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.ranks)
        self._own, self._meeting = rank, meeting

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        parts = self._meeting.exchange(self._own, tensors[0].clone())
        tensors[0].copy_(torch.stack(parts).sum(0))
        return _Done()

    def allgather(self, outputs: Any, tensors: Any, options: Any = None) -> Any:
        for output, part in zip(outputs[0], self._meeting.exchange(self._own, tensors[0].clone()), strict=True):
            output.copy_(part)
        return _Done()

    def reduce_scatter_single(self, output: Any, tensor: Any, options: Any = None) -> Any:
        parts = self._meeting.exchange(self._own, tensor.clone())
        output.copy_(torch.stack(parts).sum(0).chunk(self._meeting.ranks)[self._own])
        return _Done()

    _reduce_scatter_base = reduce_scatter_single  # its name before torch 2.13


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _Meeting:
    """Where threads exchange values. One thread runs at a time: what a forward changes for a while is its own."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._turn, self._barrier = threading.Lock(), threading.Barrier(ranks)
        self._values: list[Any] = [None] * ranks

    @contextlib.contextmanager
    def attend(self) -> Iterator[None]:
        """Run as one of the ranks; an error lets no other one wait."""
        with self._turn:
            try:
                yield
            except BaseException:
                self._barrier.abort()
                raise

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the value of every rank."""
        self._values[rank] = value
        self._wait()
        result = list(self._values)
        self._wait()  # before the next exchange writes
        return result

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()


def run_as_ranks(ranks: int, function: Callable[[int, dist.ProcessGroup], Result]) -> list[Result]:
    """Return what ``function(rank, group)`` returns on each of ``ranks`` threads; raise the first error of one."""
    meeting = _Meeting(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with meeting.attend():
                results[rank] = function(rank, ThreadGroup(rank, meeting))
        except threading.BrokenBarrierError:
            pass  # another one has raised
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
