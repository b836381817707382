"""`log.txt`: what the processes of a run print, line by line with the time, also after the terminal is gone."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "log.txt"
CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|[^\n]*\r(?!\n)")
"""Colours and moves of the cursor, and text over which other text is written: a terminal does not show them as such."""


class _Copied:
    """A stream whose lines also go to the log, if there is the folder of a run."""

    def __init__(self, stream: Any, file: Path) -> None:
        self._stream, self._file, self._begun = stream, file, ""

    def write(self, text: str) -> int:
        *lines, rest = (self._begun + text).split("\n")
        self._begun = rest.rpartition("\r")[2]  # of a bar, the newest state
        kept = [line for line in (CONTROL.sub("", line).rstrip() for line in lines) if line]
        if kept and self._file.parent.is_dir():
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as log:
                log.write("".join(f"{now}  {line}\n" for line in kept))
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Write what this process prints inside to the log of a run, too; all processes of the run append to it."""
    streams: tuple[Any, Any] = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Copied(stream, folder / NAME) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
