"""`trueshard plot`: the curves of runs as a PNG and as an HTML page, in the frame and style of the planner's page.

- A long run is drawn from intervals of equally many steps: the mean, lowest and highest value of each.
- A step without a value is no point: evaluations are joined by lines, a loss that was not finite leaves a gap.
"""

from __future__ import annotations

import datetime
import io
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trueshard.errors import UserError
from trueshard.files import replacing
from trueshard.planner.report.frame import framed
from trueshard.text import nearest
from trueshard.train.showing.metrics import NAME, read_metrics
from trueshard.train.showing.report import final_line, final_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]
Record = dict[str, Any]

HERE = "trueshard.train.showing"
POINTS = 1200
"""Maximum points of a curve: about the columns of a wide screen."""
COLOURS = ("#2f5fd0", "#d9730d", "#128a63", "#c23b80", "#7a57d1", "#8a6d1a", "#0f8aa8", "#c0392b")
"""Colours of runs, in turn."""
FEW = 30
"""Maximum points that are drawn as dots and not smoothed."""


def plot(runs: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Draw the curves of runs into `out`, a `.png` or `.html` file, or into both in a run's folder; return the files.

    Raises `UserError` for a run that does not exist, has no step or is damaged, and a file that cannot be written.
    """
    if out is not None and out.suffix.lower() not in FORMS:
        raise UserError(f"--out {out}: its name must end in {' or '.join(FORMS)}")
    found, first = read_runs(runs), runs[0].expanduser()
    folder = Path() if len(runs) > 1 else first if first.is_dir() else first.parent
    targets = [folder / f"curves{suffix}" for suffix in FORMS] if out is None else [out.expanduser()]
    if not (into := targets[0].absolute().parent).is_dir() or not os.access(into, os.W_OK):
        raise UserError(f"--out {targets[0]}: there is no folder {into} that can be written to")
    for target in targets:
        made = FORMS[target.suffix.lower()](found)
        with replacing(target) as scratch:
            scratch.write_bytes(made)
    return targets


@dataclass(frozen=True)
class RunRecords:
    """The records of a run that has taken steps."""

    name: str
    """Unique among the runs."""
    records: list[Record]


def read_runs(paths: Sequence[Path]) -> list[RunRecords]:
    """Read runs, each named by its path below the folder of all. Raises `UserError` for a wrong one."""
    files = [_file(path) for path in paths]
    twice = next((path for i, path in enumerate(paths) if files[i] in files[:i]), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice; leave one out")
    common, runs = os.path.commonpath([file.parents[1] for file in files]), []
    for path, file in zip(paths, files, strict=True):
        records = read_metrics(file)
        if not records:
            raise UserError(f"{path} has taken no step yet; try again when it has")
        runs.append(RunRecords(file.parent.relative_to(common).as_posix(), records))
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


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    key: str
    title: str
    unit: str
    """nats, bytes, part (of 1), rate, seconds or empty."""
    noisy: bool = False
    """True if values vary from step to step, and are smoothed."""

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


PANELS = (
    Panel("loss", "Loss", "nats", noisy=True),
    Panel("evaluation_loss", "Evaluation loss", "nats"),
    Panel("grad_norm", "Gradient norm", "", noisy=True),
    Panel("lr", "Learning rate", ""),
    Panel("tokens_per_second", "Tokens a second, all ranks", "rate", noisy=True),
    Panel("mfu", "Model FLOPs utilisation", "part", noisy=True),
    Panel("memory", "Memory of the fullest rank", "bytes"),
    Panel("data_wait", "Waiting for data, part of the step", "part", noisy=True),
)
PLANNED = Panel("memory_planned", "planned", "bytes")
"""Drawn with the memory."""


def curve(records: Sequence[Record], panel: Panel, points: int = POINTS) -> RunCurve | None:
    """Return the quantity of a panel over the steps, in at most ``points``; None if no step has it."""
    import pandas

    values = [(record["step"], record.get("tokens"), panel.value(record)) for record in records]
    rows = pandas.DataFrame([each for each in values if each[2] is not None], columns=["step", "tokens", "value"])
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
    return min(choices, key=lambda each: abs(math.log(each / max(steps / 100, 0.5))))


def _shown(runs: Sequence[RunRecords]) -> list[Panel]:
    return [panel for panel in PANELS if any(curve(run.records, panel) for run in runs)]


def picture(runs: Sequence[RunRecords]) -> bytes:
    """Return a PNG with each panel that a run has values for, and a colour for each run."""
    from matplotlib.figure import Figure

    panels = _shown(runs)
    rows: list[Any] = [["0", "0"], *([str(n), str(min(n + 1, len(panels) - 1))] for n in range(1, len(panels), 2))]
    figure = Figure(figsize=(12, 3.1 * len(rows) + 0.8), layout="constrained")
    places = figure.subplot_mosaic(rows, height_ratios=[1.4] + [1.0] * (len(rows) - 1))
    for number, panel in enumerate(panels):
        _draw(places[str(number)], panel, runs)
    if len(runs) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(runs), 4), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    return buffer.getvalue()


def draw_loss(records: Sequence[Record], entropy: float | None, file: Path) -> None:
    """Draw the loss of steps and evaluations, and the unigram entropy of the text in nats, into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, PANELS[0], [RunRecords("loss", list(records))])
    evaluated = curve(records, PANELS[1])
    if evaluated is not None:
        axes.plot(evaluated.step, evaluated.mean, "o-", markersize=4, color=COLOURS[1], label="evaluation")
    if entropy is not None:
        axes.axhline(entropy, linestyle="--", color="gray", label=f"unigram entropy of the text, {entropy:.2f}")
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.03 * entropy))
    axes.legend()
    with replacing(file) as scratch:
        figure.savefig(scratch, dpi=150, format="png")


def _draw(axes: Axes, panel: Panel, runs: Sequence[RunRecords]) -> None:
    shown: list[Values] = []
    scale = 2.0**-30 if panel.unit == "bytes" else 1.0
    for number, run in enumerate(runs):
        found, colour = curve(run.records, panel), COLOURS[number % len(COLOURS)]
        if found is None:
            axes.plot([], [], color=colour, label=run.name)
            continue
        line, few = found.mean * scale, len(found.step) <= FEW
        if panel.noisy and not few:
            axes.plot(found.step, line, color=colour, linewidth=0.7, alpha=0.3)
            axes.fill_between(found.step, found.low * scale, found.high * scale, color=colour, alpha=0.12, linewidth=0)
            shown.append(np.nanpercentile(line, [1, 99]))
            line = smoothed(found, half_life(runs)) * scale
        axes.plot(
            found.step, line, color=colour, linewidth=1.6, label=run.name, marker="o" if few else "", markersize=3.5
        )
        shown.append(line)
        planned = curve(run.records, PLANNED) if panel.key == "memory" else None
        if planned is not None:
            axes.plot(planned.step, planned.mean * scale, color=colour, linewidth=1.2, linestyle="--")
            shown.append(planned.mean * scale)
    _dress(axes, panel, np.concatenate(shown), any(curve(run.records, PLANNED) for run in runs))


def _dress(axes: Axes, panel: Panel, shown: Values, planned: bool) -> None:
    """Set title, limits and ticks; rare outliers of the faint lines are cut off."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    words = {"nats": " (nats a token)", "bytes": " (GiB" + (", dashed: planned)" if planned else ")")}
    axes.set_title(panel.title + words.get(panel.unit, ""), fontsize=10.5, loc="left")
    low, high = np.nanmin(shown), np.nanmax(shown)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    from_zero = panel.unit in ("bytes", "part", "rate") or panel.key == "lr"
    axes.set_ylim(0 if from_zero and low >= 0 else low - room, high + (0.06 * high or room if from_zero else room))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if panel.unit == "part":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif panel.unit == "rate":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def page(runs: Sequence[RunRecords]) -> str:
    """Return the page."""
    headline = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = {
        "headline": headline,
        "drawn": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "half_life": half_life(runs),
        "tokens": all("tokens" in record for run in runs for record in run.records),
        "panels": [asdict(each) for each in _shown(runs)],
        "runs": [_run(run) for run in runs],
    }
    return framed(
        title=headline,
        text="\n".join(f"{run.name}: {final_line(run.records)}" for run in runs),
        data=data,
        main=(HERE, "curves.html"),
        styles=[(HERE, "curves.css")],
        scripts=[(HERE, "curves_chart.js"), (HERE, "curves.js")],
    )


def _run(run: RunRecords) -> dict[str, Any]:
    loss, _ = final_loss(run.records)
    found = {panel.key: curve(run.records, panel) for panel in (*PANELS, PLANNED)}
    evaluated, memory, last = found["evaluation_loss"], found["memory"], run.records[-1]
    return {
        "name": run.name,
        "steps": last["step"],
        "tokens": last.get("tokens"),
        "loss": _number(loss),
        "best": None if evaluated is None else _number(float(np.nanmin(evaluated.mean))),
        "rate": _median(run, "tokens_per_second"),
        "mfu": _median(run, "mfu"),
        "memory": None if memory is None else float(np.nanmax(memory.high)),
        "seconds": sum(record.get("seconds", 0.0) for record in run.records),
        "curves": {key: _plain(each) for key, each in found.items() if each is not None},
    }


def _median(run: RunRecords, key: str) -> float | None:
    """Return the median: slow steps at the start or beside a checkpoint do not move it."""
    values = [record[key] for record in run.records if key in record]
    return _number(statistics.median(values)) if values else None


def _plain(found: RunCurve) -> dict[str, list[float | None]]:
    """Return a curve as JSON values; low, high and count only if points stand for several steps."""
    keys = ["step", "tokens", "mean", *(["low", "high", "count"] if (found.count > 1).any() else [])]
    return {key: [_number(value) for value in getattr(found, key).tolist()] for key in keys}


def _number(value: float) -> float | None:
    """Round to seven digits; return an integer if it is whole, and None if it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.7g}")


FORMS: dict[str, Callable[[Sequence[RunRecords]], bytes]] = {".png": picture, ".html": lambda runs: page(runs).encode()}
