"""Text helpers: sizes in bytes, ranges of numbers, columns for a terminal, nearest words; TOML's reader; the logger.

At INFO the logger ``trueshard`` logs the durations of shard, save, load and plan.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trueshard.errors import with_extra

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # noqa: F401

logger = logging.getLogger("trueshard")


def load_json(text: str | bytes) -> Any:
    """Return the value of JSON of any origin. Raises ValueError, also where it is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def size(count: float) -> str:
    """Return a number of bytes with a binary unit: ``"1.5 GiB"``."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


def parse_size(option: str, given: str | int) -> int:
    """Return ``"70GiB"``, ``"70 GB"`` or a number in bytes, as pydantic's ByteSize does; else raise ValueError."""
    with with_extra():
        from pydantic import ByteSize, TypeAdapter

    try:
        if re.fullmatch(r"\s*[\d.]+\s*\w*\s*", str(given)) is None:  # pydantic reads "70 GiB of it" as 70 GiB
            raise ValueError
        count = int(TypeAdapter(ByteSize).validate_python(given))
    except ValueError:
        raise ValueError(f"{option}={given!r} is no size; write it like 70GiB, 80GB or a number of bytes") from None
    if count < 1:
        raise ValueError(f"{option}={given!r} must be at least one byte")
    if isinstance(given, str) and given.strip().isdecimal() and count < 1 << 20:
        raise ValueError(f"{option}={given!r} is {count} bytes; say the unit, such as {given.strip()}GiB")
    return count


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table; ``right``: indices of right-aligned columns."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    align: list[Callable[[str, int], str]] = [str.rjust if i in right else str.ljust for i in range(len(head))]
    cells = [head, ["-" * width for width in widths], *rows]
    return ["  ".join(align[i](row[i], widths[i]) for i in range(len(head))).rstrip() for row in cells]


def ranges(numbers: Sequence[int], dash: str = "-") -> list[str]:
    """Return ascending numbers as ``["0-2", "5"]``."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    members = [[number for _, number in run] for _, run in runs]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}{dash}{run[-1]}" for run in members]


def nearest(name: str, words: Iterable[str], count: int = 3) -> str:
    """Return ``" Did you mean …?"`` with the known words nearest to ``name``; ``""`` if none is near."""
    matches = difflib.get_close_matches(name, list(words), n=count, cutoff=0.5)
    return f" Did you mean {', '.join(repr(word) for word in matches)}?" if matches else ""


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Log at INFO how long the block took; nothing if it raises. Also a decorator."""
    began = time.perf_counter()
    yield
    logger.info("%s took %.2f s", what, time.perf_counter() - began)
