"""One process of a verification: ``python -m trueshard.verification.worker FOLDER ROLE``.

What its role returns, or why it failed, it leaves in the folder.
"""

from __future__ import annotations

import datetime
import errno
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trueshard.distributed import ensure_process_group
from trueshard.errors import UserError
from trueshard.verification import reference, sharded
from trueshard.verification.job import Failure, Job
from trueshard.verification.subject import Refused
from trueshard.verification.training import Stage

ROLES = {"reference": reference.run, "sharded": sharded.run, "restored": sharded.restore}


def main(folder: str, role: str) -> None:
    """Run a role, and leave the process with 0 or 1."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(), folder), daemon=True).start()
    rank, stage, source = int(os.environ["RANK"]), Stage(), None
    try:
        job: Job = pickle.loads((Path(folder) / "job.pickle").read_bytes())
        source = job.source
        torch.set_num_threads(job.threads)
        faulthandler.dump_traceback_later(job.timeout / 2, repeat=True)  # for whoever waits for this rank in vain
        world = int(os.environ["WORLD_SIZE"])
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        store = dist.FileStore(str(job.folder / f"{role}.store"), world)
        ensure_process_group(datetime.timedelta(seconds=job.timeout), store)
        found = ROLES[role](job.on_other_ranks() if role == "restored" else job, stage)
        if rank == 0:
            job.put(role, found)
        dist.barrier()
    except BaseException as error:
        kind, words = _told(error, role, stage.words, source)
        failure = Failure(rank, stage.words, kind, words, traceback.format_exc(), time.time())
        (Path(folder) / f"{role}-{rank}.failure").write_bytes(pickle.dumps(failure))
        _leave(1)
    _leave(0)


def _leave_with_parent(parent: int, folder: str) -> None:
    """Where the parent was killed, nobody else ends this process, or removes its folder."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    _leave(1)


def _told(error: BaseException, role: str, stage: str, source: Any) -> tuple[str, str]:
    """What kind of failure it is, in one line."""
    words = " ".join(str(error).split())
    if isinstance(error, Refused):
        return "refused", words
    if isinstance(error, UserError) or (role == "reference" and isinstance(error, ValueError)):
        return "input", words
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "input", f"{words}; free some, or let TMPDIR name another folder"
    words = f"{type(error).__name__}: {words}{_place(error, source)}"
    if role == "reference":  # of the user, whose model does not run without any sharding either
        return "input", f"one process, without sharding, fails at {stage}: {words}"
    return "failed", words


def _place(error: BaseException, source: Any) -> str:
    """The last line of the user's own file that the error came through."""
    file = Path(source.rpartition(":")[0]).expanduser().resolve() if isinstance(source, str) else None
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file)]
    return f" ({file.name}, line {lines[-1]})" if file is not None and lines else ""


def _leave(code: int) -> None:
    """End at once: threads of a lost collective would wait on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
