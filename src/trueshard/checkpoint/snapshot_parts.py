"""One rank's part of a snapshot: a file of tensors in the memory of its host, and a record that says what it holds.

``[Note: Whole or not at all]`` A part lies in one of two slots, which are written in turn: ``slot-1/rank-00003`` has
the bytes, ``slot-1/rank-00003.json`` the record: step, checksum, and all that is no tensor. The record is removed
before the first byte of a slot changes and gets its name after the last one, so a process that dies in between leaves
no part there, and that of the other slot. A slot is written again only when every rank has its part of the other one.

The files belong to no process. A map of them is kept between snapshots, since making one touches every page.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trueshard.checkpoint.format import BLOCK, aligned, crc32, dtype_name, dtype_of
from trueshard.files import replace_text
from trueshard.model.regions import Region, extent

ROOT = "TRUESHARD_MEMORY"
"""Environment variable: another folder than /dev/shm under which runs keep their snapshots."""
SLOTS = 2
_RECORD = re.compile(r"rank-\d{5}\.json")


def folder_of(run: str | os.PathLike[str]) -> Path:
    """Return the folder in this host's memory for the snapshots of a run, by its name and this user. It may be missing.

    Without a file system in memory it is one on disk.
    """
    place = Path("/dev/shm")
    root = Path(os.environ.get(ROOT) or (place if place.is_dir() else tempfile.gettempdir()))
    digest = hashlib.sha256(os.path.abspath(run).encode()).hexdigest()[:16]
    return root / f"trueshard-{os.getuid()}-{digest}"


def folders_of(run: str | os.PathLike[str], fallback: str | os.PathLike[str] | None) -> list[Path]:
    """Return the folders in which parts of a run may be: in memory, and on the disk if there is a ``fallback``."""
    return [folder_of(run)] + ([Path(fallback)] if fallback is not None else [])


def name_of(rank: int) -> str:
    """Return the name of a rank's file in a slot."""
    return f"rank-{rank:05d}"


def make_private(folder: Path) -> None:
    """Make a folder that no other user can look into. Raises PermissionError if somebody else has made it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone (mode 0700); remove it")


@dataclass(frozen=True)
class Placed:
    """Tensor of a part: where its bytes are, and which indices of the whole tensor they are."""

    begin: int
    dtype: str
    region: Region

    @property
    def nbytes(self) -> int:
        return math.prod(extent(self.region)) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Part:
    """Content of a record, and its place."""

    folder: Path
    """The slot."""
    made_by: str
    """Word that the ranks which made a snapshot together share, and those of no other start."""
    step: int
    slot: int
    rank: int
    ranks: int
    size: int
    checksum: int
    layout: int
    """Checksum of the regions of the model's tensors: equal where a rank is to hold the same again."""
    tensors: Mapping[str, Placed]
    content: Mapping[str, Any]
    """All that is no tensor and may differ from step to step, as ``Snapshots`` has given it."""
    lasting: Mapping[str, Any]
    """All that follows from which tensors there are."""
    text: str
    """The record itself, which can be sent to another host."""

    @property
    def name(self) -> str:
        """Name of the file with the bytes."""
        return name_of(self.rank)

    @classmethod
    def parse(cls, folder: Path, text: str) -> Part | None:
        """Return the part of a record; None if it is not whole, or of another version."""
        try:
            record = json.loads(text)
            tensors = {key: _placed(*values) for key, values in record.pop("tensors").items()}
            return cls(folder=folder, tensors=tensors, text=text, **record)
        except (ValueError, TypeError, LookupError, AttributeError):
            return None

    def mapped(self) -> torch.Tensor:
        """Return the bytes, as they are in memory: uint8 ``(size,)``."""
        with (self.folder / self.name).open("rb") as file:
            data = mmap.mmap(file.fileno(), max(self.size, 1), access=mmap.ACCESS_COPY)  # torch wants it writable
        return torch.frombuffer(data, dtype=torch.uint8)[: self.size]

    def is_intact(self) -> bool:
        """Return whether the bytes have the checksum of the record."""
        try:
            return checksum_of(self.mapped()) == self.checksum
        except (OSError, ValueError):  # gone, or shorter
            return False


def _placed(begin: int, dtype: str, region: Any) -> Placed:
    return Placed(begin, dtype, tuple(tuple((first, last) for first, last in runs) for runs in region))


def lasting_text(tensors: Mapping[str, Placed], lasting: Mapping[str, Any]) -> str:
    """Return the end of a record, the same for as long as tensors have the same places."""
    table = {key: (placed.begin, placed.dtype, placed.region) for key, placed in tensors.items()}
    return json.dumps({"tensors": table, "lasting": lasting})[1:]


def record_of(about: Mapping[str, Any], checksum: int, end: str) -> str:
    """Return a record as text, which ``Part.parse`` reads; ``about``: its other attributes, ``end``: `lasting_text`."""
    return f"{json.dumps({**about, 'checksum': checksum})[:-1]}, {end}"


def checksum_of(data: torch.Tensor, value: int = 0) -> int:
    """Return the CRC-32 of bytes after others, whose own is ``value``, block by block: in between, threads may run."""
    for block in data.split(BLOCK):
        value = crc32(memoryview(block.numpy()), value)
    return value


def parts_in(folder: Path) -> list[Part]:
    """Return the parts that have a record, in all slots of a folder; their bytes are not read."""
    result = []
    for slot in range(SLOTS):
        place = folder / f"slot-{slot}"
        for name in sorted(os.listdir(place)) if place.is_dir() else ():
            if _RECORD.fullmatch(name):
                with contextlib.suppress(OSError, UnicodeDecodeError):  # removed in the meantime
                    text = (place / name).read_text(encoding="utf-8")
                    if (part := Part.parse(place, text)) is not None:
                        result.append(part)
    return result


class Slot:
    """The file of one rank in one slot, mapped for writing."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.name = folder, name_of(rank)
        self._record = folder / f"{self.name}.json"
        self._data = torch.empty(0, dtype=torch.uint8)
        self.frozen: tuple[list[Any], int] = [], 0
        """Places and bits of the frozen tensors that it begins with, and the checksum of all their bytes."""

    def open(self, size: int) -> torch.Tensor:
        """Take the part that is there away, and return memory for another: uint8 ``(size,)``.

        Raises OSError if there is no room for it.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._record.unlink(missing_ok=True)
        if len(self._data) < size:
            self._data, self.frozen = torch.empty(0, dtype=torch.uint8), ([], 0)  # else memory would be needed for two
            path = self.folder / self.name
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                # Writing to a map of a file system that is full would end the process; so all is taken beforehand.
                os.posix_fallocate(descriptor, 0, max(size, 1))
                self._data = torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(descriptor)
        return self._data[:size]

    def publish(self, text: str) -> None:
        """Give the part its record: from here on it is there."""
        replace_text(self._record, text)


def clear(folder: Path, ranks: Collection[int] | None = None) -> None:
    """Remove a folder with all of its parts; or, of the parts, those of ranks that are not among ``ranks``."""
    if ranks is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    kept = set(map(name_of, ranks))
    for file in folder.glob("slot-*/rank-*"):
        if file.stem not in kept:
            file.unlink(missing_ok=True)


def place(locals_of: Mapping[str, torch.Tensor], regions: Mapping[str, Region]) -> tuple[dict[str, Placed], int]:
    """Return where the local part of each tensor, in its region, goes in a file, and the size of the file."""
    result: dict[str, Placed] = {}
    size = 0
    for key, local in locals_of.items():
        result[key] = Placed(size, dtype_name(local.dtype), regions[key])
        size += aligned(local.nbytes)
    return result, size


def view_of(data: torch.Tensor, placed: Placed) -> torch.Tensor:
    """Return a tensor over its bytes in a part, of the shape of its region."""
    part = data[placed.begin : placed.begin + placed.nbytes]
    return part.view(dtype_of(placed.dtype)).view(extent(placed.region))
