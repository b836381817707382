"""The safetensors format: dtypes, checksums, tensors and their byte ranges, headers.

- Not the ``safetensors`` package: it wants all tensors of a file in one process, and here each rank writes its own
  byte ranges of the same file.
- A header read from a file is not trusted: lengths, dtypes, shapes and ranges must agree with each other and the file.
- Checksums are CRC-32 (ISO 3309, that of zlib): those of pieces combine into that of the whole tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from zlib_ng import zlib_ng

from trueshard.plans import SHORT_DTYPES

BLOCK = 8 << 20  # bytes read, written or checksummed at once; the interpreter's lock is free meanwhile
_CODES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64", "bool": "BOOL"}
_CODES |= {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
_CODES |= {f"{sign}int{bits}": f"{sign or 'i'}{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)}
_NAMES = {code: name for name, code in _CODES.items()}
_MARK = {"trueshard": "checkpoint"}  # header metadata of a checkpoint's files: a manifest belongs to them
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors package


def crc32(data: memoryview, value: int = 0) -> int:
    """Return the checksum of ``data``, continuing from ``value``."""
    for at in range(0, len(data), BLOCK):
        value = zlib_ng.crc32(data[at : at + BLOCK], value)
    return value


def crc32_joined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of consecutive pieces, given as (checksum, bytes)."""
    value = 0
    for checksum, length in parts:
        value = zlib_ng.crc32_combine(value, checksum, length)
    return int(value)


def find_dtype(name: object) -> torch.dtype | None:
    """Return the dtype of ``"float32"``, ``"torch.float32"`` or ``"fp32"``; None if there is none."""
    found = getattr(torch, SHORT_DTYPES.get(name, name).removeprefix("torch."), None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that ``dtype_name`` names."""
    found: torch.dtype = getattr(torch, name)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Piece:
    """Bytes ``begin`` to ``end`` of a file, which hold some rows of a tensor."""

    file: str
    begin: int
    end: int


@dataclass
class TensorEntry:
    """A stored tensor."""

    names: list[str]  # names in the model or optimizer; a tied tensor has several
    shape: list[int]
    dtype: str
    trainable: bool | None = None  # None if not a parameter
    crc32: int | None = None  # None if unknown: another program's files
    pieces: list[Piece] = field(default_factory=list)  # in row order

    @classmethod
    def of(cls, tensor: torch.Tensor, names: list[str], trainable: bool | None = None) -> TensorEntry:
        """Describe a tensor that is not in a file yet."""
        return cls(names, list(tensor.shape), dtype_name(tensor.dtype), trainable)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def files(self) -> list[str]:
        """Names of the files that hold it."""
        return list(dict.fromkeys(piece.file for piece in self.pieces))

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Make a tensor of this shape and dtype, uninitialised."""
        return torch.empty(self.shape, dtype=dtype_of(self.dtype), device=device)


def make_header(entries: Mapping[str, TensorEntry], *, marked: bool) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return a file's header, and the byte range of each of ``entries``; ``marked``: it belongs to a checkpoint."""
    ranges: dict[str, tuple[int, int]] = {}
    at = 0
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(_MARK if marked else {})}}
    for key, entry in sorted(entries.items(), key=lambda each: -each[1].itemsize):  # so that all are aligned
        code, shape = _CODES.get(entry.dtype), list(entry.shape)
        if code is None:  # unknown to safetensors: stored as bytes
            code, shape = "U8", [*shape, entry.itemsize]
        ranges[key] = at, at + entry.nbytes
        table[key] = {"dtype": code, "shape": shape, "data_offsets": list(ranges[key])}
        at += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {key: (start + a, start + b) for key, (a, b) in ranges.items()}


def header_length(first: bytes, size: int, where: str) -> int:
    """Return the bytes of a header, with the length field, from the first eight of a file of ``size`` bytes."""
    if len(first) < 8:
        raise ValueError(f"{where} is cut short: {size} bytes, where a safetensors file begins with 8")
    (length,) = struct.unpack("<Q", first)
    if length > _LONGEST_HEADER or 8 + length > size:
        raise ValueError(f"{where} is damaged: its header claims {length} bytes of a file of {size}")
    return int(8 + length)


def parse_header(header: bytes, size: int, file: str, where: str) -> dict[str, TensorEntry]:
    """Read the tensors of ``file``, of ``size`` bytes, by key; ``where``: its path, for messages."""
    entries: dict[str, TensorEntry] = {}
    for key, each in parse_json(header[8:], f"{where} (its header)").items():
        if key == "__metadata__":
            continue
        known = each if isinstance(each, dict) else {}
        shape, offsets, code = known.get("shape"), known.get("data_offsets"), known.get("dtype")
        if not (_is_whole(shape) and _is_whole(offsets) and isinstance(code, str) and len(offsets) == 2):
            raise ValueError(f"{where} is damaged: {key!r} has shape {shape!r}, dtype {code!r}, range {offsets!r}")
        if code not in _NAMES:
            raise ValueError(f"{where}: {key!r} has dtype {code}, which this version does not know")
        begin, end = offsets
        entries[key] = TensorEntry([key], shape, _NAMES[code])
        entries[key].pieces = [Piece(file, len(header) + begin, len(header) + end)]
        if end - begin != entries[key].nbytes:
            raise ValueError(f"{where} is damaged: {key!r} of shape {shape} and dtype {code} has {end - begin} bytes")
    check_ranges({key: each.pieces[0] for key, each in entries.items()}, len(header), size, where)
    return entries


def is_marked(header: bytes) -> bool:
    """True if a valid header is that of a checkpoint's file."""
    metadata = json.loads(header[8:]).get("__metadata__")
    return isinstance(metadata, dict) and _MARK.items() <= metadata.items()


def _is_whole(value: Any) -> TypeGuard[list[int]]:
    """True if ``value`` is a list of integers of at least 0."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def check_ranges(pieces: Mapping[str, Piece], start: int, size: int, where: str) -> None:
    """Raise ``ValueError`` unless ``pieces`` fill a file exactly, from byte ``start`` to ``size``."""
    ordered = sorted(pieces.items(), key=lambda each: (each[1].begin, each[1].end))
    for key, piece in ordered:
        if piece.end > size:
            raise ValueError(
                f"{where} is cut short: {key!r} lies at bytes {piece.begin} to {piece.end}, the file has {size}"
            )
    last, before = start, "its header"
    for key, piece in ordered:
        if piece.begin != last:
            what = "overlap" if piece.begin < last else "have nothing between them"
            raise ValueError(f"{where} is damaged: {before} and {key!r} {what} (bytes {piece.begin} and {last})")
        before, last = repr(key), piece.end
    if last != size:
        raise ValueError(f"{where} is longer than it should be: {before} ends at byte {last}, the file at {size}")


def parse_json(data: bytes | memoryview, where: str) -> dict[str, Any]:
    """Parse a JSON object in UTF-8, of any origin."""
    try:
        table = json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # too many digits or brackets, or no text
        raise ValueError(f"{where} is damaged: it does not read as JSON ({str(error)[:200]})") from None
    if not isinstance(table, dict):
        raise ValueError(f"{where} is damaged: it is no JSON object")
    return table
