"""Runs a function on N fresh processes that form a process group, and returns what each returned.

- Fresh, because what is measured may happen once in a process: a first call, a cache that is still empty, memory.
- But imports are behind them: the processes are forks of one that did nothing else, since importing what peers need
  takes longer than what is measured after it.
- They find the environment that a launcher sets: some peers look there for their rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.peers import IMPORTS

TIMEOUT = timedelta(minutes=5)
"""After which a collective that waits for a dead peer gives up."""


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """``function(*args)`` on ``ranks`` gloo processes, one thread each.

    Args:
        function: at the top level of a module; it and ``args`` are pickled, as is what it returns.
        ranks: number of processes.
        args: the same for every rank.

    Returns:
        One value a rank, in rank order.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the message holds its traceback.
    """
    return _start(function, ranks, ranks, args)


def on_ranks_within(
    limit: float, timeout: timedelta, function: Callable[..., Any], ranks: int, *args: Any
) -> list[Any]:
    """``on_ranks`` of what may hang or crash: processes that still run after ``limit`` seconds are killed.

    Args:
        limit: seconds.
        timeout: after which a collective that waits gives up.
        function: as for ``on_ranks``, as are ``ranks`` and ``args``.
        ranks: number of processes.
        args: the same for every rank.

    Returns:
        One value a rank, in rank order; ``Unfinished`` for one that returned none.
    """
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        context = _begin(function, ranks, ranks, args, Path(folder), timeout)
        for process in context.processes:
            process.join(max(0.0, end - time.monotonic()))
        hung = [process.is_alive() for process in context.processes]
        for process in context.processes:
            process.kill()
        results: list[Any] = []
        for rank, process in enumerate(context.processes):
            process.join()
            file = Path(folder) / str(rank)
            # One that hung may still have seen that another was killed, and told of it.
            ended = file.exists() and not hung[rank]
            results.append(pickle.loads(file.read_bytes()) if ended else Unfinished(hung[rank], process.exitcode))
        return results


@dataclass(frozen=True)
class Unfinished:
    """A process that returned nothing."""

    hung: bool
    """It ran into the limit and was killed; else it ended by itself."""
    code: int | None
    """Its exit status."""


def on_simulated_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """``function(*args)`` in one process that is rank 0 of ``ranks``; its collectives return at once, unanswered."""
    (value,) = _start(function, 1, ranks, args)
    return value


def _start(function: Callable[..., Any], processes: int, ranks: int, args: tuple[Any, ...]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        context = _begin(function, processes, ranks, args, Path(folder), TIMEOUT)
        while not context.join():
            pass
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(processes)]


def _begin(
    function: Callable[..., Any],
    processes: int,
    ranks: int,
    args: tuple[Any, ...],
    folder: Path,
    timeout: timedelta,
) -> Any:
    multiprocessing.set_forkserver_preload(list(IMPORTS))  # heeded where the server has not begun
    given = (folder, processes, ranks, timeout, function, args)
    return mp.start_processes(_work, given, nprocs=processes, join=False, start_method="forkserver")


def _work(
    rank: int,
    folder: Path,
    processes: int,
    ranks: int,
    timeout: timedelta,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # torch warns once a process that a barrier guesses its device; on the CPU there is nothing to guess.
    warnings.filterwarnings("ignore", message=".*barrier.*")
    warnings.filterwarnings("ignore", category=FutureWarning)  # what peers say of one another
    if processes == ranks:
        number, every = str(rank), str(ranks)
        os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=every, LOCAL_WORLD_SIZE=every, GROUP_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # nobody connects: the group is made here
        store = dist.FileStore(str(folder / "store"), ranks)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    gc.freeze()  # what imports left is nobody's: it is neither walked nor counted
    value = folder / f"{rank}.part"
    value.write_bytes(pickle.dumps(function(*args)))
    value.rename(folder / str(rank))
    # A gloo thread may still hold the last tensor. If it wants the interpreter's lock after that has gone, it aborts a
    # process whose work is done; so the process leaves without taking the interpreter down.
    dist.destroy_process_group()
    os._exit(0)
