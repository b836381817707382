"""One process of a verification: ``python -m trueshard.verification.worker FOLDER ROLE``.

What its role returns, or why it failed, it leaves in the folder.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path

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
    rank, stage = int(os.environ["RANK"]), Stage()
    try:
        job: Job = pickle.loads((Path(folder) / "job.pickle").read_bytes())
        torch.set_num_threads(job.threads)
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
        kind, words = _told(error, role, stage.words)
        failure = Failure(rank, stage.words, kind, words, traceback.format_exc(), time.time())
        (Path(folder) / f"{role}-{rank}.failure").write_bytes(pickle.dumps(failure))
        _leave(1)
    _leave(0)


def _told(error: BaseException, role: str, stage: str) -> tuple[str, str]:
    """What kind of failure it is, in one line."""
    words = " ".join(str(error).split())
    if isinstance(error, Refused):
        return "refused", words
    if isinstance(error, UserError) or (role == "reference" and isinstance(error, ValueError)):
        return "input", words
    words = f"{type(error).__name__}: {words}"
    if role == "reference":  # of the user, whose model does not run without any sharding either
        return "input", f"one process, without sharding, fails at {stage}: {words}"
    return "failed", words


def _leave(code: int) -> None:
    """End at once: threads of a lost collective would wait on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
