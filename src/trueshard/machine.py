"""CPU cores and memory that this machine and its container give a process; the releases of torch that are tested.

Python's own housekeeping of memory, too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

TESTED_TORCH = "2.11", "2.15"
"""The oldest and the newest release of torch on which TrueShard is tested."""

PROCESSES_PER_CORE = 4
"""CPU processes that may share a core: a larger number is surely a slip, and each loads its own libraries."""

CGROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux shows the limits of the container that this process runs in (version 2)."""


def cpu_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """Cores' worth of time that the container gives, or None if it sets no such limit."""
    quota, _, period = _limit("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def memory_bytes() -> int:
    """Bytes of main memory: the machine's, or the container's if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _limit("memory.max")
    return min(physical, int(limit)) if limit.isdecimal() else physical


def memory_of_process(processes: int) -> int:
    """Return the bytes that one of ``processes`` may have: its part of the main memory, or its resource limit."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min([memory_bytes() // processes, *(limit for limit in limits if limit != resource.RLIM_INFINITY)])


def memory_kills() -> int | None:
    """Return how many processes the system has killed for want of memory since it started; None if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _limit(name: str) -> str:
    try:
        return (CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""


_MANY = 100_000
"""New objects that are not few: the collector takes some 10 ms for so many."""


@contextlib.contextmanager
def earlier_objects_frozen() -> Iterator[None]:
    """Leave what is there already out of collections of garbage inside, as they look through it again and again.

    Where the user has frozen objects, these stay so, and nothing else changes.
    """
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect no garbage inside: where many objects are made that stay, looking through all of them is in vain.

    So it is right behind: with the next object the collector would go through all that are new. Frozen and unfrozen
    they are among the oldest, as if it had; a full collection looks at them. Where the user has frozen objects, nothing
    is unfrozen.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Fewer are looked through sooner than those that are frozen are counted, one by one.
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
