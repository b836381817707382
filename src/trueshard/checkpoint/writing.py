"""Write a checkpoint's files.

- To a local directory: every rank writes its byte ranges of the same files, under a temporary name; renaming the
  directory makes it a checkpoint. A lock beside it tells that a save is in progress; what a process that died left
  behind, the next save in that place removes.
- To a URL of fsspec: each rank writes a file of its own; the manifest, written last, makes it a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueshard import _torch
from trueshard.checkpoint.catalogue import file_system
from trueshard.checkpoint.format import BLOCK, MANIFEST, FileRecord, Piece, TensorEntry, crc32, make_header
from trueshard.checkpoint.process_group import as_bytes
from trueshard.files import locked

_BEGUN = ".trueshard-partial"  # a file that a remote directory has until its manifest is there
_PARTIAL = re.compile(r"(\..+\.partial-[0-9a-f]{8})(\.lock)?")
OF_A_STEP = re.compile(r"step-(\d{8,})")  # names of a run's checkpoints, beside which the link ``latest`` stands
PAGE = 4096  # bytes to whose multiples a file is written past the cache
_PATIENCE = 10.0  # seconds to wait for a save that takes this one's new lock for a dead one's


@dataclass
class Written:
    """The checksums, pieces and files that one rank has written."""

    parts: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # key → (begin, end, checksum) of its bytes
    pieces: dict[str, Piece] = field(default_factory=dict)  # key → where they are, if the rank has files of its own
    files: dict[str, FileRecord] = field(default_factory=dict)


class LocalWriter:
    """Writes to a directory of the file system. ``token``: eight hexadecimal digits, the same on every rank."""

    def __init__(self, final: Path, token: str) -> None:
        self.where, self._final = str(final), Path(os.path.abspath(final))
        self._partial = self._final.with_name(f".{self._final.name}.partial-{token}")
        self._lock = contextlib.ExitStack()

    def check_free(self) -> None:
        if _is_taken(self._final):
            raise FileExistsError(f"{self.where} exists already; save under another name, or remove it first")

    def begin(self, files: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        """Make files (name → first bytes) at their full size. Rank 0."""
        parent = self._final.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            text = f"cannot make {parent}: it, or a part of its path, is a file; choose another place"
            raise NotADirectoryError(text) from error
        for match in filter(None, map(_PARTIAL.fullmatch, os.listdir(parent))):  # left behind by dead processes
            left = parent / match[1]
            with contextlib.suppress(OSError, NotImplementedError), locked(Path(f"{left}.lock"), patience=0):
                if left.is_symlink():
                    left.unlink()
                shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
            self._lock.enter_context(locked(Path(f"{self._partial}.lock"), _PATIENCE))
        self._partial.mkdir()
        for name, data in files.items():
            path = self._partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_file(path, data, sizes[name])

    def write(self, rank: int, rows: Mapping[str, Any], entries: Mapping[str, TensorEntry], verify: bool) -> Written:
        """Write ``rows`` (key → (first byte in the tensor, this rank's rows)) durably; read it again to ``verify``."""
        written = Written()
        by_file: dict[str, list[str]] = {}
        for key in rows:
            by_file.setdefault(entries[key].pieces[0].file, []).append(key)
        for name, keys in by_file.items():
            path = self._partial / name
            with _DiskFile(path) as file:
                for key in keys:
                    begin, tensor = rows[key]
                    data = as_bytes(tensor)
                    with _naming(path, key):
                        checksum = file.write(entries[key].pieces[0].begin + begin, data)
                    written.parts[key] = begin, begin + len(data), checksum
                with _naming(path):
                    file.sync()
                # Not sooner: a disk that reads and writes at once does both more slowly.
                for key in keys if verify else ():
                    begin, end, _ = part = written.parts[key]
                    start = entries[key].pieces[0].begin
                    _verify(file.read(start + begin, start + end), part, path, key)
        return written

    def publish(self, manifest: bytes) -> None:
        _write_file(self._partial / MANIFEST, manifest)
        move_into_place(self._partial, self._final, self.where)
        if OF_A_STEP.fullmatch(self._final.name):
            move_link(self._final.with_name("latest"), self._final.name)
        self._lock.close()

    def abandon(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._lock.close()


def move_link(link: Path, name: str | None) -> None:
    """Let a link point to what has ``name`` beside it, or remove it; in one step, where the file system has links."""
    if not link.is_symlink() and (name is None or os.path.lexists(link)):
        return  # a file or directory of that name stays
    new = link.with_name(f".{link.name}.partial-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError, NotImplementedError):
        if name is None:
            link.unlink()
        else:
            new.symlink_to(name, target_is_directory=True)
            new.replace(link)
        _sync(link.parent)


def _write_file(path: Path, data: bytes, size: int = 0) -> None:
    """Write a new file that begins with ``data``, and has ``size`` bytes if that is more, to disk."""
    with _naming(path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        if size > len(data):
            file.truncate(size)
        os.fsync(file)


class _DiskFile:
    """A file that is written past the system's cache, where its file system can do that, which is faster.

    It goes by whole pages: those at both ends of a tensor, which another rank may write to, go through the cache.
    """

    def __init__(self, path: Path) -> None:
        self._cached = self._direct = os.open(path, os.O_RDWR)
        with contextlib.suppress(AttributeError, OSError):
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._buffer = memoryview(mmap.mmap(-1, BLOCK))  # begins with a page, as it must

    def __enter__(self) -> _DiskFile:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in {self._cached, self._direct}:
            os.close(descriptor)

    def write(self, at: int, data: memoryview) -> int:
        """Write ``data`` from byte ``at`` on, and return its checksum."""
        end, checksum = at + len(data), 0
        first, last = min(end, -(-at // PAGE) * PAGE), end // PAGE * PAGE
        cuts = [at, *range(first, last, BLOCK), max(first, last), end]
        for start, stop in itertools.pairwise(cuts):
            block = data[start - at : stop - at]
            checksum = crc32(block, checksum)
            if len(block) >= PAGE and self._direct != self._cached:
                self._buffer[: len(block)] = block
                try:
                    start += os.pwrite(self._direct, self._buffer[: len(block)], start)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # which says that the file system wants it otherwise
                        raise
            while start < stop:
                start += os.pwrite(self._cached, data[start - at : stop - at], start)
        return checksum

    def read(self, begin: int, end: int) -> Iterator[memoryview]:
        """Read bytes ``begin`` to ``end``, block by block: from the disk, once ``sync`` has put them there.

        That goes through the cache, from which they are dropped first, since the system then reads ahead.
        """
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._cached, begin, end - begin, os.POSIX_FADV_DONTNEED)
        for at in range(begin, end, BLOCK):
            yield self._buffer[: os.preadv(self._cached, [self._buffer[: end - at]], at)]

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        os.fsync(self._cached)


def _verify(blocks: Iterable[Any], part: tuple[int, int, int], path: Path | str, key: str) -> None:
    """Raise ``OSError`` if ``blocks`` do not have the checksum of ``part`` (begin, end, checksum)."""
    if functools.reduce(lambda value, block: crc32(memoryview(block), value), blocks, 0) != part[2]:
        name = str(path).rpartition("/")[2]
        raise OSError(f"{name} does not hold what was written to it: {key!r} reads differently; look at the disk")


def move_into_place(made: Path, final: Path, shown: str) -> None:
    """Rename ``made`` to ``final``, once all of it is on disk, durably; in messages it is ``shown``."""
    for path in [*made.rglob("*"), made]:
        _sync(path)
    try:
        if _is_taken(final):  # a rename would replace a file
            raise FileExistsError
        os.rename(made, final)
    except OSError as error:
        if _is_taken(final):
            raise FileExistsError(
                f"{shown} was made by another process in the meantime; nothing was changed"
            ) from error
        raise
    _sync(final.parent)


def _is_taken(path: Path) -> bool:
    """True if ``path`` is there, and more than an empty directory."""
    if path.is_dir() and not path.is_symlink():
        return any(path.iterdir())
    return os.path.lexists(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a checkpoint: one rename, and it is none any more. What a failure leaves behind, the next save removes."""
    left = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        os.rename(path, left)
    except FileNotFoundError:
        return
    shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _naming(path: Path | str, key: str | None = None) -> Iterator[None]:
    """Add file and tensor to the system's errors."""
    try:
        yield
    except OSError as error:
        folder, _, name = str(path).rpartition("/")
        what = f"{name}, tensor {key!r}" if key else name
        raise OSError(error.errno, f"{error.strerror or error} (writing {what})", folder) from error


class RemoteWriter:
    """Writes to a directory of an fsspec file system, with the methods of ``LocalWriter``."""

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        self._fs, self._root = file_system(url)

    def check_free(self) -> None:
        if not self._fs.exists(self._root) or not self._fs.find(self._root):
            return
        if self._fs.exists(f"{self._root}/{MANIFEST}") or not self._fs.exists(f"{self._root}/{_BEGUN}"):
            raise FileExistsError(f"{self.where} exists already; save under another name, or remove it first")
        self._fs.rm(self._root, recursive=True)  # of a save that did not finish

    def begin(self, files: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        self._fs.makedirs(self._root, exist_ok=True)
        for name, data in {_BEGUN: b"", **files}.items():
            self._fs.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
            with _naming(f"{self.where}/{name}"):
                self._fs.pipe_file(f"{self._root}/{name}", data)

    def write(self, rank: int, rows: Mapping[str, Any], entries: Mapping[str, TensorEntry], verify: bool) -> Written:
        written = Written()
        if not rows:
            return written
        file = f"rank-{rank:05d}.safetensors"
        parts = {key: TensorEntry.of(_torch.local(tensor), []) for key, (_, tensor) in rows.items()}
        header, ranges = make_header(parts, marked=True)
        with _naming(f"{self.where}/{file}", next(iter(rows))), self._fs.open(f"{self._root}/{file}", "wb") as stream:
            stream.write(header)
            for key, (first, last) in sorted(ranges.items(), key=lambda item: item[1]):
                begin, tensor = rows[key]
                data = as_bytes(tensor)
                for at in range(0, len(data), BLOCK):
                    stream.write(data[at : at + BLOCK])
                written.parts[key] = begin, begin + len(data), crc32(data)
                written.pieces[key] = Piece(file, first, last)
        size = max(last for _, last in ranges.values())
        written.files[file] = FileRecord(size, crc32(memoryview(header)), len(header))
        for key, piece in written.pieces.items() if verify else ():
            starts = range(piece.begin, piece.end, BLOCK)
            blocks = (
                self._fs.cat_file(f"{self._root}/{file}", start=at, end=min(at + BLOCK, piece.end)) for at in starts
            )
            _verify(blocks, written.parts[key], file, key)
        return written

    def publish(self, manifest: bytes) -> None:
        with _naming(f"{self.where}/{MANIFEST}"):
            self._fs.pipe_file(f"{self._root}/{MANIFEST}", manifest)
            self._fs.rm_file(f"{self._root}/{_BEGUN}")

    def abandon(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._root, recursive=True)
