"""Processes: who starts them, what rank each has, and what their ends mean.

- Started by hand, `trueshard train` is the launcher: it checks the run, then starts the same command once a rank
  through torch elastic, which gives each worker its rank in the environment.
- Started by `torchrun` or `srun`, it is a worker at once. Slurm's variables are translated to torch's.
- Workers are sessions of their own. A Ctrl-C in a terminal reaches the launcher alone; the agent passes it on and
  waits for the workers to save (`STOP_GRACE` seconds; torch 2.11 has 30, fixed).
- A rank that fails takes the others down: the agent ends them, and kills what does not end within 30 seconds. Whether
  they are started again is the launcher's choice (`trueshard.train.running.start`), by how they ended; the agent's own
  restarts would also repeat a wrong input. Under `torchrun --max-restarts` it is the agent's, see `Ranks.ends_agent`.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import psutil
import torch

from trueshard.distributed import ensure_process_group
from trueshard.errors import UserError
from trueshard.machine import cpu_cores
from trueshard.train.running import slurm
from trueshard.train.running.rendezvous import fresh_store
from trueshard.train.running.signals import SIGNALS, STOPPED

STOP_GRACE = 600
"""Seconds the workers have to save after a stop was asked for."""
WORKER = """
import sys
sys.path[:] = {path!r}
import os, signal
signal.signal(signal.SIGINT, lambda *_: os._exit({stopped}))
from trueshard.cli import main
sys.exit(main())
"""
"""What a worker runs: the command line, found where the launcher found it, and ended quietly by a Ctrl-C while it
imports."""
FAILED = 1
"""Exit code after any other failure."""
USER_ERROR = 2
"""Exit code after a `UserError`."""
OUT_OF_MEMORY = 4
"""Exit code of a worker that ran out of memory and has left a record of it for the launcher."""
OWN = "trueshard-"
"""What the run identifiers of this launcher begin with: how a worker knows it."""


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of the run."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    is_ours: bool = False
    """Started by our own launcher, which says what a worker leaves to it."""
    ends_agent: bool = False
    """Started by a torchrun that would start it again after any failure."""


@dataclass(frozen=True)
class Ended:
    """How the workers ended."""

    code: int
    why: str = ""
    """What a worker could not say itself."""


def launcher_of(environment: Mapping[str, str]) -> str | None:
    """The program that started this process as a worker, or None if it was started by hand."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "a launcher that set RANK and WORLD_SIZE"
    return "srun" if slurm.is_task(environment) else None


def launch(arguments: Sequence[str], nproc: int) -> Ended:
    """Run the command line `arguments` once as `nproc` workers on this machine."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False  # its account of each signal is not for users; failures are told below
    options: dict[str, Any] = {"shutdown_timeout": STOP_GRACE}
    known = {field.name for field in fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=OWN + uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # to the terminal alone: no folder that could be left over
        **{key: value for key, value in options.items() if key in known},
    )
    try:
        worker = WORKER.format(path=sys.path, stopped=STOPPED)
        elastic_launch(config, sys.executable)("-c", worker, *arguments)
    except SignalException:
        for left in psutil.Process().children():  # started in the moment of the signal, the agent does not know them
            left.kill()
        return Ended(STOPPED)
    except ChildFailedError as error:
        return _ended({rank: failure.exitcode for rank, failure in error.failures.items()})
    finally:
        for number in SIGNALS:  # the agent's handlers raise wherever the process is
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    return Ended(0)


def join(environment: MutableMapping[str, str], timeout: float) -> Ranks:
    """Take this worker's rank from the environment and join the process group of the run.

    On the CPU, the cores of the machine are shared out among its workers.

    Args:
        timeout: seconds that a collective may take.
    """
    if "RANK" not in environment:
        environment.update(slurm.torch_variables(environment))
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local_rank = int(environment.get("LOCAL_RANK", rank))
    local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"rank {rank}: this machine has {torch.cuda.device_count()} CUDA devices for {local_world} processes; "
                "start one process for each device"
            )
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, cpu_cores() // local_world))
    is_ours = environment.get("TORCHELASTIC_RUN_ID", "").startswith(OWN)
    store = None if is_ours else fresh_store(environment, timeout)
    ensure_process_group(datetime.timedelta(seconds=timeout), store)
    most, count = (int(environment.get(f"TORCHELASTIC_{key}", "0")) for key in ("MAX_RESTARTS", "RESTART_COUNT"))
    return Ranks(rank, world, local_rank, local_world, device, is_ours, ends_agent=count < most)


def _ended(exit_codes: Mapping[int, int]) -> Ended:
    """What the exit codes of the ranks that ended first mean for the run."""
    for code in (USER_ERROR, OUT_OF_MEMORY, STOPPED):
        if code in exit_codes.values():
            return Ended(code)
    killed = {rank: signal.Signals(-code) for rank, code in exit_codes.items() if code < 0}
    if any(code != -signal.SIGTERM for code in exit_codes.values()):  # else it is the agent's own, for what was left
        killed = {rank: number for rank, number in killed.items() if number != signal.SIGTERM}
    whys = [
        f"rank {rank} was ended by {number.name}"
        + (" (the machine may have run out of memory)" if number == signal.SIGKILL else "")
        for rank, number in killed.items()
    ]
    return Ended(FAILED, "; ".join(whys))
