"""Replace a file whole, lock one for as long as a process lives, and make a folder that does not stay empty."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

LONGEST_HOLDER = 1024
"""Bytes of a lock's file at most, which names its holder."""


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a scratch path beside ``file``, of the same suffix, that takes its place at the end.

    If the block raises, ``file`` is as it was and the scratch file, or folder, is removed. A folder takes the place of
    none, or of an empty one.
    """
    scratch = file.with_name(f".new-{os.getpid()}-{file.name}")
    try:
        yield scratch
        scratch.replace(file)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def replace_text(file: Path, text: str) -> None:
    """Replace ``file`` by ``text`` in UTF-8, whole or not at all."""
    with replacing(file) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """Make ``folder`` and its parents; at the end, remove those of them that were made and are empty."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it has files by now
            for place in made:
                place.rmdir()


@contextlib.contextmanager
def locked(file: Path, patience: float) -> Iterator[None]:
    """Hold a lock on ``file``, which is made in a folder that exists, names the holder, and is removed at the end.

    The lock dies with its process, and a file left behind by one is taken over. Raises TimeoutError, whose message is
    the holder, if it is still held after ``patience`` seconds.
    """
    import filelock

    if os.path.lexists(file):  # by a link, somebody's file would be written over
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_size > LONGEST_HOLDER:
            raise FileExistsError(f"{file} is there, and is no lock of a run; remove it")
    lock = filelock.FileLock(file)
    try:
        lock.acquire(timeout=patience, poll_interval=0.1)
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    except filelock.Timeout:
        raise TimeoutError(_holder(file)) from None
    finally:
        if lock.is_locked:
            file.unlink(missing_ok=True)
            lock.release()


def _holder(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") or "another process"
    except (OSError, ValueError):
        return "another process"
