"""Where checkpoints lie: a local directory, or a place that fsspec knows (``s3://``, ``gs://``, ``memory://``, …).

- A local file is mapped into memory: what is not looked at is not read, and ranks of a machine share what is.
- A remote store is read by ranges. It has no positioned writes and no renaming, so a checkpoint there has a file for
  each rank, and is one from the moment its manifest is there, which is written last.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from trueshard.checkpoint.manifest import check_name


class Store(Protocol):
    """A directory of files, to be read."""

    where: str
    """For messages."""

    def names(self) -> Iterator[str]:
        """Every file, by its path below the directory."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    def size(self, name: str) -> int:
        """Its bytes. Raises FileNotFoundError."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes ``begin`` to ``end`` of a file."""

    def private(self, name: str) -> mmap.mmap | None:
        """A map of a file that may be written to without changing the file; None where there is none."""

    def release(self, name: str, begin: int, end: int) -> None:
        """These bytes are not needed in memory any more."""


class LocalStore:
    """A directory of the file system.

    Args:
        directory: it.
        confined: refuse files that a symbolic link leads out of it.
    """

    def __init__(self, directory: Path, confined: bool = True) -> None:
        self.directory, self.where = directory, str(directory)
        self._confined = confined
        self._paths: dict[str, Path] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._private: dict[str, mmap.mmap] = {}

    def names(self) -> Iterator[str]:
        """Every file, by its path below the directory."""
        for path in sorted(self.directory.rglob("*")):
            if path.is_file() or path.is_symlink():
                yield path.relative_to(self.directory).as_posix()

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self._path(name).is_file()

    def _path(self, name: str) -> Path:
        """Where a file is; asked once, since a file is read in many pieces."""
        if name not in self._paths:
            check_name(name, self.where)
            path = self.directory / name
            if self._confined and not path.resolve().is_relative_to(self.directory.resolve()):
                raise ValueError(f"{path} is a link out of the checkpoint; it was not opened")
            self._paths[name] = path
        return self._paths[name]

    def size(self, name: str) -> int:
        """Its bytes. Raises FileNotFoundError."""
        try:
            return self._path(name).stat().st_size
        except OSError:  # not there, below a file, a name too long
            raise FileNotFoundError(f"{self.where} has no file {name!r}; it is incomplete") from None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes ``begin`` to ``end`` of a file, as they are mapped."""
        size = self.size(name)
        end = size if end is None else end
        if end > size:
            raise ValueError(f"{self.where}/{name} is cut short: {size} bytes, where {end} are needed")
        if begin == end:
            return memoryview(b"")
        if name not in self._maps:
            with open(self._path(name), "rb") as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._maps[name])[begin:end]

    def private(self, name: str) -> mmap.mmap | None:
        """A map of a file that may be written to without changing the file; None where there is none."""
        if name not in self._private:
            with open(self._path(name), "rb") as file:
                self._private[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._private[name]

    def release(self, name: str, begin: int, end: int) -> None:
        """These bytes are not needed in memory any more; the system may keep them in its cache."""
        found = self._maps.get(name)
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if found is not None and hasattr(mmap, "MADV_DONTNEED") and end > first:
            found.madvise(mmap.MADV_DONTNEED, first, end - first)


class RemoteStore:
    """A directory of an fsspec file system."""

    def __init__(self, url: str) -> None:
        self.fs, self.root = file_system(url)
        self.where = url.rstrip("/")

    def path(self, name: str) -> str:
        """Of a file, as the file system wants it."""
        check_name(name, self.where)
        return f"{self.root}/{name}"

    def names(self) -> Iterator[str]:
        """Every file, by its path below the directory."""
        for path in sorted(self.fs.find(self.root)):
            yield path.removeprefix(self.root).lstrip("/")

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self.fs.exists(self.path(name)))

    def size(self, name: str) -> int:
        """Its bytes. Raises FileNotFoundError."""
        try:
            return int(self.fs.size(self.path(name)))
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.where} has no file {name!r}; it is incomplete") from None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes ``begin`` to ``end`` of a file, fetched."""
        end = self.size(name) if end is None else end
        data = memoryview(self.fs.cat_file(self.path(name), start=begin, end=end) if end > begin else b"")
        if len(data) != end - begin:
            raise ValueError(f"{self.where}/{name} is cut short: bytes {begin} to {end} are not all there")
        return data

    def private(self, name: str) -> mmap.mmap | None:
        """A remote file cannot be mapped."""
        return None

    def release(self, name: str, begin: int, end: int) -> None:
        """Nothing is kept."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is meant for fsspec."""
    return isinstance(path, str) and "://" in path


def open_store(path: str | os.PathLike[str], confined: bool = True) -> Store:
    """The directory ``path``.

    Raises:
        FileNotFoundError: there is none.
    """
    if is_url(path):
        return RemoteStore(str(path))
    directory = Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(f"no checkpoint is at {path}")
    return LocalStore(directory, confined)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of ``url``, and the path in it.

    Raises:
        ValueError: fsspec does not know it, or the package that it needs is missing.
    """
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{url}: {error}") from error
    return fs, str(root).rstrip("/")
