"""The processes of a run of a verification: what each of them does, how they are started, and why they failed.

What a process returns, or why it failed, it leaves in the folder of the case.
"""

from __future__ import annotations

import datetime
import errno
import faulthandler
import os
import pickle
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trueshard.distributed import ensure_process_group
from trueshard.errors import UserError, one_line
from trueshard.launching import how, last_lines, python_command, run_ranks
from trueshard.verification.report import Failure
from trueshard.verification.runs import reference, restored, sharded
from trueshard.verification.subjects import Case, ShardRefused
from trueshard.verification.training import Progress

RUNS = {"reference": reference, "sharded": sharded, "restored": restored}
LEAST_SPACE = 1 << 20  # free bytes below which what the processes leave to each other may be cut off


def start(case: Case, run: str, ranks: int, limit: float) -> Any:
    """Take one of ``RUNS`` for at most ``limit`` seconds; return what the first rank left, or the ``Failure``."""
    logs = case.folder / f"{run}-logs"
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # they meet in a file
        "OMP_NUM_THREADS": str(case.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = python_command(f"from {__name__} import work; work(*sys.argv[1:])", str(case.folder), run)
    ended = run_ranks(command, ranks, environment=environment, logs=logs, limit=limit)
    ended.raise_for_signal()
    if ended.is_late:
        stacks = "\n".join(f"rank {rank}:\n{last_lines(logs, rank)}" for rank in range(ranks))
        return Failure(0, "?", "failed", f"the processes have not ended within {limit:.0f} s", stacks, time.time())
    if shutil.disk_usage(case.folder).free < LEAST_SPACE:
        raise OSError(f"no space is left in {case.folder.parent}; free some, or let TMPDIR name another folder")
    failures = [pickle.loads(file.read_bytes()) for file in case.folder.glob(f"{run}-*.failure")]
    if not failures and not ended.codes:
        return case.get(run)
    return _cause(failures, ended.codes, ranks, logs)


def _cause(failures: list[Failure], codes: Mapping[int, int], ranks: int, logs: Path) -> Failure:
    """Return the failure from which the others follow: one that a process left of itself, or its exit code by rank."""
    first = min(failures, key=lambda each: (each.kind == "failed", each.at), default=None)
    stage = first.stage if first is not None else "?"
    silent = sorted(set(range(ranks)) - {each.rank for each in failures})
    for rank in silent:
        if rank in codes:
            words = f"the process {how(codes[rank])}"
            return Failure(rank, stage, "failed", words, last_lines(logs, rank), time.time())
    assert first is not None
    if silent and "imed out" in first.words:
        words = f"the other ranks wait for it; {first.words}"
        return Failure(silent[0], stage, "failed", words, last_lines(logs, silent[0]), first.at)
    return first


def work(folder: str, run: str) -> None:
    """Be one process of a run, and end the process with exit code 0 or 1."""
    threading.Thread(target=_leave_with_parent, args=(os.getppid(), folder), daemon=True).start()
    rank, progress, source = int(os.environ["RANK"]), Progress(), None
    try:
        case: Case = pickle.loads((Path(folder) / "case.pickle").read_bytes())
        source = case.source
        torch.set_num_threads(case.threads)
        faulthandler.dump_traceback_later(case.timeout / 2, repeat=True)  # for whoever waits for this rank in vain
        ranks = int(os.environ["WORLD_SIZE"])
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        store = dist.FileStore(str(case.folder / f"{run}.store"), ranks)
        ensure_process_group(datetime.timedelta(seconds=case.timeout), store)
        found = RUNS[run](case.on_other_ranks() if run == "restored" else case, progress)
        if rank == 0:
            case.put(run, found)
        dist.barrier()
    except BaseException as error:
        kind, words = _described(error, run, progress.stage, source)
        failure = Failure(rank, progress.stage, kind, words, traceback.format_exc(), time.time())
        (Path(folder) / f"{run}-{rank}.failure").write_bytes(pickle.dumps(failure))
        _leave(1)
    _leave(0)


def _leave_with_parent(parent: int, folder: str) -> None:
    """End this process and remove the folder if the parent was killed: nobody else would."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    _leave(1)


def _described(error: BaseException, run: str, stage: str, source: Any) -> tuple[str, str]:
    words = one_line(error)
    if isinstance(error, ShardRefused):
        return "refused", words
    if isinstance(error, UserError) or (run == "reference" and isinstance(error, ValueError)):
        return "input", words
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "input", f"{words}; free some, or let TMPDIR name another folder"
    words = f"{type(error).__name__}: {words}"
    file = Path(source.rpartition(":")[0]).expanduser().resolve() if isinstance(source, str) else None
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file)]
    if file is not None and lines:  # in the user's own file
        words += f" ({file.name}, line {lines[-1]})"
    if run == "reference":  # the user's: the model fails without any sharding, too
        return "input", f"one process, without sharding, fails at {stage}: {words}"
    return "failed", words


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: threads of a lost collective would keep it
