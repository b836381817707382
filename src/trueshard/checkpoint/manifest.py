"""The manifest of a checkpoint: everything but the tensors' bytes, as JSON, and where those bytes are.

``docs/checkpoint-format.md`` describes the format. A manifest read from a file is not trusted: every value must have
the form that ``save`` writes, files must lie in the directory, ranges in their files and fit shape and dtype.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from trueshard.checkpoint.tensorfile import (
    Piece,
    TensorEntry,
    check_ranges,
    crc32,
    dtype_name,
    dtype_of,
    find_dtype,
    parse_json,
)

MANIFEST = "manifest.json"
FORMAT = 2
_FIRST_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')


@dataclass
class FileRecord:
    """Size and checksum of a file."""

    size: int  # bytes
    crc32: int  # checksum of the bytes that belong to no tensor: the header of a safetensors file, all of any other
    header: int | None = None  # bytes of the header of a safetensors file

    @classmethod
    def of(cls, data: bytes, is_header: bool) -> FileRecord:
        """Describe a file that is ``data``, or begins with it."""
        return cls(len(data), crc32(memoryview(data)), len(data) if is_header else None)


@dataclass
class Manifest:
    """Everything of a checkpoint but the tensors' bytes."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    """By path: ``model/<name>``, ``optimizer/<parameter>/<state>``, ``more/<path>``, ``rng``."""
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    rng: list[Any] = field(default_factory=list)  # for each rank, [generator, bytes] in turn
    files: dict[str, FileRecord] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # when it was written, by which versions, from how many ranks
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)[2:].encode()
        return b'{"crc32": "%08x",\n' % crc32(memoryview(text)) + text

    @classmethod
    def parse(cls, data: bytes, where: str, validate: bool = True) -> Manifest:
        """Read the content of the file; unless ``validate``, check only checksum and forms, not that ranges agree."""
        table = parse_json(data, where)
        version = table.get("format")
        if type(version) is not int or version < 1:
            raise ValueError(f"{where} is damaged (format {version!r}); use an earlier checkpoint")
        if version > FORMAT:
            raise ValueError(f"{where}: format {version} is newer than format {FORMAT}; update trueshard")
        if version < FORMAT:
            raise ValueError(f"{where}: format {version} was never released; this library reads format {FORMAT}")
        first = _FIRST_LINE.match(data)
        if first is None or int(first[1], 16) != crc32(memoryview(data)[first.end() :]):
            raise ValueError(f"{where} is damaged: its checksum does not fit; use an earlier checkpoint")
        try:
            for path, value in _misfits(table, _FORM, ""):
                raise ValueError(f"{where} is damaged: {path!r} is {str(value)[:80]!r}, which save() does not write")
            manifest: Manifest = _made(cls, table)
            manifest.tensors = {key: _made(TensorEntry, each) for key, each in table["tensors"].items()}
            for key, entry in manifest.tensors.items():
                entry.pieces = [_made(Piece, each) for each in table["tensors"][key]["pieces"]]
            manifest.files = {name: _made(FileRecord, each) for name, each in table["files"].items()}
            if validate:
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
        for file, each in pieces.items():
            check_ranges(each, self.files[file].header or 0, self.files[file].size, f"{where}: {file}")


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
        pairs = [[key, split(each, f"{path}/{str(key).replace('/', '|')}", tensors)] for key, each in value.items()]
        return {"__dict__": pairs}
    if isinstance(value, (tuple, list)) or type(value).__name__ == "deque":
        items = [split(each, f"{path}/{i}", tensors) for i, each in enumerate(value)]
        return {"__tuple__": items} if isinstance(value, tuple) else items
    if _is_plain(value):
        return value
    if isinstance(value, (bool, int, float, str)):  # a member of an enumeration, numpy's float64
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    raise TypeError(
        f"{path}: a {type(value).__name__} is neither a tensor nor a JSON value; give it a state_dict() or leave it out"
    )


def join(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Invert ``split``; what is of no form of its stays as it is."""
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__dtype__" in value:
            return dtype_of(value["__dtype__"])
        if "__tuple__" in value:
            return tuple(join(each, tensors) for each in value["__tuple__"])
        if "__dict__" in value:
            return {key: join(each, tensors) for key, each in value["__dict__"]}
    return [join(each, tensors) for each in value] if isinstance(value, list) else value


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
    for key, each in inside:
        yield from located(each, (*path, key))


def references(value: Any) -> Iterator[str]:
    """Yield the keys of the tensors that split values refer to."""
    return (key for _, key in located(value))


# Forms: what each value of the file may be. A tuple of types; a predicate; [form of each item]; or {key: form}, where
# "*" stands for any key, and a key that ends in "?" may be absent.


def _made(cls: type, table: Mapping[str, Any]) -> Any:
    return cls(**{each.name: table[each.name] for each in fields(cls)})


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
        for i, each in enumerate(value):
            yield from _misfits(each, form[0], f"{path}/{i}")
    elif isinstance(form, dict):
        for key, each in form.items():
            name = key.rstrip("?")
            for inside in value if key == "*" else [name] if name in value else []:
                yield from _misfits(value[inside], each, f"{path}/{inside}".lstrip("/"))


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_dtype(value: Any) -> bool:
    found = find_dtype(value)
    return found is not None and dtype_name(found) == value


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) in (str, int) and _is_split(value[1])


def _is_sized_name(value: Any) -> bool:
    return _is_pair(value) and type(value[0]) is str and type(value[1]) is int and value[1] >= 0


def _is_settings(value: Any) -> bool:
    return isinstance(value, dict) and "__dict__" in value and _is_split(value)


def _is_split(value: Any) -> bool:
    """True if ``split`` can have made it; where references lead is checked elsewhere."""
    if isinstance(value, list):
        return all(map(_is_split, value))
    if not isinstance(value, dict):
        return _is_plain(value)
    mark, inner = next(iter(value.items()), ("", None))
    if mark in ("__tuple__", "__dict__"):
        good = isinstance(inner, list) and all(map(_is_split if mark == "__tuple__" else _is_pair, inner))
    else:
        good = isinstance(inner, str) if mark == "__tensor__" else mark == "__dtype__" and _is_dtype(inner)
    return good and len(value) == 1


_TEXT, _COUNT, _COUNT_OR_NONE = (str,), (int,), (int, type(None))
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
    "rng": [[_is_sized_name]],
    "files": {"*": {"size": _COUNT, "crc32": _COUNT, "header": _COUNT_OR_NONE}},
    "about": {},
}
