"""Files of data: on this machine, or at an address that fsspec reads in place ("s3://…", "zip://*.jsonl::/data/a.zip").

Keys and options of an address are fsspec's own: environment variables, or files in `~/.config/fsspec`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from trueshard.errors import cut_line, explained

CHUNK = 2**20
"""Bytes of a file that are read together."""
REMEDY = "correct it, install what reads it, or see that there is a network"


def is_address(name: str) -> bool:
    """Return True for what fsspec reads; a plain path is read without it."""
    return "://" in name


def base_name(file: str) -> PurePosixPath:
    """Return the name of a file, at an address without its chain and its query."""
    return PurePosixPath(file.split("::")[0].split("?")[0] if is_address(file) else Path(file).name)


def kind(file: str) -> str:
    """Return the suffix that selects the reader: ".jsonl" for `a.jsonl` and `a.jsonl.gz`."""
    name = base_name(file)
    return PurePosixPath(name.stem).suffix.lower() if name.suffix == ".gz" else name.suffix.lower()


def size_of(file: str) -> int | None:
    """Return the bytes of a file, or None if they are unknown."""
    return _info(file).get("size") if is_address(file) else Path(file).stat().st_size


def state_of(file: str) -> list[Any]:
    """Return the name, size and modification time of a file, or all that its address tells: equal means unchanged."""
    if is_address(file):
        return [file, *sorted(map(str, _info(file).items()))]
    status = Path(file).stat()
    return [file, status.st_size, status.st_mtime_ns]


def has_pattern(name: str) -> bool:
    """Return True if a path, or an address before its chain, has "*" or "[", or "?" where that begins no query."""
    head = name.split("::")[0]
    return any(letter in head for letter in ("*[" if head.startswith("http") else "*[?"))


def listed(name: str, key: str) -> dict[str, str]:
    """Return the files of a pattern, or at an address of a file or a folder: name below it → path or address.

    Raises `UserError` with ``key`` if they cannot be read.
    """
    link, chain = name.partition("::")[1:]
    with explained(f"{key}: {name!r} cannot be read", REMEDY, detail=cut_line):
        system, path = _system(name if is_address(name) else str(Path(name).expanduser()))
        if has_pattern(name):
            root, entries = os.path.dirname(re.split(r"[*?[]", path)[0]), system.glob(path, detail=True)
        elif system.isfile(path):  # first: to look for links, a page of the web is read whole
            root, entries = os.path.dirname(path), {path: {}}
        else:
            root, entries = path, system.find(path, detail=True)
    files = sorted(file for file, info in entries.items() if info.get("type") != "directory")
    names = [file.removeprefix(root).lstrip("/") for file in files]
    if is_address(name):
        files = [(file if is_address(file) else system.unstrip_protocol(file)) + link + chain for file in files]
    return dict(zip(names, files, strict=True))


@contextlib.contextmanager
def opened(file: str, read: list[int], offset: int = 0) -> Iterator[IO[bytes]]:
    """Open a file from byte ``offset`` of its content on; ``read`` counts the bytes of files on this machine."""
    raw: Any = _CountedFile(file, read)
    with io.BufferedReader(raw, CHUNK) as stream:
        result: Any = gzip.GzipFile(fileobj=stream) if base_name(file).suffix == ".gz" else stream
        if offset:
            result.seek(offset)
            read[0] += offset if result is stream else 0  # what an earlier start has read
        yield result


class _CountedFile(io.RawIOBase):
    """A file that adds the bytes that are read of it to a count."""

    def __init__(self, file: str, read: list[int]) -> None:
        if is_address(file):
            self._system, path = _system(file)  # held: an archive closes with its file system
            self._stream: Any = self._system.open(path, "rb")
        else:
            self._stream = io.FileIO(file)
        self._count = read
        self.tell, self.seek = self._stream.tell, self._stream.seek  # type: ignore[method-assign]

    def readable(self) -> bool:
        return True

    seekable = readable

    def readinto(self, buffer: Any) -> int:
        size = self._stream.readinto(buffer) or 0
        self._count[0] += size
        return int(size)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _system(file: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(file)
    return system, str(path)


def _info(file: str) -> dict[str, Any]:
    with explained(f"{file} cannot be read", REMEDY, detail=cut_line):
        system, path = _system(file)
        return dict(system.info(path))
