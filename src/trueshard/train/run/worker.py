"""One rank of a run: join the others, check, train, and end so that no rank waits and only the cause is printed.

- The first SIGINT, SIGTERM or SIGHUP sets a flag that the loop reads between steps, so that it can save; a later one,
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
import io
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from trueshard import _torch
from trueshard.checkpoint.snapshot_parts import folder_of
from trueshard.errors import RankFailed, UserError, one_line, printed, raised_in
from trueshard.launching import FAILED, SPARE, STOPPED, USER_ERROR, python_command, wait_to_begin
from trueshard.train.config import Config
from trueshard.train.losses import summed
from trueshard.train.models.build import build
from trueshard.train.run import out_of_memory, resuming
from trueshard.train.run.checks import Ready, check, check_settings, held, newest_steps, tell_changes, tell_if_complete
from trueshard.train.run.incidents import LOST, Incident
from trueshard.train.run.session import train
from trueshard.train.run.world import World, join, threads_set

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
ONE_STOP = 2.0
"""Seconds in which a second signal is the first one once more: Slurm signals a launcher and its ranks, and the launcher
passes it on."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """The wish to stop, from a signal or because the launcher has died."""

    def __init__(self) -> None:
        self.signalled = False
        """True if a signal has come since `requested` was first called."""
        # Until the loop asks for the first time, a signal ends the process at once: there is nothing to save.
        self._handles_signals = False
        self._since = 0.0
        # A worker whose launcher was killed has another parent, since nobody else would end it.
        self._parent = os.getppid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def requested(self) -> bool:
        """Return True if this rank was asked to stop; ranks agree by an all-reduce of it."""
        if not self._handles_signals:
            self._handles_signals = True
            for number in SIGNALS:
                signal.signal(number, self._handle)
        return self.signalled or os.getppid() != self._parent

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.signalled:
            self.signalled, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > ONE_STOP:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


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
        self.incident = Incident.told(os.environ, config.run.folder)
        """Set if this rank was started because another was lost."""
        self.world: World | None = None
        """Set once the ranks have met."""
        self.ready: Ready | None = None
        """Set after the checks; from there on it has the configuration."""
        self.meter: out_of_memory.MemoryMeter | None = None
        """Set just before the model is made: only then can memory run out."""


def work(
    config: Config, *, override: bool = False, profile: bool = False, replayed: Replayed | None = None
) -> NoReturn:
    """Run this process's rank of the training, or replay a step; end the process with the exit code of the run."""
    if SPARE in os.environ:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a fork loses a pool of more, and would wait for it
        _warm_up(config)
        wait_to_begin()
        torch.set_num_threads(threads)
    worker = _Worker(config, override, profile, replayed)
    with contextlib.ExitStack() as locks:
        end = _run(worker, locks)
        if end.shortage is not None:  # only here: while the error is handled, its frames keep their tensors
            end = _out_of_memory(worker, end.shortage)
    _leave(worker, end)


def _run(worker: _Worker, locks: contextlib.ExitStack) -> _End:
    try:
        _mark(worker, "start of processes")
        worker.world = world = join(os.environ, worker.config.run.timeout)
        _mark(worker, "meeting")
        worker.ready = ready = _check_together(worker, world, locks)
        _mark(worker, "checks")
        if world.by_one_torchrun and world.rank == 0 and ready.config.train.memory_every is not None:
            _outlive_agent(ready.config)
        if ready.config.train.exact:
            _fix_kernels(world.device)
        if worker.replayed is not None:
            from trueshard.train.run.replay import replay

            code = replay(ready, world.device, worker.stop.requested, worker.replayed)
        elif tell_if_complete(ready, world.rank == 0):
            return _End(0)
        else:
            worker.meter = out_of_memory.MemoryMeter(world.device, world.local_size)
            stop = worker.stop.requested
            options = {"profile": worker.profile, "override": worker.override}
            code = train(ready, world.device, stop, incident=worker.incident, **options)
        dist.destroy_process_group()
        if code == STOPPED and world.by_one_torchrun:
            return _End(0)
        return _End(code, is_final=code == STOPPED)
    except UserError as error:
        return _End(USER_ERROR, f"trueshard: {printed(error)}", hold_back=worker.rank != 0, is_final=True)
    except Exception as error:
        if worker.world is not None and worker.world.ends_agent:
            (worker.config.run.folder / LOST).touch()
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


def _warm_up(config: Config) -> None:
    """Do what a rank does before it needs the others, for what that imports and compiles; nothing of it is kept."""
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        from trueshard import api  # noqa: F401
        from trueshard.train.run import forecast  # noqa: F401

        _torch.check_torch()
        summed(torch.nn.Linear(1, 1), torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))  # torch imports, late
        ready = check(config, int(os.environ["WORLD_SIZE"]), make=False, override=True)
        build(ready.config, ready.architecture)


def _outlive_agent(config: Config) -> None:
    """Start a process that waits for torchrun's end and does what our launcher would: nothing stays in memory."""
    wait = f'while kill -0 {os.getppid()}; do sleep 0.5; done; [ ! -d "$0" ] || exec "$@"'
    statement = "from trueshard.train.run.launcher import end_left_memory; end_left_memory(sys.argv[1])"
    command = python_command(statement, config.model_dump_json(by_alias=True, exclude_unset=True))
    quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(["sh", "-c", wait, folder_of(config.run.folder), *command], start_new_session=True, **quiet)


def _mark(worker: _Worker, part: str) -> None:
    if worker.incident is not None:
        worker.incident.mark(part)


def _fix_kernels(device: torch.device) -> None:
    """Make kernels give the same bits on any rank of any run: an operation that cannot raises, and says its name.

    On a CPU a sum depends on the number of threads, which otherwise follows from the number of ranks.
    """
    if device.type == "cpu":
        torch.set_num_threads(threads_set(os.environ) or 1)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Else every buffer of a gather or a reduction would be filled before it is written to.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False


def _check_together(worker: _Worker, world: World, locks: contextlib.ExitStack) -> Ready:
    """Check on rank 0, which makes what is missing, then on the others. An error is raised on all ranks."""
    ready: Ready | None = None
    message: list[Any] = ["", None]
    # Making data may take hours, in which the others must not run into run.timeout.
    patient = dist.new_group(backend="gloo", timeout=DATA_LIMIT)
    if world.rank == 0:
        try:
            locks.enter_context(held(worker.config.run.folder))
            ready = _check_first(worker, world)
            message[1] = ready.config
        except UserError as error:
            message[0] = str(error)
    else:
        with contextlib.suppress(Exception):  # what is wrong is rank 0's to tell
            check_settings(worker.config, world.size)  # beside rank 0's checks, for what it imports: that takes seconds
    dist.broadcast_object_list(message, src=0, group=patient)
    problem, config = message
    if problem:
        raise UserError(problem)
    ready = ready or check(config, world.size, make=False, override=worker.override)
    # Each torchrun counts its own restarts, and that of a host in another's place begins at 0, with no step in memory.
    is_loss = worker.incident is not None
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, (is_loss, is_loss and any(newest_steps(ready.config))), group=patient)
    dist.destroy_process_group(patient)
    if any(loss for loss, _ in everyone) and not is_loss:
        worker.incident = Incident.of_another_host(world.rank, ready.folder)
    return dataclasses.replace(ready, goes_on=any(has_step for _, has_step in everyone))


def _check_first(worker: _Worker, world: World) -> Ready:
    """Return what the checks find, with the configuration as memory requires it, and its forecast. On rank 0."""
    ready = check(worker.config, world.size, override=worker.override)
    if not world.is_ours:  # else our launcher has said it
        tell_changes(ready)
    if ready.config.train.on_oom != "tighten":
        out_of_memory.clear(ready.folder)  # of an earlier start
    remedy = out_of_memory.find_remedy(ready.config, ready.architecture, world.size, world.local_size, world.device)
    if remedy is not None:
        if remedy.settings is None:
            raise UserError(remedy.message)
        print(f"trueshard: {remedy.message}", file=sys.stderr, flush=True)
        ready = dataclasses.replace(ready, config=resuming.with_settings(ready.config, remedy.settings))
    if world.device.type != "cuda":
        return ready
    from trueshard.train.run import forecast  # the planner

    result = forecast.study(ready.config, ready.architecture, world.size, world.device, world.local_size)
    forecast.write(ready.folder, result)
    if isinstance(result, forecast.Unplanned):
        print(f"No forecast of memory and speed: {result}", flush=True)
    return dataclasses.replace(ready, memory_planned=forecast.bytes_of(result))


def _out_of_memory(worker: _Worker, shortage: out_of_memory.Shortage) -> _End:
    """Leave the record, and look for a remedy if nobody else will."""
    world, ready = worker.world, worker.ready
    assert world is not None
    assert ready is not None
    is_first = out_of_memory.leave(ready.folder, shortage)
    if world.is_ours or (world.ends_agent and ready.config.train.on_oom == "tighten"):
        return _End(OUT_OF_MEMORY)
    if not is_first:
        deadline = time.monotonic() + REMEDY_LIMIT
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while (ready.folder / out_of_memory.NAME).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(HOLD_BACK)
        return _End(FAILED)
    message = "memory ran out, and there was too little of it to find out what would fit"
    with contextlib.suppress(Exception):  # in the planner's process: this one has no memory left
        from trueshard.planner import process

        arguments = (ready.config, ready.architecture, world.size, world.local_size, world.device)
        remedy = process.call("trueshard.train.run.out_of_memory:find_remedy", *arguments)
        message = message if remedy is None else remedy.message
    return _End(FAILED, f"trueshard: {message}", is_final=True)


def _lost_peer(error: Exception) -> bool:
    """Return True if an error is the consequence of another rank's end: the communication library made it."""
    if isinstance(error, (dist.DistError, RankFailed)):
        return True
    # gloo raises a plain RuntimeError, from compiled code under torch.distributed; DTensor, which is there, too, does
    # not communicate.
    file, by_raise = raised_in(error)
    path = Path(file).parts
    if type(error) is RuntimeError and not by_raise and {"torch", "distributed"} <= {*path} and "tensor" not in path:
        return True
    return isinstance(error.__cause__, Exception) and _lost_peer(error.__cause__)  # as that of a save


def _leave(worker: _Worker, end: _End) -> NoReturn:
    """Print the message and end the process.

    Without the interpreter's clean-up, which could wait for other ranks, or abort in a thread of the communication
    library. If starting again would come to the same, end the torchrun that would do it, too.
    """
    if end.hold_back:
        if worker.stop.signalled:  # whoever ends the others knows why already
            os._exit(end.code)
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
