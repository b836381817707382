"""One rank of a run: join the others, check, train, and leave so that nobody waits and one voice speaks.

When a rank fails, the others fail after it, in a collective that lost its peer. Those, and an error that rank 0 tells
as well, are held back for `YIELD` seconds: time in which torch elastic ends the process, so that what is printed
is the cause. Where nobody ends it, it speaks then.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from typing import NoReturn

import torch.distributed as dist

from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.loop import train
from trueshard.train.running import resuming as checkpoints
from trueshard.train.running.launch import USER_ERROR, Ranks, join
from trueshard.train.running.preflight import Ready, check
from trueshard.train.running.signals import StopRequest

YIELD = 5.0
"""Seconds a rank waits before it reports a failure that is probably another's."""


def work(config: Config) -> NoReturn:
    """Run this process's rank of the training, and end the process with the exit code of the run."""
    stop = StopRequest()
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    try:
        ranks = join(os.environ)
        ready = _check_together(config, ranks)
        code = 0 if tell_if_complete(config, ready, ranks.rank == 0) else train(config, ready, ranks, stop)
    except UserError as error:
        _leave(f"trueshard: {error}", USER_ERROR, wait=rank != 0)
    except Exception as error:
        _leave(f"trueshard: rank {rank} failed:\n{traceback.format_exc()}", 1, wait=_lost_peer(error))
    dist.destroy_process_group()
    _exit(code)


def tell_if_complete(config: Config, ready: Ready, aloud: bool) -> bool:
    """Whether there is nothing left to do in this run; says so, and what to change, if `aloud`."""
    folder = checkpoints.folder(config)
    if ready.step < config.train.steps or not (folder / "loss.png").exists():
        return False
    if aloud:
        print(
            f"The run in {folder} is complete: {ready.step} steps. To train on, set train.steps above "
            f"{ready.step}; to begin another run, change run.dir.",
            flush=True,
        )
    return True


def _check_together(config: Config, ranks: Ranks) -> Ready:
    """Check on rank 0, which makes what is missing, then on the others; an error is raised on all."""
    ready, problem = None, [""]
    if ranks.rank == 0:
        try:
            ready = check(config, ranks.world)
        except UserError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0, device=ranks.device)
    if problem[0]:
        raise UserError(problem[0])
    return ready or check(config, ranks.world, make=False)


def _lost_peer(error: Exception) -> bool:
    """Whether an error looks like the consequence of another rank's end."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        sign in text
        for sign in ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe", "failed on rank")
    )


def _leave(message: str, code: int, wait: bool) -> NoReturn:
    """Say why, after a while if another rank probably says it better, and end the process."""
    if wait:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(YIELD)
    print(message, file=sys.stderr)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End the process without the clean-up of the interpreter.

    It could wait for other ranks; and a thread of the communication library that asks for the interpreter's lock
    meanwhile aborts the process ("terminate called without an active exception"), after all work was done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
