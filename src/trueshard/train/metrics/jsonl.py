"""Files with JSON objects of steps, one a line, in the order of steps: read, continued after a resume, appended to.

Non-finite numbers are null in the file, so that every language can read it, and NaN when read back.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trueshard.errors import UserError

Line = dict[str, Any]

START = re.compile(rb'\{"step": (\d+),')
"""Start of a line that `StepLines` has written."""


class WrongLineError(ValueError):
    """A line is wrong; the message follows its number."""


def line_of(record: Line) -> bytes:
    """Return a record as a line."""
    try:
        text = json.dumps(record, allow_nan=False)
    except ValueError:
        text = json.dumps(_mapped(record, lambda value: None if _is_lost(value) else value), allow_nan=False)
    return text.encode() + b"\n"


def record_of(line: bytes) -> Line:
    """Return a line as a record. Raises ValueError, TypeError or KeyError if it is no object with a step."""
    record = json.loads(line)
    record["step"] = int(record["step"])
    if b"null" in line:
        record = _mapped(record, lambda value: math.nan if value is None else value)
    return record


def _is_lost(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(each, change) for each in value]
    return change(value)


def read_lines(lines: Iterable[bytes], path: Path, read: Callable[[bytes], Line] = record_of) -> Iterator[Line]:
    """Yield the record of each line; leave a last line out that a crash cut off.

    Raises `UserError` with the number of another line that ``read`` raises ValueError, TypeError or KeyError for.
    """
    damaged: UserError | None = None
    for number, line in enumerate(lines, start=1):
        if damaged is not None:
            raise damaged
        try:
            found = read(line)
        except (ValueError, TypeError, KeyError) as error:
            damaged = damage(path, number, error)
        else:
            yield found


def damage(path: Path, number: int, error: Exception) -> UserError:
    """Return what to raise for a damaged line."""
    why = str(error) if isinstance(error, WrongLineError) else "is no JSON object with a step"
    return UserError(f"{path}, line {number}: {why}; delete that line, or move the file away")


class LineSpan(NamedTuple):
    """The place of a line in its file."""

    step: int
    number: int
    """Number of the line, from 1."""
    first: int
    """Byte at which it begins."""
    size: int
    """Bytes of the line, its end included."""


def read_steps(path: Path) -> list[LineSpan]:
    """Return the place of each line; of lines that `StepLines` wrote, only start and end are looked at.

    Raises `UserError` for a damaged line, but for the last.
    """
    result, first, sizes = list[LineSpan](), 0, list[int]()

    def step_of(line: bytes) -> Line:
        known = START.match(line) if line.endswith(b"}\n") else None
        return {"step": int(known[1])} if known else record_of(line)

    def measured(file: BinaryIO) -> Iterator[bytes]:
        for line in file:
            sizes.append(len(line))
            yield line

    with path.open("rb") as file:
        for number, record in enumerate(read_lines(measured(file), path, step_of), start=1):
            result.append(LineSpan(record["step"], number, first, sizes[-1]))
            first += sizes[-1]
    return result


class StepLines:
    """Appends to a file of steps; a resumed run has each step once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = 0
        """Last step of the file when it was opened."""
        self._file: BinaryIO | None = None

    def open(self, step: int) -> None:
        """Cut off what comes after ``step``, and a line that a crash cut; a run from its beginning has no line yet."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = read_steps(self.path) if self.path.exists() else []
        kept = [each for each in known if step and each.step <= step]
        self._file = self.path.open("ab")
        self.last = 0
        if kept:
            self.last, end = kept[-1].step, kept[-1].first + kept[-1].size
            os.truncate(self.path, end)
            with self.path.open("rb") as file:
                file.seek(end - 1)
                if file.read() != b"\n":
                    self._file.write(b"\n")
        else:
            os.truncate(self.path, 0)

    def write(self, records: Iterable[Line]) -> None:
        """Append records; nothing if the file is not open."""
        if self._file is not None:
            self._file.write(b"".join(map(line_of, records)))
            self._file.flush()

    def close(self) -> None:
        """Close the file if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None
