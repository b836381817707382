"""Whom a rank of a run works with: which launcher has started it, and how it joins the others.

torch elastic's variables describe the group; of srun's they are made here. A worker of our own launcher is known by its
run identifier, because that launcher does for it what nobody does under torchrun: it restarts ranks and finds remedies.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import re
import time
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trueshard.distributed import DeviceError, ensure_process_group, in_thread
from trueshard.errors import UserError, with_kind
from trueshard.machine import cpu_cores

RUN_ID = "trueshard-"
"""Beginning of the run identifiers that our launcher sets, by which a worker recognises it."""
POLL = 0.02
"""Seconds between two looks of rank 0 into the store."""


@dataclass(frozen=True)
class World:
    """Place of this process among those of the run."""

    rank: int
    size: int
    local_size: int
    device: torch.device
    is_ours: bool = False
    """True if our own launcher started it and says what a worker leaves to it."""
    ends_agent: bool = False
    """True if a torchrun started it that would start it again after any failure."""
    by_one_torchrun: bool = False
    """True if one torchrun started all ranks: to stop is no failure to it if all exit with 0. One of several would wait
    for those that were asked to stop."""


def launcher_of(environment: Mapping[str, str]) -> str | None:
    """Return the program that started this process as a worker; None if it was started by hand."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "a launcher that set RANK and WORLD_SIZE"
    return "srun" if "SLURM_STEP_ID" in environment and _slurm_tasks(environment) > 1 else None


def check_srun(environment: Mapping[str, str]) -> None:
    """Raise `UserError` in the script of a job of several tasks, whose variables look like those of its first task."""
    nodes, on_each = (int(environment.get(f"SLURM_{key}", "1")) for key in ("JOB_NUM_NODES", "NTASKS_PER_NODE"))
    tasks = max(_slurm_tasks(environment), nodes * on_each)
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment and tasks > 1:
        raise UserError(
            f"Slurm has given this job {tasks} tasks on {nodes} nodes, and srun has not started this process: write "
            "`srun trueshard train …`, or --nproc N for N processes on this node alone"
        )


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables of a worker, from srun's; raise `UserError` if the list of nodes cannot be read."""
    tasks, nodes = _slurm_tasks(environment), int(environment.get("SLURM_NNODES", "1"))
    node_list = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    address = "127.0.0.1"
    if nodes > 1 and node_list:  # the first host: gpu03 of "gpu[03-04,7],cpu1"
        match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
        if match is None:
            raise UserError(f"SLURM_JOB_NODELIST: {node_list!r} cannot be read; set MASTER_ADDR to the first node")
        address = "".join(part or "" for part in match.groups())
    port = 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", environment["SLURM_PROCID"]),
        "LOCAL_WORLD_SIZE": _slurm_tasks_here(environment, tasks),
        "MASTER_ADDR": environment.get("MASTER_ADDR", address),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    return int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))


def _slurm_tasks_here(environment: Mapping[str, str], tasks: int) -> str:
    """Return the tasks on this node: SLURM_STEP_TASKS_PER_NODE reads "2(x3),1" for 2, 2, 2, 1."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", str(tasks)))
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    counts = [count for count, times in parts for _ in range(int(times or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else str(tasks)


def join(environment: MutableMapping[str, str], timeout: float) -> World:
    """Join the run's process group as the environment says, within ``timeout`` seconds; on a CPU, set its threads."""
    if "RANK" not in environment:
        environment.update(torch_variables(environment))
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
    is_ours = environment.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID)
    if not torch.cuda.is_available():
        torch.set_num_threads(rank_threads(environment, local_size, is_ours))
    limit = datetime.timedelta(seconds=timeout)
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store = meet(environment, rank, timeout, holds=rank == 0 and not is_shared)
    if is_shared and not is_ours:
        store = agreed_store(store, rank, size, timeout)
    try:
        ensure_process_group(limit, store)
    except DeviceError as error:
        raise UserError(str(error)) from None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    most, count = (int(environment.get(f"TORCHELASTIC_{key}", "0")) for key in ("MAX_RESTARTS", "RESTART_COUNT"))
    by_one = "TORCHELASTIC_RUN_ID" in environment and not is_ours and local_size == size
    return World(rank, size, local_size, device, is_ours, ends_agent=count < most, by_one_torchrun=by_one)


def rank_threads(environment: Mapping[str, str], local_size: int, is_ours: bool) -> int:
    """Return the threads of a rank: ``OMP_NUM_THREADS``, or its part of the cores.

    torchrun sets the variable to 1 where nobody has set it, so under it 1 says nothing.
    """
    threads = threads_set(environment)
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment and not is_ours and threads == 1
    return threads if threads and not by_torchrun else max(1, cpu_cores() // local_size)


def threads_set(environment: Mapping[str, str]) -> int:
    """Return the first number of ``OMP_NUM_THREADS``, which may have more for nested regions; 0 if it says none."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(first) if first.isdecimal() else 0


def meet(environment: Mapping[str, str], rank: int, timeout: float, *, holds: bool) -> dist.Store:
    """Return the store at the address of the run, which this rank keeps there if it ``holds`` it.

    Raises `UserError` within ``timeout`` seconds if another program has the port, or no rank does. A rank that connects
    to a program that says nothing would wait for ever (torch 2.13), so it does in a thread.
    """
    where = " and ".join(f"{key}={environment.get(key)}" for key in ("MASTER_ADDR", "MASTER_PORT"))
    limit = datetime.timedelta(seconds=timeout)
    try:
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = in_thread(lambda: dist.TCPStore(address, port, None, holds, limit, wait_for_workers=False))
        return store.result(timeout)
    except (RuntimeError, TypeError, LookupError, ValueError, concurrent.futures.TimeoutError) as error:
        problem = (
            "cannot be opened" if holds else f"has not answered within {timeout:g} s (run.timeout) as rank 0 would"
        )
        raise UserError(
            f"rank {rank}: {where}, where ranks meet, {problem} ({with_kind(error)}); another program may have the "
            "port: end that, or set MASTER_PORT to a free one, the same for all ranks"
        ) from None


def agreed_store(shared: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """Return a part of a store that may hold what earlier ranks have left, the same part on all ranks of now.

    torchrun (2.13) gives the workers that it starts again the store of those before them, in which the addresses of the
    dead still stand; its count of restarts does not tell the two apart, because each node counts by itself. So each
    rank asks under a name that only it knows, and rank 0 answers every name with one prefix until all ranks of its own
    time have confirmed it. Raises `DistStoreError` after ``timeout`` seconds.
    """
    meeting = dist.PrefixStore("trueshard", shared)
    name = uuid.uuid4().hex
    meeting.set(f"asks/{rank}", name)
    if rank:
        prefix = meeting.get(f"answer/{name}").decode()
        meeting.set(f"confirmed/{prefix}/{rank}", name)
        return dist.PrefixStore(prefix, meeting)
    deadline = time.monotonic() + timeout
    while missing := [other for other in range(1, size) if not meeting.check([f"confirmed/{name}/{other}"])]:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"waited {timeout:.0f} seconds for rank {', '.join(map(str, missing))} to join")
        for other in missing:
            if meeting.check([f"asks/{other}"]):
                meeting.set(f"answer/{meeting.get(f'asks/{other}').decode()}", name)
        time.sleep(POLL)
    return dist.PrefixStore(name, meeting)
