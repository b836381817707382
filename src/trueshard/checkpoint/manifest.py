"""The manifest of a checkpoint: everything but the tensors' bytes, as JSON, and where those bytes are.

- A tensor is listed once, with every name it has, and lies in one piece or, where a store cannot write at a place of
  its choice, in one piece a rank, in the order of its rows. Its checksum is that of all its bytes together.
- The first line holds the checksum of all that follows, so a flipped bit in the manifest is seen too.
- What is read is not trusted: files must lie in the directory, ranges in their files, and neither may contradict shape
  and dtype.

``docs/checkpoint-format.md`` describes the format to others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from trueshard.checkpoint import structure, tensorfile
from trueshard.checkpoint.checksum import crc32

MANIFEST = "manifest.json"
FORMAT = 2
_FIRST_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')


@dataclass(frozen=True)
class Piece:
    """Bytes ``begin`` to ``end`` of a file: some rows of a tensor."""

    file: str
    begin: int
    end: int


@dataclass
class Entry:
    """One tensor."""

    names: list[str]
    """What the model or optimizer calls it; a tie has several."""
    shape: list[int]
    dtype: str
    trainable: bool | None = None
    """None for what is no parameter."""
    crc32: int | None = None
    """None: not known (an older format, or another program's files)."""
    pieces: list[Piece] = field(default_factory=list)
    """In the order of rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * tensorfile.size_of(self.dtype)


@dataclass
class FileRecord:
    """A file of the checkpoint: its size, and a checksum of the bytes that belong to no tensor (all, if none does)."""

    size: int
    """bytes"""
    crc32: int
    header: int | None = None
    """Bytes of the header of a safetensors file."""

    @classmethod
    def of(cls, data: bytes, is_header: bool) -> FileRecord:
        """Of a whole file, or of one that begins with ``data``."""
        return cls(len(data), crc32(memoryview(data)), len(data) if is_header else None)


@dataclass
class Manifest:
    """Everything of a checkpoint but the tensors' bytes."""

    tensors: dict[str, Entry] = field(default_factory=dict)
    """By path: ``model/<name>``, ``optimizer/<parameter>/<state>``, ``more/<path>``, ``rng/<rank>/<generator>``."""
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    rng: list[Any] = field(default_factory=list)
    """One a rank."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    """When, by what, and from how many ranks it was written."""
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """The file."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)[2:].encode()
        return b'{"crc32": "%08x",\n' % crc32(memoryview(text)) + text

    @classmethod
    def of(cls, table: Mapping[str, Any], data: bytes, where: str) -> Manifest:
        """The inverse of ``to_bytes``; ``manifest_of`` calls it.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is damaged.
        """
        first = _FIRST_LINE.match(data)
        if first is None or int(first[1], 16) != crc32(memoryview(data)[first.end() :]):
            raise ValueError(f"{where} is damaged: its checksum does not fit; use an earlier checkpoint")
        return cls(
            {key: _entry(key, each) for key, each in table["tensors"].items()},
            _table(table["models"]),
            _table(table["optimizers"]),
            _table(table["more"]),
            list(table["rng"]),
            {name: FileRecord(**each) for name, each in table["files"].items()},
            _table(table["about"]),
        )

    def validate(self, where: str) -> None:
        """Raise ``ValueError`` where entries, files and ranges contradict one another, or values have no known form."""
        for name, record in self.files.items():
            check_name(name, where)
            if not all(type(n) is int and n >= 0 for n in (record.size, record.crc32, record.header or 0)):
                raise ValueError(f"{where} is damaged: of {name!r} it says {record}")
        ranges: dict[str, dict[str, tuple[int, int]]] = {}
        for key, entry in self.tensors.items():
            if not tensorfile.is_whole(entry.shape) or not isinstance(
                getattr(torch, str(entry.dtype), None), torch.dtype
            ):
                raise ValueError(f"{where} is damaged: {key!r} has shape {entry.shape!r}, dtype {entry.dtype!r}")
            for i, piece in enumerate(entry.pieces):
                if piece.file not in self.files:
                    raise ValueError(f"{where} is damaged: {key!r} is in {piece.file!r}, which is not listed")
                if not tensorfile.is_whole([piece.begin, piece.end]) or piece.begin > piece.end:
                    raise ValueError(f"{where} is damaged: {key!r} has the range {piece.begin} to {piece.end}")
                ranges.setdefault(piece.file, {})[f"{key}#{i}" if i else key] = piece.begin, piece.end
            if sum(piece.end - piece.begin for piece in entry.pieces) != entry.nbytes:
                raise ValueError(f"{where} is damaged: the ranges of {key!r} do not hold its shape {entry.shape}")
        try:
            structure.check(vars(self), self.tensors, where)
        except RecursionError:
            raise ValueError(f"{where} is damaged: its values are nested too deep") from None
        for file, each in ranges.items():
            record = self.files[file]
            tensorfile.check_ranges(each, record.header or 0, record.size, f"{where}: {file}")


def check_name(name: str, where: str) -> None:
    """Raise ``ValueError`` unless ``name`` is a plain path inside the checkpoint."""
    parts = name.split("/")
    if not all(parts) or any(part in (".", "..") for part in parts) or "\\" in name or ":" in name or "\0" in name:
        raise ValueError(f"{where} names {name!r}, which is outside the checkpoint; it was not opened")


def _entry(key: str, each: Mapping[str, Any]) -> Entry:
    pieces = [Piece(**piece) for piece in each["pieces"]]
    names, shape, crc = list(each["names"]), each["shape"], each["crc32"]
    if not isinstance(each["dtype"], str) or not (crc is None or type(crc) is int):
        raise TypeError(f"{key!r} has dtype {each['dtype']!r}, checksum {crc!r}")
    trainable = each["trainable"]
    if not (trainable is None or type(trainable) is bool) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{key!r} has names {names!r}, trainable {trainable!r}")
    if not all(isinstance(piece.file, str) for piece in pieces):
        raise TypeError(f"{key!r} is in a file whose name is no text")
    return Entry(names, shape, each["dtype"], trainable, crc, pieces)


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} where a table belongs")
    return value
