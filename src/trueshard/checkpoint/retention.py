"""The checkpoints of a run: a directory of them, which is the newest, and which are kept."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trueshard.checkpoint import background
from trueshard.checkpoint.manifest import MANIFEST, Manifest
from trueshard.checkpoint.target import discard
from trueshard.checkpoint.together import Together
from trueshard.checkpoint.versions import manifest_of
from trueshard.checkpoint.writer import save

_NAME = re.compile(r"step-(\d{8,})")


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in ``directory``, by the time it was written; None if there is none.

    One that was interrupted does not count: it never got its name. Nor does one whose manifest is damaged.
    """
    found = [(written, path) for path in _inside(Path(directory)) if (written := _written(path)) is not None]
    return max(found)[1] if found else None


def _inside(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in sorted(directory.iterdir()) if not path.name.startswith(".") and path.is_dir()]


def _written(path: Path) -> tuple[str, int] | None:
    """When a checkpoint was written; None if it is none, or is deleted by another rank just now."""
    try:
        manifest = manifest_of((path / MANIFEST).read_bytes(), str(path))
        return str(manifest.about.get("written", "")), (path / MANIFEST).stat().st_mtime_ns
    except (OSError, ValueError):
        return None


class Checkpoints:
    """Saves a run's checkpoints as ``step-00000100`` in one directory, and deletes those that are not to be kept.

    Args:
        directory: it is made when it is needed.
        keep_last: how many of the newest are kept, at least 1.
        keep_every: steps that are multiples of it are kept for good.
        keep_best: how many of the best by ``metric`` are kept.
        metric: a key of the ``metrics`` that are given to ``save``.
        mode: "min" or "max": which values are better.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep_last: int = 3,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str = "loss",
        mode: str = "min",
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every), ("keep_best", keep_best)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; it is a whole number from 1 on")
        if mode not in ("min", "max"):
            raise ValueError(f'mode is {mode!r}; it is "min" or "max"')
        self.directory = Path(directory)
        self._last, self._every, self._best = keep_last, keep_every, keep_best
        self._metric, self._sign = metric, 1.0 if mode == "min" else -1.0

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, in order."""
        found = (_NAME.fullmatch(path.name) for path in _inside(self.directory) if (path / MANIFEST).is_file())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Path | None:
        """The checkpoint of the last step, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """The one with the best metric, or None if none was saved with it."""
        ranked = self._ranked()
        return self.path(ranked[0]) if ranked else None

    def save(self, step: int, *, metrics: Mapping[str, float] | None = None, **given: Any) -> background.Saving | None:
        """``trueshard.save`` under the step's name, then delete what is not kept. Collective.

        Args:
            step: of training; whole, from 0 on.
            metrics: numbers that are saved along, under ``progress``.
            given: what ``save`` takes.

        Raises:
            ValueError: ``keep_best`` needs a metric that is not in ``metrics``.
        """
        if self._best is not None and self._metric not in (metrics or {}):
            raise ValueError(f"keep_best goes by {self._metric!r}, which is not among metrics {sorted(metrics or {})}")
        progress = {"step": step, "metrics": {key: float(value) for key, value in (metrics or {}).items()}}
        saving = save(self.path(step), progress=progress, **given)
        # In the background the newest is not there yet: one more of the older ones stays until the next save.
        self.prune()
        return saving

    def prune(self) -> None:
        """Delete what is not kept; rank 0 does."""
        if Together().rank:
            return
        steps = self.steps()
        kept = {*steps[-self._last :], *self._ranked()[: self._best or 0]}
        kept |= {step for step in steps if self._every and step % self._every == 0}
        for step in steps:
            if step not in kept:
                discard(self.path(step))

    def _ranked(self) -> list[int]:
        """Steps with the metric, the best first; of equals the later one."""
        found: list[tuple[float, int]] = []
        for step in self.steps():
            path = self.path(step) / MANIFEST
            try:
                manifest = manifest_of(path.read_bytes(), str(path))
                manifest.validate(str(path))
            except (OSError, ValueError):
                continue
            value = _metric_of(manifest, self._metric)
            if value is not None and not math.isnan(value):
                found.append((self._sign * value, -step))
        return [-step for _, step in sorted(found)]


def _metric_of(manifest: Manifest, name: str) -> float | None:
    value: Any = manifest.more.get("progress")
    for key in ("metrics", name):
        value = dict(value.get("__dict__", [])).get(key) if isinstance(value, dict) else None
    return float(value) if type(value) in (int, float) else None
