"""The format: safetensors files, and a manifest of everything but the tensors' bytes, as JSON.

- ``docs/checkpoint-format.md`` describes it. What is read from a file is not trusted: headers and manifests must have
  the form that ``save`` writes, and lengths, dtypes, shapes and ranges must agree with each other and the files.
- Not the ``safetensors`` package: it wants all tensors of a file in one process, and here each rank writes its own
  byte ranges of the same file.
- Checksums are CRC-32 (ISO 3309, that of zlib): those of pieces combine into that of the whole tensor.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from zlib_ng.zlib_ng import crc32, crc32_combine

from trueshard.plans import SHORT_DTYPES

MANIFEST = "manifest.json"
FORMAT = 2
_FIRST_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
BLOCK = 8 << 20  # bytes read or written at once
_CODES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64", "bool": "BOOL"}
_CODES |= {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
_CODES |= {f"{sign}int{bits}": f"{sign or 'i'}{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)}
_NAMES = {code: name for name, code in _CODES.items()}
_MARK = {"trueshard": "checkpoint"}  # header metadata of a checkpoint's files: a manifest belongs to them
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors package


def aligned(nbytes: int) -> int:
    """Return bytes rounded up to a multiple of 64, at which a tensor in shared memory may begin."""
    return -(-nbytes // 64) * 64


def crc32_joined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of consecutive pieces, given as (checksum, bytes)."""
    value = 0
    for checksum, length in parts:
        value = crc32_combine(value, checksum, length)
    return value


def find_dtype(name: object) -> torch.dtype | None:
    """Return the dtype of ``"float32"``, ``"torch.float32"`` or ``"fp32"``; None if there is none."""
    full_name = SHORT_DTYPES.get(name, name).removeprefix("torch.") if isinstance(name, str) else ""
    dtype = getattr(torch, full_name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that the option ``dtype`` names, or None; raise ``ValueError`` unless it is floating-point."""
    result = dtype if isinstance(dtype, torch.dtype) else find_dtype(dtype)
    if dtype is not None and not (result is not None and result.is_floating_point):
        raise ValueError(f"dtype={dtype!r}: it is a floating-point dtype, such as bfloat16, float16 or float32")
    return result


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


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
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(piece.file for piece in self.pieces))

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.empty(self.shape, dtype=dtype_of(self.dtype), device=device)


def make_header(entries: Mapping[str, TensorEntry], *, marked: bool) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return a file's header, and the byte range of each of ``entries``; ``marked``: it belongs to a checkpoint."""
    ranges: dict[str, tuple[int, int]] = {}
    at = 0
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(_MARK if marked else {})}}
    for key, entry in sorted(entries.items(), key=lambda item: -item[1].itemsize):  # so that all are aligned
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
    for key, record in parse_json(header[8:], f"{where} (its header)").items():
        if key == "__metadata__":
            continue
        fields_of: Any = record if isinstance(record, dict) else {}
        shape, offsets, code = (fields_of.get(name) for name in _HEADER)
        if any(_misfits(record, _HEADER, "")) or len(offsets) != 2:
            raise ValueError(f"{where} is damaged: {key!r} has shape {shape!r}, dtype {code!r}, range {offsets!r}")
        if code not in _NAMES:
            raise ValueError(f"{where}: {key!r} has dtype {code}, which this version does not know")
        begin, end = offsets
        pieces = [Piece(file, len(header) + begin, len(header) + end)]
        entries[key] = TensorEntry([key], shape, _NAMES[code], pieces=pieces)
        if end - begin != entries[key].nbytes:
            raise ValueError(f"{where} is damaged: {key!r} of shape {shape} and dtype {code} has {end - begin} bytes")
    check_ranges({key: entry.pieces[0] for key, entry in entries.items()}, len(header), size, where)
    return entries


def is_marked(header: bytes) -> bool:
    """True if a valid header is that of a checkpoint's file."""
    metadata = json.loads(header[8:]).get("__metadata__")
    return isinstance(metadata, dict) and _MARK.items() <= metadata.items()


def check_ranges(pieces: Mapping[str, Piece], start: int, size: int, where: str) -> None:
    """Raise ``ValueError`` unless ``pieces`` fill a file exactly, from byte ``start`` to ``size``."""
    ordered = sorted(pieces.items(), key=lambda item: (item[1].begin, item[1].end))
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


@dataclass
class FileRecord:
    size: int  # bytes
    crc32: int  # checksum of the bytes that belong to no tensor: the header of a safetensors file, all of any other
    header: int | None = None  # bytes of the header of a safetensors file


@dataclass
class Manifest:
    """Everything of a checkpoint but the tensors' bytes."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)  # by key, as ``state`` makes it
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    rng: list[Any] = field(default_factory=list)  # for each rank, [generator, bytes] in turn
    files: dict[str, FileRecord] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # when it was written, by which versions, from how many ranks
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)[2:].encode()
        return b'{"crc32": "%08x",\n' % crc32(memoryview(text)) + text

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Read the content of the file, and check that it has the form and agrees with itself."""
        table = parse_json(data, where)
        version = table.get("format")
        if type(version) is not int or version < FORMAT:
            raise ValueError(f"{where} is damaged (format {version!r}); use an earlier checkpoint")
        if version > FORMAT:
            raise ValueError(f"{where}: format {version} is newer than format {FORMAT}; update trueshard")
        first = _FIRST_LINE.match(data)
        if first is None or int(first[1], 16) != crc32(memoryview(data)[first.end() :]):
            raise ValueError(f"{where} is damaged: its checksum does not fit; use an earlier checkpoint")
        try:
            for path, value in _misfits(table, _FORM, ""):
                raise ValueError(f"{where} is damaged: {path!r} is {str(value)[:80]!r}, which save() does not write")
            manifest: Manifest = _made(cls, table)
            manifest.tensors = {key: _made(TensorEntry, tensor) for key, tensor in table["tensors"].items()}
            for key, entry in manifest.tensors.items():
                entry.pieces = [_made(Piece, piece) for piece in table["tensors"][key]["pieces"]]
            manifest.files = {name: _made(FileRecord, file) for name, file in table["files"].items()}
            manifest._validate(where)
        except RecursionError:
            raise ValueError(f"{where} is damaged: its values are nested too deep") from None
        return manifest

    def _validate(self, where: str) -> None:
        """Raise ``ValueError`` where entries, files, ranges or references contradict each other."""
        for name in self.files:
            check_name(name, where)
        pieces: dict[str, dict[str, Piece]] = {}
        for key, entry in self.tensors.items():
            for i, piece in enumerate(entry.pieces):
                if piece.file not in self.files:
                    raise ValueError(f"{where} is damaged: {key!r} is in {piece.file!r}, which is not listed")
                if piece.begin > piece.end:
                    raise ValueError(f"{where} is damaged: {key!r} has the range {piece.begin} to {piece.end}")
                pieces.setdefault(piece.file, {})[f"{key}#{i}" if i else key] = piece
            if sum(piece.end - piece.begin for piece in entry.pieces) != entry.nbytes:
                raise ValueError(f"{where} is damaged: the ranges of {key!r} do not hold its shape {entry.shape}")
        for key in references([self.models, self.optimizers, self.more]):
            if key not in self.tensors:
                raise ValueError(f"{where} is damaged: it refers to the tensor {key!r}, which is not listed")
        for rank, parts in enumerate(self.rng):
            shape = self.tensors["rng"].shape if "rng" in self.tensors else []
            if shape[1:] != [sum(size for _, size in parts)] or rank >= shape[0]:
                raise ValueError(f"{where} is damaged: the random state of rank {rank} is {str(parts)[:80]!r}")
        for file, inside in pieces.items():
            check_ranges(inside, self.files[file].header or 0, self.files[file].size, f"{where}: {file}")


def check_name(name: str, where: str) -> None:
    """Raise ``ValueError`` unless ``name`` is a plain path inside the checkpoint."""
    parts = name.split("/")
    if not all(parts) or any(part in (".", "..") for part in parts) or "\\" in name or ":" in name or "\0" in name:
        raise ValueError(f"{where} names {name!r}, which is outside the checkpoint; it was not opened")


# Values as JSON, with references in the place of tensors.


def split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` as JSON; its tensors go to ``tensors``, and references stay in their place."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"__tensor__": path}
    if isinstance(value, torch.dtype):
        return {"__dtype__": dtype_name(value)}
    if hasattr(value, "state_dict") and callable(value.state_dict):
        return split(value.state_dict(), path, tensors)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"{path}: the key {key!r} is neither a string nor an integer")
        pairs = [[key, split(inner, f"{path}/{str(key).replace('/', '|')}", tensors)] for key, inner in value.items()]
        return {"__dict__": pairs}
    if isinstance(value, (tuple, list)) or type(value).__name__ == "deque":
        items = [split(inner, f"{path}/{i}", tensors) for i, inner in enumerate(value)]
        return {"__tuple__": items} if isinstance(value, tuple) else items
    if _is_plain(value):
        return value
    if isinstance(value, (bool, int, float, str)):  # a member of an enumeration, numpy's float64
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    raise TypeError(
        f"{path}: a {type(value).__name__} is neither a tensor nor a JSON value; give it a state_dict() or leave it out"
    )


def join(value: Any, tensor_of: Callable[[str], Any]) -> Any:
    """Invert ``split``; ``tensor_of`` gets the key of each tensor. What is of no form of its stays as it is."""
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensor_of(value["__tensor__"])
        if "__dtype__" in value:
            return dtype_of(value["__dtype__"])
        if "__tuple__" in value:
            return tuple(join(inner, tensor_of) for inner in value["__tuple__"])
        if "__dict__" in value:
            return {key: join(inner, tensor_of) for key, inner in value["__dict__"]}
    return [join(inner, tensor_of) for inner in value] if isinstance(value, list) else value


def located(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield (keys and indices that lead to it, key of the tensor) for each reference in split values."""
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list):
        inside = enumerate(value)
    elif isinstance(value, dict) and "__tensor__" in value:
        yield path, value["__tensor__"]
    elif isinstance(value, dict) and "__tuple__" in value:
        inside = enumerate(value["__tuple__"])
    elif isinstance(value, dict):
        inside = value["__dict__"] if "__dict__" in value else value.items()
    for key, inner in inside:
        yield from located(inner, (*path, key))


def references(value: Any) -> Iterator[str]:
    """Yield the keys of the tensors that split values refer to."""
    return (key for _, key in located(value))


def with_wrapped(optimizers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's records of optimizers and of those that they wrap, by key: ``optimizer/@1`` is wrapped."""
    result: dict[str, Any] = {}
    for key, record in optimizers.items():
        result |= {key: record} | {f"{key}/@{place}": inner for place, inner in record.get("wrapped", {}).items()}
    return result


# Forms: what each value of the file may be. A tuple of types; a predicate; [form of each item]; or {key: form}, where
# "*" stands for any key, and a key that ends in "?" may be absent.


def _made(cls: type, table: Mapping[str, Any]) -> Any:
    return cls(**{member.name: table[member.name] for member in fields(cls)})


def _misfits(value: Any, form: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of all that does not have its form; no number in a typed place may be below 0."""
    if isinstance(form, tuple):
        good = type(value) in form and not (type(value) is int and value < 0)
    elif callable(form):
        good = form(value)
    elif isinstance(form, list):
        good = isinstance(value, list)
    else:
        good = isinstance(value, dict) and all(key in value for key in form if key[-1] not in "*?")
    if not good:
        yield path, value
    elif isinstance(form, list):
        for i, inner in enumerate(value):
            yield from _misfits(inner, form[0], f"{path}/{i}")
    elif isinstance(form, dict):
        for key, form_inside in form.items():
            name = key.rstrip("?")
            for inside in value if key == "*" else [name] if name in value else []:
                yield from _misfits(value[inside], form_inside, f"{path}/{inside}".lstrip("/"))


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_dtype(value: Any) -> bool:
    dtype = find_dtype(value)
    return dtype is not None and dtype_name(dtype) == value


def _is_split(value: Any) -> bool:
    """True if ``split`` can have made it; where references lead is checked elsewhere."""
    if isinstance(value, list):
        return all(map(_is_split, value))
    if not isinstance(value, dict):
        return _is_plain(value)
    mark, inner = next(iter(value.items()), ("", None))
    if mark == "__dict__" and isinstance(inner, list):  # [key, value] pairs
        good = all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in inner)
        return good and len(value) == 1 and all(_is_split(pair[1]) for pair in inner)
    if mark == "__tuple__":
        good = isinstance(inner, list) and all(map(_is_split, inner))
    else:
        good = isinstance(inner, str) if mark == "__tensor__" else mark == "__dtype__" and _is_dtype(inner)
    return good and len(value) == 1


def _is_settings(value: Any) -> bool:
    return isinstance(value, dict) and "__dict__" in value and _is_split(value)


_TEXT, _COUNT, _COUNT_OR_NONE = (str,), (int,), (int, type(None))
_HEADER = {"shape": [_COUNT], "data_offsets": [_COUNT], "dtype": _TEXT}
_TENSOR = {
    "names": [_TEXT],
    "shape": [_COUNT],
    "dtype": _is_dtype,
    "trainable": (bool, type(None)),
    "crc32": _COUNT_OR_NONE,
    "pieces": [{"file": _TEXT, "begin": _COUNT, "end": _COUNT}],
}
_OPTIMIZER: dict[str, Any] = {
    "class": _TEXT,
    "groups": [{"params": [_TEXT], "settings": _is_settings}],
    "state": {"*": _is_split},
}
_OPTIMIZER["wrapped?"] = {"*": _OPTIMIZER}
_FORM = {
    "tensors": {"*": _TENSOR},
    "models": {"*": {"class": _TEXT, "extra": {"*": _is_split}}},
    "optimizers": {"*": _OPTIMIZER},
    "more": {"*": _is_split},
    "rng": [[lambda value: isinstance(value, list) and list(map(type, value)) == [str, int] and value[1] >= 0]],
    "files": {"*": {"size": _COUNT, "crc32": _COUNT, "header": _COUNT_OR_NONE}},
    "about": {},
}
