"""The curves of runs, as they are drawn: which there are, and few enough points of each.

- A run is its folder, or the `metrics.jsonl` in it.
- A long run is drawn from stretches of equally many steps: the mean of each, and its lowest and highest value.
- What a step does not have is no point: evaluations are joined by lines, a loss that was not finite leaves a gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueshard.errors import UserError
from trueshard.names import nearest
from trueshard.train.showing.metrics import NAME, read_metrics

Values = NDArray[np.float64]
Record = dict[str, Any]

STRETCHES = 1200
"""Points of a curve, at most: about as many as a wide screen has columns."""


@dataclass(frozen=True)
class Run:
    """A run that has taken steps."""

    name: str
    """Tells it from the others."""
    records: list[Record]


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    key: str
    title: str
    unit: str
    """nats, bytes, part (of 1), rate, seconds or empty."""
    value: Callable[[Record], float | None]
    noisy: bool = False
    """Whether steps differ so much by themselves that it is smoothed."""


@dataclass(frozen=True)
class Curve:
    """One figure of one run; float64 `[points]` each."""

    step: Values
    tokens: Values
    """Targets up to there; NaN where the run does not say."""
    mean: Values
    low: Values
    high: Values
    count: Values
    """How many steps a point stands for."""


def _of(key: str) -> Callable[[Record], float | None]:
    return lambda record: record.get(key)


def _memory(record: Record) -> float | None:
    return record.get("memory_reserved", record.get("memory_allocated"))


def _waited(record: Record) -> float | None:
    return record["data_wait"] / record["seconds"] if record.get("seconds") and "data_wait" in record else None


PANELS = (
    Panel("loss", "Loss", "nats", _of("loss"), noisy=True),
    Panel("evaluation_loss", "Evaluation loss", "nats", _of("evaluation_loss")),
    Panel("grad_norm", "Gradient norm", "", _of("grad_norm"), noisy=True),
    Panel("lr", "Learning rate", "", _of("lr")),
    Panel("tokens_per_second", "Tokens a second, all ranks", "rate", _of("tokens_per_second"), noisy=True),
    Panel("mfu", "Model FLOPs utilisation", "part", _of("mfu"), noisy=True),
    Panel("memory", "Memory of the fullest rank", "bytes", _memory),
    Panel("data_wait", "Waiting for data, part of the step", "part", _waited, noisy=True),
)
PLANNED = Panel("memory_planned", "planned", "bytes", _of("memory_planned"))
"""Drawn along with the memory."""


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs, each under the shortest end of its path that tells them apart.

    Raises:
        UserError: there is no such run, it has no step yet, it is given twice, or its file is damaged.
    """
    files = [_file(path) for path in paths]
    twice = next((path for i, path in enumerate(paths) if files[i] in files[:i]), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice; leave one out")
    runs = []
    for path, file, name in zip(paths, files, _names([file.parent for file in files]), strict=True):
        records = read_metrics(file)
        if not records:
            raise UserError(f"{path} has taken no step yet; try again when it has")
        runs.append(Run(name, records))
    return runs


def _file(path: Path) -> Path:
    file = path.expanduser().resolve()
    if file.is_dir():
        if not (file / NAME).exists():
            below = sorted(each.parent.name for each in file.glob(f"*/{NAME}"))
            inside = f"; runs in it: {', '.join(below[:5])}" if below else ""
            raise UserError(f"{path} has no {NAME}: it is not a run's folder, or the run has taken no step{inside}")
        return file / NAME
    if not file.exists():
        beside = [each.name for each in file.parent.glob("*") if each.is_dir() or each.suffix == ".jsonl"]
        near = nearest(file.name, beside)
        raise UserError(f"{path} does not exist.{near} A run is its folder, or the {NAME} in it")
    return file


def _names(folders: Sequence[Path]) -> list[str]:
    """The least number of last parts of each path that makes all of them different."""
    for count in itertools.count(1):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(names) or count > max(len(folder.parts) for folder in folders):
            return names
    raise AssertionError


def curve(records: Sequence[Record], panel: Panel, stretches: int = STRETCHES) -> Curve | None:
    """The figure over the steps; None where the run does not have it."""
    found = [(record, panel.value(record)) for record in records]
    rows = [
        (record["step"], record.get("tokens", math.nan), value if math.isfinite(value) else math.nan)
        for record, value in found
        if value is not None
    ]
    if not any(math.isfinite(value) for *_, value in rows):
        return None
    step, tokens, values = np.array(rows, np.float64).T
    if len(rows) <= stretches:
        return Curve(step, tokens, values, values, values, np.ones_like(values))
    edges = np.linspace(0, len(rows), stretches + 1).astype(np.int64)
    starts, last = edges[:-1], edges[1:] - 1
    finite = np.isfinite(values)
    count = np.add.reduceat(finite.astype(np.float64), starts)
    known = count > 0
    summed = np.add.reduceat(np.where(finite, values, 0.0), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    nothing = np.full(stretches, np.nan)
    return Curve(
        step[last],
        tokens[last],
        np.divide(summed, count, out=nothing.copy(), where=known),
        np.where(known, low, np.nan),
        np.where(known, high, np.nan),
        count,
    )


def smoothed(curve: Curve, half_life: float) -> Values:
    """The mean of the points around each, of which one that lies `half_life` steps away counts half; NaN stays.

    Near the beginning the half-life is a tenth of the steps so far, so that the line keeps to a steep fall.
    """
    lives = np.minimum(half_life, np.maximum(curve.step - curve.step[0], 1) / 10)
    decays = 0.5 ** (np.diff(curve.step, prepend=curve.step[0]) / lives)
    known = np.isfinite(curve.mean)
    weights = np.where(known, curve.count, 0.0)
    sums = np.where(known, curve.mean, 0.0) * weights

    later = np.append(decays[1:], 1.0)[::-1]

    def around(values: Values) -> Values:
        return _passed(values, decays) + _passed(values[::-1], later)[::-1] - values

    return np.divide(around(sums), around(weights), out=np.full_like(sums, np.nan), where=known)


def _passed(values: Values, decays: Values) -> Values:
    """The sum of the values up to each, faded by the decay before each."""
    found, total = np.empty_like(values), 0.0
    for i, (value, decay) in enumerate(zip(values.tolist(), decays.tolist(), strict=True)):
        found[i] = total = total * decay + value
    return found


def half_life(runs: Sequence[Run]) -> int:
    """Steps, for smoothing: of 1, 2, 5, 10, 20, …, the one nearest to a hundredth of the longest run."""
    steps = max(len(run.records) for run in runs)
    choices = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    return min(choices, key=lambda each: abs(math.log(each / max(steps / 100, 0.5))))
