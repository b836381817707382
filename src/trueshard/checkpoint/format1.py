"""The first format, which is read as long as anybody has one: pieces by rows, under the tensor's key, no checksums."""

from __future__ import annotations

from typing import Any

from trueshard.checkpoint.header import read_header
from trueshard.checkpoint.manifest import Entry, FileRecord, Manifest, Piece
from trueshard.checkpoint.store import Store


def upgraded(table: dict[str, Any], where: str) -> Manifest:
    """A manifest of the first format as one of today; ``locate`` completes it.

    Raises:
        KeyError, TypeError, ValueError: it is damaged.
    """
    tensors = {}
    for part in ("tensors", "ties", "optimizers", "more"):
        if not isinstance(table[part], dict):
            raise TypeError(f"{part} is no table")
    for key, each in table["tensors"].items():
        ordered = sorted(each["pieces"], key=lambda piece: piece["start"])
        tensors[key] = Entry([key.partition("/")[2]], each["shape"], each["dtype"])
        # Which bytes these are is in the files' own headers.
        tensors[key].pieces = [Piece(str(piece["file"]), 0, 0) for piece in ordered]
    for prefix, ties in table["ties"].items():
        for name, first in ties.items():
            tensors[f"{prefix}/{first}"].names.append(name)
    optimizers = {prefix: _optimizer(prefix, each, tensors) for prefix, each in table["optimizers"].items()}
    models: dict[str, Any] = {prefix: {"class": None, "extra": {}} for prefix in table["ties"]}
    return Manifest(tensors, models, optimizers, table["more"], [], {}, {}, 1)


def _optimizer(prefix: str, record: Any, tensors: dict[str, Entry]) -> dict[str, Any]:
    fields = dict(record["__dict__"])
    groups = []
    for group in fields["groups"]:
        entry = dict(group["__dict__"])
        groups.append({"params": list(entry["params"]), "settings": entry["settings"]})
    state: dict[str, list[list[Any]]] = {}
    for key in tensors:
        if key.startswith(f"{prefix}/") and not key.startswith(f"{prefix}/settings/"):
            name, _, what = key.removeprefix(f"{prefix}/").rpartition("/")
            state.setdefault(name, []).append([what, {"__tensor__": key}])
    for where, value in fields["values"]["__dict__"]:
        name, _, what = where.rpartition("/")
        state.setdefault(name, []).append([what, value])
    return {
        "class": fields["class"],
        "groups": groups,
        "state": {name: {"__dict__": entries} for name, entries in state.items()},
    }


def locate(manifest: Manifest, store: Store) -> None:
    """Look up in the files where each piece is."""
    files = {piece.file for entry in manifest.tensors.values() for piece in entry.pieces}
    slots = {file: read_header(store, file) for file in sorted(files)}
    for key, entry in manifest.tensors.items():
        pieces = []
        for piece in entry.pieces:
            if key not in slots[piece.file]:
                raise ValueError(f"{store.where}/{piece.file} does not hold {key!r}, though the manifest says so")
            slot = slots[piece.file][key]
            pieces.append(Piece(piece.file, slot.begin, slot.end))
        entry.pieces = pieces
    for file, each in slots.items():
        start = min((slot.begin for slot in each.values()), default=store.size(file))
        manifest.files[file] = FileRecord.of(bytes(store.read(file, 0, start)), True)
        manifest.files[file].size = store.size(file)
