"""Contents of diagrams: which quantities of a run, as which points, smoothed how.

- A long run is drawn from intervals of equally many steps: the mean, lowest and highest value of each.
- A step without a value is no point: evaluations are joined by lines, a loss that was not finite leaves a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueshard.train.metrics.terminal import has_reward

Values = NDArray[np.float64]
Record = dict[str, Any]

POINTS = 1200
"""Maximum points of a curve: about the columns of a wide screen."""


@dataclass(frozen=True)
class RunRecords:
    """The records of a run that has taken steps."""

    name: str
    """Unique among the runs."""
    records: list[Record]


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    key: str
    title: str
    unit: str
    """nats, bytes, part (of 1), rate, count, signed (never on a logarithmic scale) or empty."""
    noisy: bool = False
    """True if values vary from step to step, and are smoothed."""
    dashed: str = ""
    """Key of a second, dashed line."""
    dashed_name: str = ""
    band: str = ""
    """Key of the half width of a band around the line."""
    note: str = ""
    """Shown beside the title."""
    log: bool = False
    """True if always on a logarithmic scale, where a value is positive."""

    @property
    def others(self) -> list[Panel]:
        """The second line and the band, as panels of their own."""
        return [Panel(key, self.title, self.unit, self.noisy) for key in (self.dashed, self.band) if key]

    def value(self, record: Record) -> float | None:
        """Return the value of a step, or None if it has none."""
        if self.key == "memory":
            return record.get("memory_reserved", record.get("memory_allocated"))
        if self.key == "data_wait" and self.key in record:
            return record[self.key] / record["seconds"] if record.get("seconds") else None
        return record.get(self.key)


@dataclass(frozen=True)
class RunCurve:
    """One quantity of one run; float64 [points] each."""

    step: Values
    tokens: Values
    """Tokens read by then; NaN if unknown."""
    mean: Values
    low: Values
    high: Values
    count: Values
    """Number of steps in each point."""


LOSS = Panel("loss", "Loss", "nats", noisy=True)
POLICY_LOSS = Panel("loss", "Policy loss", "signed", noisy=True)
"""Its place in runs with a reward."""
REWARD = Panel("reward", "Reward", "signed", noisy=True, band="reward_std", note="band: ± standard deviation")
EVALUATION_REWARD = Panel("evaluation_reward", "Evaluation reward", "signed")
PANELS = (
    REWARD,
    EVALUATION_REWARD,
    LOSS,
    Panel("evaluation_loss", "Evaluation loss", "nats"),
    Panel("length_mean", "Length of an answer, tokens", "count", noisy=True),
    Panel("entropy", "Entropy", "nats", noisy=True),
    Panel(
        "mismatch_mean",
        "Mismatch of log-probabilities, mean",
        "nats",
        noisy=True,
        dashed="mismatch_max",
        dashed_name="largest",
        log=True,
    ),
    Panel("kl_reference", "Divergence from the reference", "nats", noisy=True),
    Panel("clipped_high", "Clipped above, part of tokens", "part", True, dashed="clipped_low", dashed_name="below"),
    Panel("grad_norm", "Gradient norm", "", noisy=True),
    Panel("lr", "Learning rate", ""),
    Panel("tokens_per_second", "Tokens a second, all ranks", "rate", noisy=True),
    Panel("mfu", "Model FLOPs utilisation", "part", noisy=True),
    Panel("memory", "Memory of the fullest rank", "bytes", dashed="memory_planned", dashed_name="planned"),
    Panel("data_wait", "Waiting for data, part of the step", "part", noisy=True),
)


def curve(records: Sequence[Record], panel: Panel, points: int = POINTS) -> RunCurve | None:
    """Return the quantity of a panel over the steps, in at most ``points``; None if no step has it."""
    import pandas

    before = {0: 0}  # step → tokens, of an evaluation before training
    values = [
        (step := record["step"], record.get("tokens", before.get(step)), panel.value(record)) for record in records
    ]
    rows = pandas.DataFrame([value for value in values if value[2] is not None], columns=["step", "tokens", "value"])
    rows = rows.astype(float).replace([math.inf, -math.inf], math.nan)
    if not rows.value.notna().any():
        return None
    intervals = np.linspace(0, min(points, len(rows)), len(rows), endpoint=False).astype(np.int64)
    found = rows.groupby(intervals).agg(
        step=("step", "last"),
        tokens=("tokens", "last"),
        mean=("value", "mean"),
        low=("value", "min"),
        high=("value", "max"),
        count=("value", "count"),
    )
    return RunCurve(**{key: found[key].to_numpy(np.float64) for key in found})


def smoothed(curve: RunCurve, half_life: float) -> Values:
    """Return the weighted mean around each point; a point `half_life` steps away has weight 1/2. NaN stays.

    Near the beginning the half-life is a tenth of the steps so far, so that the line follows a steep fall.
    """
    lives = np.minimum(half_life, np.maximum(curve.step - curve.step[0], 1) / 10)
    places = np.cumsum(np.diff(curve.step, prepend=curve.step[0]) / lives)  # in half-lives
    nearness = 0.5 ** np.abs(places[:, None] - places)  # [points, points]
    known = np.isfinite(curve.mean)
    weights = np.where(known, curve.count, 0.0)
    sums = np.where(known, curve.mean, 0.0) * weights
    return np.divide(nearness @ sums, nearness @ weights, out=np.full_like(sums, np.nan), where=known)


def half_life(runs: Sequence[RunRecords]) -> int:
    """Return the steps to smooth over: of 1, 2, 5, 10, 20, …, the nearest to a hundredth of the longest run."""
    steps = max(len(run.records) for run in runs)
    choices = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    return min(choices, key=lambda choice: abs(math.log(choice / max(steps / 100, 0.5))))


def shown_panels(runs: Sequence[RunRecords]) -> list[Panel]:
    """Return the panels that a run has values for; what no run has is left out of them, too."""
    rewarded = any(has_reward(run.records) for run in runs)

    def found(key: str) -> list[RunCurve]:
        return [each for run in runs if key and (each := curve(run.records, Panel(key, "", ""))) is not None]

    panels = []
    for panel in PANELS:
        shown = POLICY_LOSS if rewarded and panel is LOSS else panel
        if not any(curve(run.records, shown) for run in runs):
            continue
        if not found(shown.dashed):
            shown = replace(shown, dashed="", dashed_name="")
        if not found(shown.band):
            shown = replace(shown, band="", note="")
        if shown.dashed_name:
            shown = replace(shown, note=f"dashed: {shown.dashed_name}")
        if shown.log and not any((each.mean > 0).any() for each in found(shown.key)):
            shown = replace(shown, log=False)
        panels.append(shown)
    return panels
