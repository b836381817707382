"""The checkpoints of a run: one directory, of which the newest, the best and regular ones are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trueshard.checkpoint.format import MANIFEST, Manifest, join
from trueshard.checkpoint.ranks import RankGroup
from trueshard.checkpoint.saving import Saving, save
from trueshard.checkpoint.writing import OF_A_STEP, discard


class Checkpoints:
    """Saves a run's checkpoints as ``step-00000100`` in one directory, and deletes those that are not to be kept.

    The link ``latest`` beside them points to the one that was written last.

    Args:
        directory: made when needed.
        keep_last: how many of the newest are kept, at least 1.
        keep_every: keep steps that are multiples of it for good.
        keep_best: how many of the best by ``metric`` are kept.
        metric: a key of the ``metrics`` given to ``save``.
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
        """Return the place of a step's checkpoint."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, in order."""
        names = (path.parent.name for path in self.directory.glob(f"*/{MANIFEST}"))
        return sorted(int(match[1]) for match in map(OF_A_STEP.fullmatch, names) if match)

    def latest(self) -> Path | None:
        """Return the checkpoint of the last step, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, or None if none was saved with it."""
        ranked = self._ranked()
        return self.path(ranked[0]) if ranked else None

    def save(self, step: int, *, metrics: Mapping[str, float] | None = None, **given: Any) -> Saving | None:
        """Call ``trueshard.save`` under the step's name, then delete what is not kept. Collective.

        Args:
            step: of training, from 0 on.
            metrics: saved along, in the entry ``progress``.
            given: arguments of ``save``.

        Raises:
            ValueError: ``keep_best`` needs a metric that is not in ``metrics``.
        """
        if self._best is not None and self._metric not in (metrics or {}):
            raise ValueError(f"keep_best goes by {self._metric!r}, which is not among metrics {sorted(metrics or {})}")
        progress = {"step": step, "metrics": {key: float(value) for key, value in (metrics or {}).items()}}
        saving = save(self.path(step), progress=progress, **given)
        # With wait=False the newest is not there yet: one more of the older ones stays until the next save.
        self.prune()
        return saving

    def prune(self) -> None:
        """Delete what is not kept. Rank 0 does."""
        if RankGroup().rank:
            return
        steps = self.steps()
        kept = {*steps[-self._last :], *self._ranked()[: self._best or 0]}
        kept |= {step for step in steps if self._every and step % self._every == 0}
        for step in steps:
            if step not in kept:
                discard(self.path(step))

    def _ranked(self) -> list[int]:
        """Return the steps that have the metric, best first, of equals the later one."""
        found: list[tuple[float, int]] = []
        for step in self.steps():
            path = self.path(step) / MANIFEST
            try:
                progress = join(Manifest.parse(path.read_bytes(), str(path)).more["progress"], lambda key: None)
                value = progress["metrics"][self._metric]
            except (OSError, ValueError, LookupError, TypeError):  # damaged, or saved without the metric
                continue
            if type(value) in (int, float) and not math.isnan(value):
                found.append((self._sign * value, -step))
        return [-step for _, step in sorted(found)]
