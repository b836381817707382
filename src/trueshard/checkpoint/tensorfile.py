"""The bytes of a safetensors file: its header, made and read. Tensors are written and read elsewhere, by byte range.

- Written by hand rather than by the ``safetensors`` package, since that wants a file's tensors all in one process, and
  here each rank writes its own ranges.
- A header that is read is not trusted: lengths, dtypes, shapes and ranges must fit one another and the file, and ranges
  must neither overlap nor leave holes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from trueshard.checkpoint.jsontext import table_of

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}
MARK = {"trueshard": "checkpoint"}
"""In the metadata of a checkpoint's files: a manifest belongs to them."""
_LONGEST_HEADER = 100_000_000
"""bytes; what the safetensors package accepts"""


@dataclass(frozen=True)
class Slot:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""
    begin: int
    end: int
    """Bytes, from the beginning of the file."""


def size_of(dtype: str) -> int:
    """Bytes of an element."""
    return int(getattr(torch, dtype).itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def is_storable(dtype: str) -> bool:
    """Whether safetensors knows the dtype; others are stored as bytes, with one more dimension."""
    return dtype in _CODES


def layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, marked: bool) -> tuple[bytes, dict[str, Slot]]:
    """The header of a file for tensors (key, dtype, shape), and where each lies.

    The widest dtype comes first, so that each tensor is aligned to its elements; otherwise the order is kept.
    ``marked``: the file is a part of a checkpoint, and without its manifest it is not whole.
    """
    slots: dict[str, Slot] = {}
    at = 0
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(MARK if marked else {})}}
    for key, dtype, shape in sorted(tensors, key=lambda each: -size_of(each[1])):
        end = at + math.prod(shape) * size_of(dtype)
        slots[key] = Slot(shape, dtype, at, end)
        known = is_storable(dtype)
        listed = [*shape] if known else [*shape, size_of(dtype)]
        table[key] = {"dtype": _CODES[dtype] if known else "U8", "shape": listed, "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    moved = {key: Slot(s.shape, s.dtype, start + s.begin, start + s.end) for key, s in slots.items()}
    return struct.pack("<Q", len(text)) + text, moved


def header_length(first: bytes, size: int, file: str) -> int:
    """Bytes of the header, its own length included, from the first eight bytes of a file of ``size`` bytes.

    Raises:
        ValueError: the file is shorter than that says.
    """
    if len(first) < 8:
        raise ValueError(f"{file} is cut short: {size} bytes, where a safetensors file begins with 8")
    (length,) = struct.unpack("<Q", first)
    if length > _LONGEST_HEADER or 8 + length > size:
        raise ValueError(f"{file} is damaged: its header claims {length} bytes of a file of {size}")
    return int(8 + length)


def parse(header: bytes, size: int, file: str) -> dict[str, Slot]:
    """The tensors of a file of ``size`` bytes, by key.

    Raises:
        ValueError: the header contradicts itself or the file; the message names the tensor.
    """
    table = table_of(header[8:], f"{file} (its header)")
    slots = {key: _slot(key, each, len(header), file) for key, each in table.items() if key != "__metadata__"}
    check_ranges({key: (slot.begin, slot.end) for key, slot in slots.items()}, len(header), size, file)
    return slots


def is_marked(header: bytes) -> bool:
    """Whether a header that was parsed is that of a checkpoint's file."""
    metadata = json.loads(header[8:]).get("__metadata__")
    return isinstance(metadata, dict) and MARK.items() <= metadata.items()


def _slot(key: str, each: Any, start: int, file: str) -> Slot:
    known = each if isinstance(each, dict) else {}
    shape, offsets, code = known.get("shape"), known.get("data_offsets"), known.get("dtype")
    if not (is_whole(shape) and is_whole(offsets) and isinstance(code, str) and len(offsets) == 2):
        raise ValueError(f"{file} is damaged: {key!r} has shape {shape!r}, dtype {code!r}, range {offsets!r}")
    if code not in _NAMES:
        raise ValueError(f"{file}: {key!r} has dtype {code}, which this version does not know")
    begin, end = offsets
    if end - begin != math.prod(shape) * size_of(_NAMES[code]):
        raise ValueError(f"{file} is damaged: {key!r} of shape {shape} and dtype {code} has {end - begin} bytes")
    return Slot(tuple(shape), _NAMES[code], start + begin, start + end)


def is_whole(value: Any) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of whole numbers, none below 0."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def check_ranges(ranges: Mapping[str, tuple[int, int]], start: int, size: int, file: str) -> None:
    """Raise ``ValueError`` unless ``ranges`` (key → begin, end) fill a file from ``start`` to ``size``, each once."""
    ordered = sorted(ranges.items(), key=lambda each: each[1])
    for key, (begin, end) in ordered:
        if end > size:
            raise ValueError(f"{file} is cut short: {key!r} lies at bytes {begin} to {end}, the file has {size}")
    last = start
    before = "its header"
    for key, (begin, end) in ordered:
        if begin != last:
            what = "overlap" if begin < last else "have nothing between them"
            raise ValueError(f"{file} is damaged: {before} and {key!r} {what} (bytes {begin} and {last})")
        before, last = repr(key), end
    if last != size:
        raise ValueError(f"{file} is longer than it should be: {before} ends at byte {last}, the file at {size}")
