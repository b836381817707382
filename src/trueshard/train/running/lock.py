"""One run at a time in a folder.

- A lock of the operating system on `.lock`: it dies with the process that holds it, however that ends, and holds
  between hosts where their shared file system passes locks on.
- The file says who holds it. Left by a process that was killed, it is nobody's, and is taken over.
- Processes of a run whose launcher was killed end by themselves after a step; so the lock is waited for a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from trueshard.errors import UserError

NAME = ".lock"
PATIENCE = 10.0
"""Seconds to wait for the processes of a run before it to end."""


@contextlib.contextmanager
def held(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the lock of a run's folder, which is made if it is missing, and removed again if it stays empty.

    Raises `UserError` that names the other process if it is held after `patience` seconds.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / NAME
    descriptor = _taken(file, folder, patience)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # it has other files by now
            for place in made:
                place.rmdir()


def _taken(file: Path, folder: Path, patience: float) -> int:
    deadline = time.monotonic() + patience
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise UserError(
                    f"run.dir: {folder} is in use by {_holder(file)}; wait for its end, or choose another folder"
                ) from None
            time.sleep(0.1)
            continue
        if _is_still(descriptor, file):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            return descriptor
        os.close(descriptor)


def _is_still(descriptor: int, file: Path) -> bool:
    """Whether the file was not removed by its holder between being opened and being locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _holder(file: Path) -> str:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return f"process {record['pid']} on {record['host']}"
    except (OSError, ValueError, KeyError):
        return "another run"
