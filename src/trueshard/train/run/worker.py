"""One rank of a run: join the others, check, train, and end so that no rank waits and only the cause is printed.

- The first SIGINT, SIGTERM or SIGHUP sets a flag that the loop reads between steps, so that it can save; a second one,
  or one before the first step, ends the process at once. A worker whose launcher has died stops by itself.
- When a rank fails, the others fail after it, in a collective that lost its peer. These errors, and those that rank 0
  reports as well, are held back for `HOLD_BACK` seconds, in which the launcher ends the process.
- Out of memory, a rank leaves a record. Our launcher, or the next start under a torchrun that starts again, looks for a
  remedy; where neither will, the rank that failed first does, while the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from trueshard.errors import RankFailed, UserError, one_line, raised_in
from trueshard.launching import FAILED, STOPPED, USER_ERROR
from trueshard.train.config import Config
from trueshard.train.run import out_of_memory, resuming
from trueshard.train.run.checks import Ready, check, held, located, tell_changes, tell_if_complete
from trueshard.train.run.session import train
from trueshard.train.run.world import World, join

if TYPE_CHECKING:
    from trueshard.train.run.replay import Replayed

OUT_OF_MEMORY = 4
"""Exit code of a worker that has left a record of its shortage of memory for the launcher."""
HOLD_BACK = 5.0
"""Seconds a rank waits before it reports a failure that is probably another's."""
DATA_LIMIT = datetime.timedelta(days=1)
"""Time limit of the other ranks while rank 0 makes the data."""
REMEDY_LIMIT = 300.0
"""Seconds that ranks wait for the one that looks for a remedy."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """The wish to stop, from a signal or because the launcher has died."""

    def __init__(self) -> None:
        self.asked = False
        """True if a signal has come since `requested` was first called."""
        self._handles_signals = False
        self._parent = os.getppid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def requested(self) -> bool:
        """Return True if this rank was asked to stop; ranks agree by an all-reduce of it."""
        if not self._handles_signals:
            self._handles_signals = True
            for number in SIGNALS:
                signal.signal(number, self._handle)
        return self.asked or os.getppid() != self._parent

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)


@dataclass
class _End:
    code: int
    message: str = ""
    hold_back: bool = False
    """True if another rank probably reports it better."""
    is_final: bool = False
    """True if starting again would come to the same."""
    shortage: out_of_memory.Shortage | None = None


class _Worker:
    """State of this rank so far, for whatever ends it."""

    def __init__(self, config: Config, override: bool, profile: bool, replayed: Replayed | None) -> None:
        self.config, self.override, self.profile, self.replayed = config, override, profile, replayed
        self.rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        self.stop = StopRequest()
        self.world: World | None = None
        self.ready: Ready | None = None
        self.meter: out_of_memory.MemoryMeter | None = None


def work(
    config: Config, *, override: bool = False, profile: bool = False, replayed: Replayed | None = None
) -> NoReturn:
    """Run this process's rank of the training, or replay a step; end the process with the exit code of the run."""
    worker = _Worker(config, override, profile, replayed)
    with contextlib.ExitStack() as locks:
        end = _run(worker, locks)
        if end.shortage is not None:
            end = _out_of_memory(worker, end.shortage)
    if end.hold_back and worker.stop.asked:  # whoever ends the others knows why already
        os._exit(end.code)
    _leave(worker, end)


def _run(worker: _Worker, locks: contextlib.ExitStack) -> _End:
    try:
        worker.world = world = join(os.environ, worker.config.run.timeout)
        worker.ready = ready = _check_together(worker, world, locks)
        if worker.config.train.exact:
            _compute_alike(world.device)
        stop = worker.stop.requested
        if worker.replayed is not None:
            from trueshard.train.run.replay import replay

            code = replay(worker.config, ready, world.device, stop, worker.replayed)
            dist.destroy_process_group()
            return _End(code)
        if tell_if_complete(worker.config.run.folder, ready, world.rank == 0):
            return _End(0)
        worker.meter = out_of_memory.MemoryMeter(world.device, world.local_size)
        code = train(worker.config, ready, world.device, stop, profile=worker.profile, override=worker.override)
        dist.destroy_process_group()
        return _End(code, is_final=code == STOPPED)
    except UserError as error:
        return _End(USER_ERROR, f"trueshard: {error}", hold_back=worker.rank != 0, is_final=True)
    except Exception as error:
        if out_of_memory.is_out_of_memory(error) and worker.meter is not None:
            return _End(OUT_OF_MEMORY, shortage=worker.meter.shortage(worker.rank, error))
        if _lost_peer(error):
            return _End(
                FAILED,
                f"trueshard: rank {worker.rank} lost the others, which ended or could not be reached within "
                f"{worker.config.run.timeout} seconds (run.timeout); the same command goes on from the newest "
                f"checkpoint ({one_line(error, 200)})",
                hold_back=True,
            )
        return _End(FAILED, f"trueshard: rank {worker.rank} failed:\n{traceback.format_exc()}")


def _compute_alike(device: torch.device) -> None:
    """Make kernels give the same bits on any rank of any run: an operation that cannot raises, and says its name.

    On a CPU a sum depends on the number of threads, which otherwise follows from the number of ranks.
    """
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _check_together(worker: _Worker, world: World, locks: contextlib.ExitStack) -> Ready:
    """Check on rank 0, which makes what is missing, then on the others. An error is raised on all ranks."""
    ready: Ready | None = None
    told: list[Any] = ["", None]
    patient = dist.new_group(backend="gloo", timeout=DATA_LIMIT)
    if world.rank == 0:
        try:
            locks.enter_context(held(worker.config.run.folder))
            told[1], ready = _check_first(worker, world)
        except UserError as error:
            told[0] = str(error)
    dist.broadcast_object_list(told, src=0, group=patient)
    dist.destroy_process_group(patient)
    problem, worker.config = told[0], told[1] or worker.config
    if problem:
        raise UserError(problem)
    return ready or check(worker.config, world.size, make=False, override=worker.override)


def _check_first(worker: _Worker, world: World) -> tuple[Config, Ready]:
    """Return the configuration as the run and its memory have made it, and what the checks find. On rank 0."""
    config = located(resuming.tightened(worker.config, world.size))
    ready = check(config, world.size, override=worker.override)
    if not world.is_ours:
        tell_changes(ready)
    if config.train.on_oom != "tighten":
        out_of_memory.clear(config.run.folder)  # of an earlier start
    remedy = out_of_memory.find_remedy(config, ready.architecture, world.size, world.local_size, world.device)
    if remedy is not None:
        if remedy.settings is None:
            raise UserError(remedy.message)
        print(f"trueshard: {remedy.message}", file=sys.stderr, flush=True)
        config = resuming.with_settings(config, remedy.settings)
    if world.device.type == "cuda":
        ready = dataclasses.replace(ready, memory_planned=_planned_memory(config, ready, world))
    return config, ready


def _planned_memory(config: Config, ready: Ready, world: World) -> int | None:
    """Forecast the run and write `plan.json`; return the bytes of a rank, or None if there is no forecast."""
    from trueshard.train.run import forecast  # the planner

    found = forecast.study(config, ready.architecture, world.size, world.device, world.local_size)
    forecast.write(config.run.folder, found)
    if isinstance(found, forecast.Unplanned):
        print(f"No forecast of memory and speed: {found}", flush=True)
    return forecast.bytes_of(found)


def _out_of_memory(worker: _Worker, shortage: out_of_memory.Shortage) -> _End:
    """Leave the record, and look for a remedy if nobody else will."""
    assert worker.world is not None
    assert worker.ready is not None
    world, folder = worker.world, worker.config.run.folder
    is_first = out_of_memory.leave(folder, shortage)
    if world.is_ours or (world.ends_agent and worker.config.train.on_oom == "tighten"):
        return _End(OUT_OF_MEMORY)
    if not is_first:
        deadline = time.monotonic() + REMEDY_LIMIT
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while (folder / out_of_memory.NAME).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(HOLD_BACK)
        return _End(FAILED)
    arguments = (worker.config, worker.ready.architecture, world.size, world.local_size, world.device)
    message = "memory ran out, and there was too little of it to find out what would fit"
    with contextlib.suppress(Exception):  # in the planner's process: this one has no memory left
        from trueshard.planner import process

        remedy = process.call("trueshard.train.run.out_of_memory:find_remedy", *arguments)
        message = message if remedy is None else remedy.message
    return _End(FAILED, f"trueshard: {message}", is_final=True)


def _lost_peer(error: Exception) -> bool:
    """Return True if an error is the consequence of another rank's end: the communication library made it."""
    file, by_raise = raised_in(error)
    path = Path(file).parts
    communicates = "distributed" in path and "torch" in path and "tensor" not in path
    failed = type(error) is RuntimeError and not by_raise and communicates
    return isinstance(error, (dist.DistError, RankFailed)) or failed


def _leave(worker: _Worker, end: _End) -> NoReturn:
    """Print the message and end the process.

    Without the interpreter's clean-up, which could wait for other ranks, or abort in a thread of the communication
    library. If starting again would come to the same, end the torchrun that would do it, too.
    """
    if end.hold_back:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(end.code))
        time.sleep(HOLD_BACK)
    if end.message:
        print(end.message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if end.is_final and worker.world is not None and worker.world.ends_agent:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(end.code))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(HOLD_BACK)
    os._exit(end.code)
