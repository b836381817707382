"""What the system gives to processes: shared memory, open files, a compiler, temporary space; and what is set in the
environment."""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from trueshard.doctor.finding import Finding
from trueshard.tables import size

GIB = 2**30
SHARED = Path("/dev/shm")
SHARED_ENOUGH = GIB
"""Bytes of shared memory below which NCCL's buffers and data loaders with processes run out; Docker gives 64 MiB."""
FILES_ENOUGH = 1024
"""Open files that a process may need: connections to other ranks, shards of data, parts of a checkpoint."""
TEMPORARY_ENOUGH = GIB
"""Bytes of temporary space that torch.compile and pip get by with."""
SHOWN = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|HF|SLURM_(NNODES|NTASKS|JOB_NUM_NODES))(_|$).*"
    r"|(OMP|MKL|OPENBLAS)_NUM_THREADS|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_(ADDR|PORT)|TOKENIZERS_PARALLELISM"
    r"|WANDB_MODE|CC|CXX|TMPDIR|LD_PRELOAD|PYTHONPATH|PYTHONOPTIMIZE"
)
"""Environment variables that change how training runs."""
SECRET = re.compile(r"TOKEN$|KEY|SECRET|PASSWORD")
"""Of these it is told that they are set, and not to what."""
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs do not use NVLink or peer-to-peer PCIe",
    "NCCL_SHM_DISABLE": "GPUs that are not peers talk over the network",
    "NCCL_IB_DISABLE": "machines talk over TCP although there may be InfiniBand",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
}
"""Switches for the search of errors, and what they cost if they are left on."""


def host() -> Iterator[Finding]:
    """Limits of the system."""
    if SHARED.is_dir():
        total = shutil.disk_usage(SHARED).total
        small = total < SHARED_ENOUGH
        remedy = "start the container with --shm-size=16g or --ipc=host" if small else ""
        yield Finding(str(SHARED), size(total), "warning" if small else "ok", remedy)
    yield _open_files()
    yield _compiler()
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    little = free < TEMPORARY_ENOUGH
    remedy = "free some, or set TMPDIR to another folder" if little else ""
    yield Finding("temporary files", f"{size(free)} free in {folder}", "warning" if little else "ok", remedy)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} a process"
    if soft == resource.RLIM_INFINITY or soft >= FILES_ENOUGH:
        return Finding("open files", says)
    allowed = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    return Finding("open files", says, "warning", f"ulimit -n {allowed}")


def _compiler() -> Finding:
    """What torch.compile builds its CPU kernels with."""
    named = os.environ.get("CXX")
    found = next((path for name in ([named] if named else ["g++", "clang++"]) if (path := shutil.which(name))), None)
    if found is None:
        says = f"CXX={named} is not there" if named else "neither g++ nor clang++"
        return Finding("compiler", f"{says}; compile = true fails on the CPU", "note", "install g++")
    return Finding("compiler", found)


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """What is set that changes how training runs. Values of secrets are left out, and the home folder is `~`."""
    home = variables.get("HOME", "")
    for name in sorted(filter(SHOWN.fullmatch, variables)):
        value = variables[name]
        if home not in ("", "/"):
            value = value.replace(home, "~")
        if SECRET.search(name):
            value = "(set)"
        if name in SLOW and value not in ("", "0"):
            yield Finding(name, f"{value}: {SLOW[name]}", "warning", f"unset {name}")
        else:
            yield Finding(name, value or "(empty)", "note")
    if "RANK" in variables and "MASTER_ADDR" not in variables:
        yield Finding("RANK", "is set without MASTER_ADDR", "problem", "unset RANK, or start with torchrun")
