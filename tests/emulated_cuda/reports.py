"""What the emulated device saw: races, memory read too early, broken rules of NCCL, and where the host waited.

Each process writes a line a report into the folder of EMULATED_CUDA_REPORTS, and keeps them for `watching`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from emulated_cuda import REPORTS, WAITS

FAULTS = ("race", "reused", "unlanded", "overwritten", "nccl")
DEPTH = 6
MOST = 200
"""Reports of one process that are written"""
HIDDEN = (f"{os.sep}emulated_cuda{os.sep}", "<frozen", f"{os.sep}torch{os.sep}_ops.py", f"{os.sep}torch{os.sep}utils")


@dataclass(frozen=True)
class Report:
    kind: str
    """of FAULTS, or `wait`: the host waited for the device"""
    detail: str
    site: tuple[str, ...]
    """`file:line function`, innermost first: who made the second access, or waited; empty in threads of C++"""
    thread: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail} | {' < '.join(self.site) or 'no Python, in ' + self.thread}"


def read(folder: Path) -> list[Report]:
    """Return what all processes have written into the folder."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [Report(**{**json.loads(line), "site": tuple(json.loads(line)["site"])}) for line in lines]


def counted_faults(reports: list[Report]) -> list[str]:
    """Return the faults among them, each once, with how often it was seen."""
    seen = Counter(str(each) for each in reports if each.kind in FAULTS)
    return [f"{count} × {text}" for text, count in seen.most_common()]


@contextlib.contextmanager
def watching() -> Iterator[list[Report]]:
    """Collect what this process reports meanwhile, each time that the host waits included."""
    reports: list[Report] = []
    _watchers.append(reports)
    try:
        yield reports
    finally:
        _watchers[:] = [each for each in _watchers if each is not reports]


def waits(reports: list[Report], depth: int = 2) -> Counter[str]:
    """Count the waits of the host by what waited and where."""
    return Counter(f"{each.detail} | {' < '.join(each.site[:depth])}" for each in reports if each.kind == "wait")


@dataclass
class Cost:
    """What the device and the host did, once it is counted."""

    operations: int = 0
    """Kernels, copies and collectives that this process launched; a foreach counts as one"""
    waits: Counter[str] = field(default_factory=Counter)
    """How often the host waited, by what waited and where"""


@contextlib.contextmanager
def counting(depth: int = 2) -> Iterator[Cost]:
    """Count what this process does meanwhile; it is known at the end."""
    cost, before = Cost(), _operations()
    with watching() as reports:
        yield cost
    cost.operations, cost.waits = _operations() - before, waits(reports, depth)


_watchers: list[list[Report]] = []
_operations: Callable[[], int] = int
_written: Counter[int] = Counter()


def _call_site() -> tuple[str, ...]:
    names, frame = [], sys._getframe(2)
    while frame is not None and len(names) < DEPTH:
        file = frame.f_code.co_filename
        if not any(part in file for part in HIDDEN):
            names.append(f"{os.sep.join(file.split(os.sep)[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(names)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
def _receive(kind: bytes, detail: bytes) -> None:
    folder = os.environ.get(REPORTS)
    is_fault = kind != b"wait"
    is_written = folder is not None and (is_fault or WAITS in os.environ)
    if not _watchers and not is_written:
        return
    report = Report(kind.decode(), detail.decode(), _call_site(), threading.current_thread().name)
    for each in _watchers:
        each.append(report)
    if is_written and (not is_fault or _written[os.getpid()] < MOST):
        _written[os.getpid()] += is_fault
        with contextlib.suppress(OSError), open(f"{folder}/{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(asdict(report)) + "\n")


def receive_from(library: Any) -> None:
    """Let the library report here, until Python ends."""
    global _operations
    _operations = library.emulated_operations
    library.emulated_set_receiver(_receive)
    atexit.register(lambda: library.emulated_set_receiver(None))
