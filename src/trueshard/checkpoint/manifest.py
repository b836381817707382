"""The manifest of a checkpoint: which tensor lies in which file, as JSON. No pickle is written or read.

A checkpoint is a directory: ``manifest.json``, and one safetensors file for each rank that had something to write.
A tensor is cut along its first dimension only; the pieces are listed by the rows they hold.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass
class Piece:
    """Rows ``start`` to ``start + rows`` of a tensor, in one file under the tensor's own key."""

    file: str
    start: int
    rows: int


@dataclass
class Entry:
    """One tensor. A 0-dim tensor is one piece of one row."""

    shape: list[int]
    dtype: str
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Manifest:
    """Everything of a checkpoint but the tensors' bytes."""

    tensors: dict[str, Entry] = field(default_factory=dict)
    ties: dict[str, dict[str, str]] = field(default_factory=dict)
    """Model key → further name → the name the tensor is under."""
    optimizers: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Write ``manifest.json`` into ``directory``."""
        (directory / MANIFEST).write_text(json.dumps(asdict(self), indent=1, allow_nan=True))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of the checkpoint ``directory``.

        Raises:
            FileNotFoundError: no such directory, or it is no checkpoint.
            ValueError: the manifest is damaged, or of a newer format.
        """
        path = directory / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{directory} is no checkpoint: it has no {MANIFEST}")
        try:
            data = json.loads(path.read_text())
            if data["format"] > FORMAT:
                raise ValueError(f"{path}: format {data['format']} is newer than {FORMAT}; update trueshard")
            tensors = {
                key: Entry(entry["shape"], entry["dtype"], [Piece(**piece) for piece in entry["pieces"]])
                for key, entry in data["tensors"].items()
            }
            return cls(tensors, data["ties"], data["optimizers"], data["more"], data["format"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); use an earlier checkpoint") from None
