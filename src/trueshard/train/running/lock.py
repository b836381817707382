"""One run at a time in a folder: the lock on its ``.lock``, which holds between hosts that share the file system."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trueshard.errors import UserError
from trueshard.files import locked

NAME = ".lock"
PATIENCE = 10.0
"""Seconds to wait for a run before it: processes whose launcher was killed end by themselves after a step."""


@contextlib.contextmanager
def held(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the lock of a run's folder, which is made if it is missing, and removed again if it stays empty.

    Raises `UserError` that names the other process if it is held after `patience` seconds.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            stack.enter_context(locked(folder / NAME, patience))
        except TimeoutError as holder:
            raise UserError(
                f"run.dir: {folder} is in use by {holder}; wait for its end, or choose another folder"
            ) from None
        yield


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # it has files by now
        for folder in folders:
            folder.rmdir()
