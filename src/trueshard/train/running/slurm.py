"""Slurm's variables, translated to torch's: what srun tells a task of its place among the others."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trueshard.errors import UserError


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process as one of several."""
    return "SLURM_PROCID" in environment and _tasks(environment) > 1


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables of a worker, from those that srun sets for each task.

    Raises `UserError` if the list of nodes cannot be read.
    """
    tasks, nodes = _tasks(environment), int(environment.get("SLURM_NNODES", "1"))
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


def _tasks(environment: Mapping[str, str]) -> int:
    return int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))


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
