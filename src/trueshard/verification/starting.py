"""Starts the processes of a run of a verification, waits for them, and says why they failed.

torch elastic's own process contexts start and end them: when one fails, the others are ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

from trueshard.verification.job import Failure, Job

TAIL = 30
"""Lines of a process's own words that are shown where it left nothing else."""


def start(job: Job, role: str, ranks: int, limit: float) -> Any:
    """Run ``role`` on ``ranks`` processes of this machine; returns what the first left, or the ``Failure``.

    Args:
        limit: seconds after which the processes are ended, and the failure has every process's stack.
    """
    logs = job.folder / f"{role}-logs"
    logs.mkdir()
    everyone = range(ranks)
    context = start_processes(
        name=f"verify-{role}",
        entrypoint=sys.executable,
        args={rank: ("-m", "trueshard.verification.worker", str(job.folder), role) for rank in everyone},
        envs={rank: _environment(rank, ranks, job.threads) for rank in everyone},
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    try:
        with _quietly():
            ended = context.wait(timeout=limit)
        if ended is None:
            return _late(context, logs, limit)
    finally:
        context.close(signal.SIGKILL)
    failures = [pickle.loads(file.read_bytes()) for file in job.folder.glob(f"{role}-*.failure")]
    if failures:
        return min(failures, key=lambda each: (each.kind == "failed", each.at))
    if ended.is_failed():
        rank, first = min(ended.failures.items(), key=lambda item: item[1].timestamp)
        words = f"rank {rank} was ended by {first.signal_name()}" if first.exitcode < 0 else f"rank {rank} ended"
        return Failure(rank, "?", "failed", words, _said(logs, rank), time.time())
    return job.get(role)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Inside, elastic does not log a failure: it is reported."""
    elastic, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    was, elastic.propagate = elastic.propagate, False
    elastic.addHandler(silent)
    try:
        yield
    finally:
        elastic.removeHandler(silent)
        elastic.propagate = was


def _environment(rank: int, ranks: int, threads: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # they meet in a file
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _late(context: Any, logs: Path, limit: float) -> Failure:
    for pid in context.pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)  # each prints its stacks
    time.sleep(1)
    stacks = "\n".join(f"rank {rank}:\n{_said(logs, rank)}" for rank in context.pids())
    return Failure(0, "?", "failed", f"the processes have not ended within {limit:.0f} s", stacks, time.time())


def _said(logs: Path, rank: int) -> str:
    """The last lines that a process wrote to stderr."""
    files = sorted(logs.glob(f"**/{rank}/stderr.log"))
    lines = files[-1].read_text(encoding="utf-8", errors="replace").splitlines() if files else []
    return "\n".join(lines[-TAIL:])
