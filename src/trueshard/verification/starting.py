"""Starts the processes of a run of a verification, waits for them, and says why they failed.

torch elastic's own process contexts start and end them: when one fails, the others are ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes

from trueshard.verification.job import Failure, Job

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that elastic handles."""
LEAST_SPACE = 1 << 20
"""Bytes."""
TAIL = 30
"""Lines of a process's own words that are shown where it left nothing else."""


def start(job: Job, role: str, ranks: int, limit: float) -> Any:
    """Run ``role`` on ``ranks`` processes of this machine; returns what the first left, or the ``Failure``.

    Args:
        limit: seconds after which the processes are ended, and the failure has every process's stack.
    """
    logs = job.folder / f"{role}-logs"
    logs.mkdir()
    with _own_signals(), _quietly():
        context = start_processes(
            name=f"verify-{role}",
            entrypoint=sys.executable,
            args={rank: ("-m", "trueshard.verification.worker", str(job.folder), role) for rank in range(ranks)},
            envs={rank: _environment(rank, ranks, job.threads) for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
        )
        try:
            ended = context.wait(timeout=limit)
            if ended is None:
                return _late(context, logs, limit)
        finally:
            context.close(signal.SIGKILL)
    _check_space(job.folder)
    failures = [pickle.loads(file.read_bytes()) for file in job.folder.glob(f"{role}-*.failure")]
    if not failures and not ended.is_failed():
        return job.get(role)
    return _cause(failures, {rank: each.exitcode for rank, each in ended.failures.items()}, range(ranks), logs)


def _cause(failures: list[Failure], exit_codes: dict[int, int], ranks: range, logs: Path) -> Failure:
    """Which of several failures the others follow from.

    Args:
        failures: what processes left of themselves.
        exit_codes: of the processes that were first to end; below 0 by a signal.
        ranks: all.
    """
    first = min(failures, key=lambda each: (each.kind == "failed", each.at), default=None)
    stage = first.stage if first is not None else "?"
    spoken = {each.rank for each in failures}
    for rank, code in exit_codes.items():
        if rank not in spoken and code != -signal.SIGTERM:  # which elastic sends to those that are left
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Failure(rank, stage, "failed", f"the process {how}", said(logs, rank), time.time())
    assert first is not None
    silent = [rank for rank in ranks if rank not in spoken]
    if silent and "imed out" in first.words:
        return Failure(
            silent[0], stage, "failed", f"the other ranks wait for it; {first.words}", said(logs, silent[0]), first.at
        )
    return first


def _check_space(folder: Path) -> None:
    """Raise ``OSError`` if what the processes leave to each other may be cut off."""
    if shutil.disk_usage(folder).free < LEAST_SPACE:
        raise OSError(f"no space is left in {folder.parent}; free some, or let TMPDIR name another folder")


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """elastic's handlers end with it, and what they raise is what Python raises for these signals."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS} if is_main else {}
    try:
        yield
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    stacks = "\n".join(f"rank {rank}:\n{said(logs, rank)}" for rank in context.pids())
    return Failure(0, "?", "failed", f"the processes have not ended within {limit:.0f} s", stacks, time.time())


def said(logs: Path, rank: int) -> str:
    """The last lines that a process wrote to stderr."""
    files = sorted(logs.glob(f"**/{rank}/stderr.log"))
    lines = files[-1].read_text(encoding="utf-8", errors="replace").splitlines() if files else []
    return "\n".join(lines[-TAIL:])
