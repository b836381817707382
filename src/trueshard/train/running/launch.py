"""Processes: who starts them, what rank each has, and what their ends mean.

- Started by hand, `trueshard train` is the launcher: it checks the run, then starts the same command once a rank
  through torch elastic, which gives each worker its rank in the environment.
- Started by `torchrun` or `srun`, it is a worker at once. Slurm's variables are translated to torch's.
- Workers are sessions of their own. A Ctrl-C in a terminal reaches the launcher alone; the agent passes it on and
  waits for the workers to save (`STOP_GRACE` seconds; torch 2.11 has 30, fixed).
- A rank that fails takes the others down: the agent ends them, and kills what does not end within 30 seconds.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from trueshard.distributed import ensure_process_group
from trueshard.errors import UserError
from trueshard.train.running.signals import STOPPED

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
USER_ERROR = 2
"""Exit code after a `UserError`."""


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of the run."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device


def launcher_of(environment: Mapping[str, str]) -> str | None:
    """The program that started this process as a worker, or None if it was started by hand."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "a launcher that set RANK and WORLD_SIZE"
    if "SLURM_PROCID" in environment and _slurm_tasks(environment) > 1:
        return "srun"
    return None


def launch(arguments: Sequence[str], nproc: int) -> int:
    """Run the command line `arguments` as `nproc` workers on this machine; returns the exit code of the run."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False  # its account of each signal is not for users; failures are told below
    with tempfile.TemporaryDirectory(prefix="trueshard-") as logs:
        options: dict[str, Any] = {"shutdown_timeout": STOP_GRACE}
        known = {field.name for field in fields(LaunchConfig)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            **{key: value for key, value in options.items() if key in known},
        )
        try:
            worker = WORKER.format(path=sys.path, stopped=STOPPED)
            elastic_launch(config, sys.executable)("-c", worker, *arguments)
        except SignalException:
            return STOPPED
        except ChildFailedError as error:
            return _outcome({rank: failure.exitcode for rank, failure in error.failures.items()})
    return 0


def join(environment: MutableMapping[str, str]) -> Ranks:
    """Take this worker's rank from the environment and join the process group of the run.

    On the CPU, the cores of the machine are shared out among its workers.
    """
    if "RANK" not in environment:
        environment.update(slurm_to_torch(environment))
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
    ensure_process_group()
    return Ranks(rank, world, local_rank, local_world, device)


def cpu_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _outcome(exit_codes: Mapping[int, int]) -> int:
    """The exit code of a run some of whose workers failed, and a line for what they could not say themselves."""
    if USER_ERROR in exit_codes.values():
        return USER_ERROR
    if STOPPED in exit_codes.values():
        return STOPPED
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and -code != signal.SIGTERM}
    for rank, number in killed.items():
        name = signal.Signals(number).name
        hint = " (the machine may have run out of memory)" if number == signal.SIGKILL else ""
        print(f"trueshard: rank {rank} was ended by {name}{hint}", file=sys.stderr)
    return 1


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    return int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))


def slurm_to_torch(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables of a worker, from those that srun sets for each task."""
    tasks, nodes = _slurm_tasks(environment), int(environment.get("SLURM_NNODES", "1"))
    node_list = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    address = _first_node(node_list) if nodes > 1 and node_list else "127.0.0.1"
    port = 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", environment["SLURM_PROCID"]),
        "LOCAL_WORLD_SIZE": _tasks_here(environment, tasks),
        "MASTER_ADDR": environment.get("MASTER_ADDR", address),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def _first_node(node_list: str) -> str:
    """The first host of a Slurm list: "gpu[03-04,7],cpu1" is gpu03 first."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
    if match is None:
        raise UserError(f"SLURM_JOB_NODELIST: {node_list!r} cannot be read; set MASTER_ADDR to the first node")
    return "".join(part or "" for part in match.groups())


def _tasks_here(environment: Mapping[str, str], tasks: int) -> str:
    """Tasks on this node: SLURM_STEP_TASKS_PER_NODE reads "2(x3),1" for 2, 2, 2, 1."""
    counts: list[str] = []
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", str(tasks)))
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [count] * int(times or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else str(tasks)
