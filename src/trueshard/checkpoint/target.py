"""Where a save writes to.

- A local directory: every rank writes at its own places of the same files, under a temporary name; renaming it is what
  makes it a checkpoint. A lock on the temporary directory says that somebody is at it; without one it was left behind
  by a process that died, and the next save beside it removes it.
- A remote store: each rank writes a file of its own; the manifest, written last, makes it a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trueshard.checkpoint import tensorfile
from trueshard.checkpoint.checksum import BLOCK, crc32
from trueshard.checkpoint.manifest import MANIFEST, Entry, FileRecord, Piece
from trueshard.checkpoint.pieces import as_bytes
from trueshard.checkpoint.store import file_system, is_url

fcntl: Any
try:
    import fcntl
except ImportError:  # no locks on this system: nothing left behind is removed
    fcntl = None

_BEGUN = ".trueshard-partial"
"""A file that a remote directory has until its manifest is there."""
_LEFT = re.compile(r"\..+\.partial-[0-9a-f]{8}")


@dataclass
class Written:
    """What one rank has written."""

    parts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Key → (begin, end) in the tensor's bytes, and the checksum of these."""
    pieces: dict[str, Piece] = field(default_factory=dict)
    """Where the files are not laid out beforehand."""
    files: dict[str, FileRecord] = field(default_factory=dict)


class Target(Protocol):
    """A checkpoint in the making."""

    where: str
    positioned: bool
    """Whether ranks write into the same files."""

    def check_free(self) -> None:
        """Raise FileExistsError if something is there already; rank 0."""

    def begin(self, files: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        """Make the files with what they begin with; rank 0."""

    def write(self, rank: int, mine: Mapping[str, Any], entries: Mapping[str, Entry], verify: bool) -> Written:
        """Write this rank's tensors: key → (where in its bytes, tensor)."""

    def publish(self, manifest: bytes) -> None:
        """Make it a checkpoint; rank 0."""

    def abandon(self) -> None:
        """Remove everything; rank 0."""

    def end(self) -> None:
        """Let go."""


def target_of(path: str | os.PathLike[str], token: str) -> Target:
    """The target that ``path`` means. ``token``: eight hexadecimal digits, the same on every rank."""
    return RemoteTarget(str(path)) if is_url(path) else LocalTarget(Path(path), token)


class LocalTarget:
    """A directory of the file system."""

    positioned = True

    def __init__(self, final: Path, token: str) -> None:
        self.where, self._final = str(final), Path(os.path.abspath(final))
        self._partial = self._final.with_name(f".{self._final.name}.partial-{token}")
        self._lock: int | None = None

    def check_free(self) -> None:
        """Raise FileExistsError if something is there already; rank 0."""
        if os.path.lexists(self._final):
            raise FileExistsError(f"{self.where} exists already; save under another name, or remove it first")

    def begin(self, files: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        """Make the files with what they begin with; rank 0."""
        _make_parents(self._final.parent)
        # Whoever clears has the parent's lock, so it never sees a directory that is not locked yet.
        guard = _locked(self._final.parent, wait=True)
        try:
            _clear(self._final.parent)
            self._partial.mkdir()
            self._lock = _locked(self._partial)
        finally:
            if guard is not None:
                os.close(guard)
        for name, data in files.items():
            path = self._partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_file(path, data, sizes[name])

    def write(self, rank: int, mine: Mapping[str, Any], entries: Mapping[str, Entry], verify: bool) -> Written:
        """Write this rank's tensors at their places, durably, and read them again."""
        found = Written()
        by_file: dict[str, list[str]] = {}
        for key in mine:
            by_file.setdefault(entries[key].pieces[0].file, []).append(key)
        for name, keys in by_file.items():
            path = self._partial / name
            descriptor = os.open(path, os.O_RDWR)
            try:
                for key in keys:
                    begin, tensor = mine[key]
                    data = as_bytes(tensor)
                    with _named(path, key):
                        checksum = _write_at(descriptor, entries[key].pieces[0].begin + begin, data)
                    found.parts[key] = begin, begin + len(data), checksum
                with _named(path):
                    os.fsync(descriptor)
                if verify:
                    for key in keys:
                        _verify(descriptor, entries[key].pieces[0].begin, found.parts[key], path, key)
            finally:
                os.close(descriptor)
        return found

    def publish(self, manifest: bytes) -> None:
        """Make it a checkpoint; rank 0."""
        _write_file(self._partial / MANIFEST, manifest)
        for folder in {self._partial, *(path for path in self._partial.rglob("*") if path.is_dir())}:
            sync(folder)
        self.check_free()
        try:
            os.rename(self._partial, self._final)
        except OSError as error:
            if self._final.exists():
                raise FileExistsError(
                    f"{self.where} was made by somebody else meanwhile; nothing was changed"
                ) from error
            raise
        sync(self._final.parent)

    def abandon(self) -> None:
        """Remove everything; rank 0."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self.end()

    def end(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make_parents(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        text = f"cannot make {directory}: it, or a part of its path, is a file; choose another place"
        raise NotADirectoryError(text) from error


def _write_file(path: Path, data: bytes, size: int = 0) -> None:
    """A new file with ``data`` at its beginning, ``size`` bytes long if that is more, on disk."""
    with _named(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write_at(descriptor, 0, memoryview(data))
            if size > len(data):
                os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a checkpoint: one renaming, and it is none any more; what may be left, the next save clears."""
    left = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        os.rename(path, left)
    except FileNotFoundError:
        return
    shutil.rmtree(left, ignore_errors=True)


def _locked(directory: Path, wait: bool = False) -> int | None:
    """A lock on ``directory``, held until the descriptor is closed or its process dies; None where there is none."""
    if fcntl is None:
        return None
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _clear(parent: Path) -> None:
    """Remove what saves of processes that died have left."""
    for path in parent.iterdir():
        if _LEFT.fullmatch(path.name) is None or not path.is_dir() or path.is_symlink():
            continue
        with contextlib.suppress(OSError):
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _write_at(descriptor: int, at: int, data: memoryview) -> int:
    checksum = 0
    for begin in range(0, len(data), BLOCK):
        block = data[begin : begin + BLOCK]
        checksum = crc32(block, checksum)
        while block:
            count = os.pwrite(descriptor, block, at)
            at, block = at + count, block[count:]
    return checksum


def _verify(descriptor: int, start: int, part: tuple[int, int, int], path: Path, key: str) -> None:
    begin, end, expected = part
    if hasattr(os, "posix_fadvise"):  # from the disk, not from the cache
        os.posix_fadvise(descriptor, start + begin, end - begin, os.POSIX_FADV_DONTNEED)
    checksum = 0
    buffer = bytearray(min(BLOCK, end - begin))
    for at in range(begin, end, BLOCK):
        view = memoryview(buffer)[: min(BLOCK, end - at)]
        got = os.preadv(descriptor, [view], start + at)
        checksum = crc32(view[:got], checksum)
    if checksum != expected:
        raise OSError(f"{path.name} does not hold what was written to it: {key!r} reads differently; look at the disk")


@contextlib.contextmanager
def _named(path: Path | str, key: str | None = None) -> Iterator[None]:
    """Errors of the system, with what they are about."""
    try:
        yield
    except OSError as error:
        folder, _, name = str(path).rpartition("/")
        what = f"{name}, tensor {key!r}" if key else name
        raise OSError(error.errno, f"{error.strerror or error} (writing {what})", folder) from error


def sync(path: Path) -> None:
    """What is in a file or a directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteTarget:
    """A directory of an fsspec file system."""

    positioned = False

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        self._fs, self._root = file_system(url)

    def check_free(self) -> None:
        """Raise FileExistsError if something is there already; rank 0."""
        if not self._fs.exists(self._root) or not self._fs.find(self._root):
            return
        if self._fs.exists(f"{self._root}/{MANIFEST}") or not self._fs.exists(f"{self._root}/{_BEGUN}"):
            raise FileExistsError(f"{self.where} exists already; save under another name, or remove it first")
        self._fs.rm(self._root, recursive=True)  # of a save that came to no end

    def begin(self, files: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        """Put the files that hold no tensors; rank 0."""
        self._fs.makedirs(self._root, exist_ok=True)
        for name, data in {_BEGUN: b"", **files}.items():
            self._fs.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
            with _named(f"{self.where}/{name}"):
                self._fs.pipe_file(f"{self._root}/{name}", data)

    def write(self, rank: int, mine: Mapping[str, Any], entries: Mapping[str, Entry], verify: bool) -> Written:
        """Write this rank's tensors into a file of its own, and fetch them again."""
        found = Written()
        if not mine:
            return found
        file = f"rank-{rank:05d}.safetensors"
        listed = []
        for key, (_, tensor) in mine.items():
            data = as_bytes(tensor)
            rows = entries[key].shape
            width = entries[key].nbytes // rows[0] if rows and rows[0] else 0
            shape = (len(data) // width, *rows[1:]) if width else tuple(rows)
            listed.append((key, entries[key].dtype, shape))
        header, slots = tensorfile.layout(listed, marked=True)
        with _named(f"{self.where}/{file}", next(iter(mine))), self._fs.open(f"{self._root}/{file}", "wb") as stream:
            stream.write(header)
            for key, slot in sorted(slots.items(), key=lambda each: each[1].begin):
                begin, tensor = mine[key]
                data = as_bytes(tensor)
                for at in range(0, len(data), BLOCK):
                    stream.write(data[at : at + BLOCK])
                found.parts[key] = begin, begin + len(data), crc32(data)
                found.pieces[key] = Piece(file, slot.begin, slot.end)
        size = max(slot.end for slot in slots.values())
        found.files[file] = FileRecord.of(header, True)
        found.files[file].size = size
        if verify:
            self._verify(file, found)
        return found

    def _verify(self, file: str, found: Written) -> None:
        with self._fs.open(f"{self._root}/{file}", "rb") as stream:
            for key, piece in found.pieces.items():
                stream.seek(piece.begin)
                checksum = 0
                for at in range(piece.begin, piece.end, BLOCK):
                    checksum = crc32(memoryview(stream.read(min(BLOCK, piece.end - at))), checksum)
                if checksum != found.parts[key][2]:
                    raise OSError(
                        f"{self.where}/{file} does not hold what was written to it: {key!r} reads differently"
                    )

    def publish(self, manifest: bytes) -> None:
        """Make it a checkpoint; rank 0."""
        with _named(f"{self.where}/{MANIFEST}"):
            self._fs.pipe_file(f"{self._root}/{MANIFEST}", manifest)
            self._fs.rm_file(f"{self._root}/{_BEGUN}")

    def abandon(self) -> None:
        """Remove everything; rank 0."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._root, recursive=True)

    def end(self) -> None:
        """Nothing is held."""
