"""Out of memory: how it is recognised, what was used, and the record that a failing worker leaves.

- On a GPU the figures are the caching allocator's. On a CPU, which keeps none, they are the process's data, less what
  it held before the model was made, against the limits that the system sets a process.
- The record, `out-of-memory.json` in the run's folder, is that of the rank that was first; it is taken away once what
  would fit was found out.
"""

from __future__ import annotations

import json
import os
import re
import resource
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

NAME = "out-of-memory.json"


@dataclass(frozen=True)
class Shortage:
    """What a rank had when its memory ran out. Bytes."""

    rank: int
    used: int
    """By tensors and what the allocator kept for them, before the request that failed."""
    asked: int
    """By that request; 0 where it is not told."""
    available: int
    """What this process could have at most for tensors."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocator had nothing more to give."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


class Meter:
    """What this process holds, counted from when it was made: before the model is."""

    def __init__(self, device: torch.device, local_ranks: int) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else psutil.Process().memory_info().data
        self._limit = limit_of(device, local_ranks)

    def shortage(self, rank: int, error: BaseException) -> Shortage:
        """What there was when `error` was raised; to be called while it is handled."""
        if self._device.type == "cuda":
            used = torch.cuda.memory_reserved(self._device)
            available = used + torch.cuda.mem_get_info(self._device)[0]
        else:
            available = max(1, self._limit - self._before)
            used = min(available, max(0, psutil.Process().memory_info().data - self._before))
        return Shortage(rank, used, _asked(str(error)), available)


def limit_of(device: torch.device, local_ranks: int) -> int:
    """Bytes that a process may have: of a GPU all it has; of a CPU its limits, or its part of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    given = [each for each in limits if each != resource.RLIM_INFINITY]
    return min([psutil.virtual_memory().total // local_ranks, *given])


def leave(folder: Path, shortage: Shortage) -> bool:
    """Leave the record for who starts again or speaks; False if another rank was first."""
    scratch = folder / f".{NAME}.{os.getpid()}"
    scratch.write_text(json.dumps(asdict(shortage)), encoding="utf-8")
    try:
        os.link(scratch, folder / NAME)
    except FileExistsError:
        return False
    finally:
        scratch.unlink()
    return True


def read(folder: Path) -> Shortage | None:
    """The record, or None if there is none."""
    try:
        return Shortage(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def clear(folder: Path) -> None:
    """Take the record away."""
    (folder / NAME).unlink(missing_ok=True)


def is_left(folder: Path) -> bool:
    """Whether there is a record."""
    return (folder / NAME).exists()


def _asked(message: str) -> int:
    """The bytes that a message of an allocator names: torch's for the CPU, or for CUDA ("20.00 MiB")."""
    if plain := re.search(r"you tried to allocate (\d+) bytes", message):
        return int(plain[1])
    if rounded := re.search(r"Tried to allocate ([\d.]+) ([KMGT]?)i?B", message):
        return int(float(rounded[1]) * 1024 ** " KMGT".index(rounded[2] or " "))
    return 0
