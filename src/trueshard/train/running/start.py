"""A run from its configuration to its exit code: as the launcher of workers, or as one of them.

- The launcher checks, starts the workers, and starts them again where that can help: a rank that was lost, up to
  `run.restarts` times; memory that ran out, as often as there is a tighter plan. A wrong input and a stop are final.
- Each time the workers go on from the newest checkpoint, so that nothing is different but the time that was lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import torch

from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.recipe import checkpoints_of, folder_of
from trueshard.train.running import lock, tighten
from trueshard.train.running.launch import FAILED, OUT_OF_MEMORY, USER_ERROR, launch, launcher_of
from trueshard.train.running.located import located
from trueshard.train.running.preflight import (
    Ready,
    check,
    check_nproc,
    check_writable,
    default_nproc,
    tell_changes,
    tell_if_complete,
)
from trueshard.train.running.signals import STOPPED


def start(
    config: Config,
    command: Sequence[str],
    *,
    nproc: int | None = None,
    cpu_processes: int = 1,
    override: bool = False,
    profile: bool = False,
) -> int:
    """Train; returns the exit code. Where a launcher has started this process, it ends with it.

    Args:
        command: the arguments of the command line with which workers are to be started.
        nproc: processes on this machine; None: one a CUDA device, or `cpu_processes`.
        override: go on from checkpoints although settings differ that decide what their steps mean.
        profile: record a few steps.

    Raises:
        UserError: a wrong input.
    """
    launcher = launcher_of(os.environ)
    if launcher is not None:
        if nproc is not None:
            raise UserError(f"--nproc {nproc}: {launcher} has already started the processes; leave --nproc out")
        from trueshard.train.running.worker import work

        work(config, override=override, profile=profile)
    nproc = default_nproc(cpu_processes) if nproc is None else nproc
    check_nproc(nproc)
    ready = prepared(config, nproc, override)
    tell_changes(ready)
    if tell_if_complete(config, ready, aloud=True):
        return 0
    try:
        code = _supervise(config, ready, command, nproc)
    except KeyboardInterrupt:
        code = STOPPED
    if code == STOPPED and not checkpoints_of(config).steps():
        print("Stopped before the first checkpoint; the same command begins again.")
    return code


def prepared(config: Config, ranks: int, override: bool) -> Ready:
    """What `check` finds, while no other run has the folder."""
    check_writable(config)
    with lock.held(folder_of(config)):
        return check(located(tighten.applied(config, ranks)), ranks, override=override)


def _supervise(config: Config, ready: Ready, command: Sequence[str], nproc: int) -> int:
    """Start the workers until they are done, or starting them again would not help."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    restarts = 0
    while True:
        ended = launch(command, nproc)
        if ended.code == OUT_OF_MEMORY:
            used = tighten.applied(config, nproc)
            from trueshard.train.running.fitting import settle  # the planner, which few runs need

            settled = settle(used, ready.architecture, nproc, nproc, device)
            if settled is not None:
                _say(settled.message)
                if settled.words is not None:
                    continue
            return FAILED
        if ended.code in (0, USER_ERROR, STOPPED):
            return ended.code
        if restarts == config.run.restarts:
            if ended.why:
                _say(ended.why)
            return FAILED
        restarts += 1
        why = ended.why or "a rank failed"
        _say(f"{why}; starting again from the newest checkpoint ({restarts} of {config.run.restarts})")


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"trueshard: {line}", file=sys.stderr, flush=True)
