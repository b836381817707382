"""What the processes of a verification are told, and where they leave what they found."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Job:
    """One verification: the same in each of its processes."""

    folder: Path
    """For what the processes leave to each other; temporary."""
    source: Any
    """A file's words ``file.py:factory``, a function, or a training configuration."""
    words: Mapping[str, Any]
    """Arguments of ``trueshard.shard``."""
    replicate: int
    """Copies of the model: a 2-D mesh (replicate, shard) where it is more than one."""
    ranks: int
    other_ranks: int
    """On which the checkpoint is loaded; one of it and ``ranks`` divides the other."""
    steps: int
    save_after: int
    """The step after which a checkpoint is written, from which other ranks go on."""
    seed: int
    layers: int | None
    sequence: int | None
    optimizer: str | None
    threads: int
    """Of each process: with other numbers of them, sums are taken in other orders."""
    timeout: float
    """Seconds that a collective may take."""

    def put(self, name: str, value: Any) -> None:
        """Leave ``value`` for the other processes."""
        (self.folder / f"{name}.pickle").write_bytes(pickle.dumps(value))

    def get(self, name: str) -> Any:
        """What was left under ``name``, or None."""
        file = self.folder / f"{name}.pickle"
        return pickle.loads(file.read_bytes()) if file.exists() else None

    def tensors(self, name: str) -> Tensors:
        """The tensors that were left, or are to be left, under ``name``."""
        return Tensors(self.folder / name)

    @property
    def parts(self) -> int:
        """Of each step's global batch."""
        return max(self.ranks, self.other_ranks)

    def on_other_ranks(self) -> Job:
        """The same for the run that loads the checkpoint: what goes by the number of ranks is as usual there."""
        words, usual = dict(self.words), {"reshard_after_forward": "default"}
        if words.get("plan") is not None:
            words["plan"] = replace(words["plan"], units=(), **usual)
        else:
            words |= usual
        return replace(self, words=words, replicate=1)

    @property
    def changes_arithmetic(self) -> bool:
        """Whether the user asked for other arithmetic than the plain model's, which is not sharding's doing."""
        plan = self.words.get("plan")
        asked = self.words if plan is None else vars(plan)
        return asked.get("mixed_precision") is not None or bool(asked.get("compile"))


class Tensors:
    """Tensors on disk, one file each, so that nobody holds more than one: by kind, step and name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, kind: str, step: int, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor."""
        place = self._place(kind, step)
        place.mkdir(parents=True, exist_ok=True)
        torch.save(tensor.detach().cpu().clone(), place / _file_name(name))
        with (place / "names").open("a", encoding="utf-8") as names:
            names.write(json.dumps(name) + "\n")

    def read(self, kind: str, step: int, name: str) -> torch.Tensor:
        """A tensor that was kept, on the CPU."""
        tensor: torch.Tensor = torch.load(self._place(kind, step) / _file_name(name))
        return tensor

    def names(self, kind: str, step: int) -> list[str]:
        """Those that were kept, in order."""
        file = self._place(kind, step) / "names"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []

    def _place(self, kind: str, step: int) -> Path:
        return self._folder / kind / str(step)


def _file_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32] + ".pt"


@dataclass(frozen=True)
class Failure:
    """Why a process ended before its work was done."""

    rank: int
    stage: str
    kind: str
    """``"refused"`` by ``shard()``, a wrong ``"input"``, or ``"failed"``."""
    words: str
    trace: str
    at: float
    """Seconds since the epoch: the first is the cause."""
