"""`trueshard train` from its configuration to its exit code: as the launcher of workers, or as one of them.

- Started by hand, it is the launcher: it checks the run, starts the same command once a rank, and restarts the ranks
  where that can help: after a lost rank, up to `run.restarts` times; after memory ran out, as often as there is a
  remedy. Each time the workers resume from the newest checkpoint. A wrong input and a stop are final.
- Started by `torchrun` or `srun`, it is a worker at once. `torchrun --max-restarts`: see `World.ends_agent`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trueshard.checkpoint.snapshots import move_to_disk
from trueshard.errors import UserError, explained
from trueshard.launching import FAILED, STOPPED, USER_ERROR, Ended, Spare, how, python_command, run_ranks
from trueshard.machine import memory_kills
from trueshard.train.config import Config
from trueshard.train.metrics.step_metrics import NAME as METRICS
from trueshard.train.run import checks
from trueshard.train.run.incidents import Incident
from trueshard.train.run.log import logged
from trueshard.train.run.out_of_memory import find_remedy
from trueshard.train.run.worker import OUT_OF_MEMORY, work
from trueshard.train.run.world import RUN_ID, check_srun, launcher_of

if TYPE_CHECKING:
    from trueshard.train.run.replay import Replayed

RECORDS = "nccl-records-rank-"
"""Beginning of the names of the files in a run's folder in which NCCL's flight recorder leaves what it has."""
STOP_GRACE = 600
"""Seconds the workers have to save after a stop was asked for."""


def start(
    config: Config,
    command: Sequence[str],
    *,
    nproc: int | None = None,
    cpu_processes: int = 1,
    override: bool = False,
    profile: bool = False,
    replayed: Replayed | None = None,
) -> int:
    """Train, or replay a step; return the exit code, with which a worker's process ends. Raises `UserError`.

    ``command`` is the command line with which workers are started.
    """
    launcher = launcher_of(os.environ)
    log = logged(config.run.folder) if replayed is None else contextlib.nullcontext()
    if launcher is not None:
        if nproc is not None:
            raise UserError(f"--nproc {nproc}: {launcher} has already started the processes; leave --nproc out")
        with log:
            work(config, override=override, profile=profile, replayed=replayed)
    if nproc is None:
        check_srun(os.environ)
    nproc = checks.process_count(nproc, cpu_processes)
    with checks.held(config.run.folder):
        ready = checks.check(config, nproc, override=override)
    with log:  # not before: what is refused leaves nothing behind
        return _start(ready, command, nproc, is_replay=replayed is not None)


def _start(ready: checks.Ready, command: Sequence[str], nproc: int, *, is_replay: bool) -> int:
    """Run the workers, unless the run is complete; return the exit code."""
    checks.tell_changes(ready)
    if not is_replay and checks.tell_if_complete(ready, aloud=True):
        return 0
    try:
        code = _supervise(ready, command, nproc)
    except KeyboardInterrupt:
        code = STOPPED
    finally:
        _end_memory(ready.config)
    if not is_replay and code == STOPPED and not checks.checkpoints_of(ready.config).steps():
        print("Stopped before the first checkpoint; the same command begins again.")
    return code


def _supervise(ready: checks.Ready, command: Sequence[str], nproc: int) -> int:
    """Start the workers until they are done or starting them again would not help; return the exit code."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    restarts, most = 0, ready.config.run.restarts
    reached, first, incident = -1, "", None
    with contextlib.closing(_Starts(ready, command, nproc)) as starts:
        while True:
            kills = memory_kills()
            ended = starts.run(incident)
            codes = ended.codes.values()
            if ended.signal is not None:
                return STOPPED
            # The ranks that lost a failed one fail, too: the most telling code counts.
            telling = (code for code in (USER_ERROR, OUT_OF_MEMORY, STOPPED) if code in codes)
            final = next(telling, FAILED if codes else 0)
            if final == OUT_OF_MEMORY:
                remedy = find_remedy(ready.config, ready.architecture, nproc, nproc, device)
                if remedy is not None:
                    _say(remedy.message)
                if remedy is None or remedy.settings is None:
                    return FAILED
                incident = None
                continue
            if final != FAILED:
                return final
            why = _killed(ended, kills, ready.folder)
            on_disk, in_memory = checks.newest_steps(ready.config)
            if max(on_disk, in_memory) > reached:  # what was in the way is past
                restarts, reached, first = 0, max(on_disk, in_memory), why
            if restarts == most:
                again = f" ({restarts} times since step {reached}; first: {first})" if restarts and first != why else ""
                if why:
                    _say(f"{why}{again}; {_going_on(ready.config)}")
                return FAILED
            restarts += 1
            where = f"step {in_memory} in memory" if in_memory > on_disk else "the newest checkpoint"
            _say(f"{why or 'a rank failed'}; starting again from {where} ({restarts} of {most})")
            incident = Incident(why or "a rank failed", ended.noticed, {})
            incident.mark("end of the others")


class _Starts:
    """Starts the workers of a run, and a spare of them once they have taken a step."""

    def __init__(self, ready: checks.Ready, arguments: Sequence[str], nproc: int) -> None:
        run = ready.config.run
        self._folder, self._nproc, self._has_spare = ready.folder, nproc, bool(run.spares and run.restarts)
        self._command = python_command("from trueshard.cli import main; sys.exit(main())", *arguments)
        self._spare: Spare | None = None
        self._began = time.time()

    def run(self, incident: Incident | None) -> Ended:
        """Run the command line once as workers, which meet at a store of this process; see how they end."""
        for record in self._folder.glob(f"{RECORDS}*"):  # of an earlier start
            record.unlink()
        problem = "no port of localhost can be opened, at which ranks meet"
        with explained(problem, "see `trueshard doctor`", RuntimeError):
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": RUN_ID + uuid.uuid4().hex,
            **{name: os.environ.get(name, value) for name, value in _nccl_variables(self._folder).items()},
            **({} if incident is None else incident.variables()),
        }
        return run_ranks(
            self._command,
            self._nproc,
            environment=environment,
            grace=STOP_GRACE,
            spare=self._spare,
            meanwhile=self._prepare,
        )

    def _prepare(self) -> None:
        """Start a spare, if there is to be one: not sooner than a step is written, which it would hold up."""
        if self._has_spare and self._spare is None:
            with contextlib.suppress(FileNotFoundError):
                if (self._folder / METRICS).stat().st_mtime > self._began:
                    self._spare = Spare(self._command, self._nproc)

    def close(self) -> None:
        """End the spare."""
        if self._spare is not None:
            self._spare.close()


def _end_memory(config: Config) -> None:
    """Leave nothing in memory: what no checkpoint has as new goes to the run's folder, for the next start."""
    if config.train.memory_every is not None:
        step = move_to_disk(config.run.folder, checks.on_disk(config), checks.newest_steps(config)[0])
        if step:
            _say(f"the same command goes on from step {step}, which is now in {checks.on_disk(config)}")


def end_left_memory(config: str) -> None:
    """Do the same for a run that torchrun has left, unless it goes on within minutes; ``config``: its JSON."""
    settings = Config.model_validate_json(config)
    with checks.held(settings.run.folder, STOP_GRACE):
        _end_memory(settings)


def _nccl_variables(folder: Path) -> dict[str, str]:
    """Return variables that let NCCL end a rank whose collective takes too long, and say first what each had begun."""
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if torch.cuda.is_available():
        variables |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
        variables["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / RECORDS)
    return variables


def _killed(ended: Ended, kills: int | None, folder: Path) -> str:
    """Say which ranks were ended by a signal, and so could not say it themselves; ``kills``: those before the run."""
    records = f" (what each rank had begun is in {folder / RECORDS}*)" if any(folder.glob(f"{RECORDS}*")) else ""
    is_short = kills is None or memory_kills() != kills
    sender = "the machine may have run out of memory" if is_short else "from outside: the system killed none for memory"
    return "; ".join(
        f"rank {rank} {how(code)}" + {-signal.SIGKILL: f" ({sender})", -signal.SIGABRT: records}.get(code, "")
        for rank, code in ended.codes.items()
        if code < 0
    )


def _going_on(config: Config) -> str:
    newest, (on_disk, in_memory) = checks.checkpoints_of(config).latest(), checks.newest_steps(config)
    if in_memory > on_disk:
        return "its newest step was in memory"
    return f"the same command goes on from {newest}" if newest else "there is no checkpoint: it begins again"


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"trueshard: {line}", file=sys.stderr, flush=True)
