"""One rank of a run: join the others, check, train, and leave so that nobody waits and one voice speaks.

- When a rank fails, the others fail after it, in a collective that lost its peer. Those, and an error that rank 0 tells
  as well, are held back for `YIELD` seconds: time in which torch elastic ends the process, so that what is printed
  is the cause. Where nobody ends it, it speaks then.
- Rank 0 holds the lock of the run's folder: it dies with it.
- Out of memory, a rank leaves a record. Our launcher, or the next start under a torchrun that starts again, finds what
  would fit; where neither will, the rank that was first does, while the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch.distributed as dist

from trueshard.errors import UserError, one_line
from trueshard.train.config import Config
from trueshard.train.recipe import folder_of
from trueshard.train.running import lock, memory, tighten
from trueshard.train.running.launch import FAILED, OUT_OF_MEMORY, USER_ERROR, Ranks, join
from trueshard.train.running.located import located
from trueshard.train.running.preflight import Ready, check, check_writable, tell_changes, tell_if_complete
from trueshard.train.running.session import train
from trueshard.train.running.signals import STOPPED, StopRequest

YIELD = 5.0
"""Seconds a rank waits before it reports a failure that is probably another's."""
PATIENCE = datetime.timedelta(days=1)
"""How long the others wait while rank 0 makes the data."""
SPEECH = 300.0
"""Seconds that ranks wait for the one that finds out what would fit."""


@dataclass
class _End:
    """How this rank ends."""

    code: int
    message: str = ""
    wait: bool = False
    """Another rank probably says it better."""
    is_final: bool = False
    """Starting again would come to the same."""
    shortage: memory.Shortage | None = None


class _Rank:
    """What is known of this rank so far, for whatever ends it."""

    def __init__(self, config: Config, override: bool, profile: bool) -> None:
        self.config, self.override, self.profile = config, override, profile
        self.number = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        self.ranks: Ranks | None = None
        self.ready: Ready | None = None
        self.meter: memory.Meter | None = None


def work(config: Config, *, override: bool = False, profile: bool = False) -> NoReturn:
    """Run this process's rank of the training, and end the process with the exit code of the run."""
    rank = _Rank(config, override, profile)
    stop = StopRequest()
    with contextlib.ExitStack() as held:
        end = _run(rank, stop, held)
        if end.shortage is not None:
            end = _out_of_memory(rank, end.shortage)
    if end.wait and stop.asked:  # whoever ends the others knows why already
        os._exit(end.code)
    _leave(rank, end)


def _run(rank: _Rank, stop: StopRequest, held: contextlib.ExitStack) -> _End:
    try:
        rank.ranks = ranks = join(os.environ, rank.config.run.timeout)
        rank.config, ready = _check_together(rank, ranks, held)
        rank.ready = ready
        if tell_if_complete(rank.config, ready, ranks.rank == 0):
            return _End(0)
        rank.meter = memory.Meter(ranks.device, ranks.local_world)
        code = train(rank.config, ready, ranks, stop, profile=rank.profile, override=rank.override)
        dist.destroy_process_group()
        return _End(code, is_final=code == STOPPED)
    except UserError as error:
        return _End(USER_ERROR, f"trueshard: {error}", wait=rank.number != 0, is_final=True)
    except Exception as error:
        if memory.is_out_of_memory(error) and rank.meter is not None:
            return _End(OUT_OF_MEMORY, shortage=rank.meter.shortage(rank.number, error))
        if _lost_peer(error):
            return _End(FAILED, _lost(rank, error), wait=True)
        return _End(FAILED, f"trueshard: rank {rank.number} failed:\n{traceback.format_exc()}")


def _check_together(rank: _Rank, ranks: Ranks, held: contextlib.ExitStack) -> tuple[Config, Ready]:
    """Check on rank 0, which makes what is missing, then on the others; an error is raised on all."""
    ready: Ready | None = None
    told: list[Any] = ["", {}]
    patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    if ranks.rank == 0:
        try:
            check_writable(rank.config)
            held.enter_context(lock.held(folder_of(rank.config)))
            config, ready = _check(rank, ranks)
            told[1] = _differences(rank.config, config)
        except UserError as error:
            told[0] = str(error)
    dist.broadcast_object_list(told, src=0, group=patient)
    dist.destroy_process_group(patient)
    problem, words = told
    if problem:
        raise UserError(problem)
    config = tighten.changed(rank.config, words)
    return config, ready or check(config, ranks.world, make=False, override=rank.override)


def _check(rank: _Rank, ranks: Ranks) -> tuple[Config, Ready]:
    """What the checks find, and the configuration as memory has made it. On rank 0."""
    config = located(tighten.applied(rank.config, ranks.world))
    ready = check(config, ranks.world, override=rank.override)
    if not ranks.is_ours:
        tell_changes(ready)
    if memory.is_left(folder_of(config)):  # of an earlier start
        settled = None
        if config.train.on_oom == "tighten":
            from trueshard.train.running.fitting import settle

            settled = settle(config, ready.architecture, ranks.world, ranks.local_world, ranks.device)
        else:
            memory.clear(folder_of(config))
        if settled is not None and settled.words is None:
            raise UserError(settled.message)
        if settled is not None and settled.words is not None:
            print(f"trueshard: {settled.message}", file=sys.stderr, flush=True)
            config = tighten.changed(config, settled.words)
    if ranks.device.type == "cuda":
        ready = dataclasses.replace(ready, memory_planned=_planned(config, ready, ranks))
    return config, ready


def _planned(config: Config, ready: Ready, ranks: Ranks) -> int | None:
    """Forecast the run, and store the plan with it; returns the bytes of a rank."""
    from trueshard.train.running import planned

    device = planned.hardware_here(ranks.device, ranks.local_world)
    try:
        found = planned.study(config, ready.architecture, ranks.world, device, ranks.local_world)
    except planned.Unplanned as error:
        planned.write(config, error)
        print(f"No forecast of memory and speed: {error}", flush=True)
        return None
    planned.write(config, found)
    return planned.bytes_of(found.forecast)


def _differences(config: Config, other: Config) -> dict[str, Any]:
    """The settings of `other` that are not those of `config`, by dotted key."""
    was, now = config.model_dump(by_alias=True), other.model_dump(by_alias=True)
    return {
        f"{section}.{key}": value
        for section, table in now.items()
        if table != was[section]
        for key, value in table.items()
        if value != was[section][key]
    }


def _out_of_memory(rank: _Rank, shortage: memory.Shortage) -> _End:
    """Leave the record, and find out what would fit if nobody else will."""
    assert rank.ranks is not None
    assert rank.ready is not None
    ranks, folder = rank.ranks, folder_of(rank.config)
    is_first = memory.leave(folder, shortage)
    if ranks.is_ours or (ranks.ends_agent and rank.config.train.on_oom == "tighten"):
        return _End(OUT_OF_MEMORY)
    if not is_first:
        deadline = time.monotonic() + SPEECH
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while memory.is_left(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(YIELD)
        return _End(FAILED)
    settled = _settled_aside(rank.config, rank.ready.architecture, ranks.world, ranks.local_world, ranks.device)
    return _End(FAILED, f"trueshard: {settled}", is_final=True)


def _settled_aside(*arguments: Any) -> str:
    """What would fit, found out by a process of its own: this one has no memory left."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell_what_fits, args=(theirs, arguments))
    process.start()
    theirs.close()
    try:
        return str(ours.recv())
    except EOFError:
        return "memory ran out, and there was too little of it to find out what would fit"
    finally:
        process.join()


def _tell_what_fits(line: Connection, arguments: tuple[Any, ...]) -> None:
    from trueshard.train.running.fitting import settle

    settled = settle(*arguments)
    assert settled is not None
    line.send(settled.message)


def _lost_peer(error: Exception) -> bool:
    """Whether an error looks like the consequence of another rank's end."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe", "failed on rank")
    return isinstance(error, RuntimeError) and any(sign in text for sign in (*signs, "timed out", "timeout"))


def _lost(rank: _Rank, error: Exception) -> str:
    """What a rank says that was left alone: one line."""
    detail, seconds = one_line(error), rank.config.run.timeout
    return (
        f"trueshard: rank {rank.number} lost the others, which ended or could not be reached within {seconds} seconds "
        f"(run.timeout); the same command goes on from the newest checkpoint ({detail[:200]})"
    )


def _leave(rank: _Rank, end: _End) -> NoReturn:
    """Say why, after a while if another rank probably says it better, and end the process.

    Without the clean-up of the interpreter: it could wait for other ranks; and a thread of the communication library
    that asks for the interpreter's lock meanwhile aborts the process ("terminate called without an active exception"),
    after all work was done.
    """
    if end.wait:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(end.code))
        time.sleep(YIELD)
    if end.message:
        print(end.message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if end.is_final and rank.ranks is not None and rank.ranks.ends_agent:
        _end_agent(end.code)
    os._exit(end.code)


def _end_agent(code: int) -> NoReturn:
    """End the torchrun that would start this worker again, though that would come to the same."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(YIELD)
    os._exit(code)
