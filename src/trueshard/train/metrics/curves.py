"""The curves of runs: which quantities, as which points, smoothed how; `trueshard plot` draws them as a PNG and as a
page in the frame and style of the planner's, and the answers of a run as another page.

- A long run is drawn from intervals of equally many steps: the mean, lowest and highest value of each.
- A step without a value is no point: evaluations are joined by lines, a loss that was not finite leaves a gap.
"""

from __future__ import annotations

import datetime
import io
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trueshard.errors import UserError
from trueshard.files import replace_text, replacing
from trueshard.planner.report.frame import framed
from trueshard.text import nearest
from trueshard.train.metrics import answers
from trueshard.train.metrics.answers import rounded
from trueshard.train.metrics.step_metrics import NAME, read_metrics, read_steps
from trueshard.train.metrics.terminal import final_line, final_mean, has_reward

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]
Record = dict[str, Any]

POINTS = 1200
"""Maximum points of a curve: about the columns of a wide screen."""
FEW = 30
"""Maximum points that are drawn as dots and not smoothed."""
COLOURS = ("#2f5fd0", "#d9730d", "#128a63", "#c23b80", "#7a57d1", "#8a6d1a", "#0f8aa8", "#c0392b")
"""Colours of runs, in turn."""


class RunRecords(NamedTuple):
    """The records of a run that has taken steps."""

    name: str  # unique among the runs
    records: list[Record]


@dataclass(frozen=True)
class RunCurve:
    """One quantity of one run; float64 [points] each."""

    step: Values
    tokens: Values  # read by then; NaN if unknown
    mean: Values
    low: Values
    high: Values
    count: Values  # steps in each point


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    key: str
    title: str
    unit: str = ""  # nats, bytes, part (of 1), rate, count, signed (never on a logarithmic scale) or empty
    noisy: bool = True  # values vary from step to step, and are smoothed
    dashed: str = ""  # key of a second, dashed line
    dashed_name: str = ""
    band: str = ""  # key of the half width of a band around the line
    log: bool = False  # always on a logarithmic scale, where a value is positive

    @property
    def note(self) -> str:
        """Words beside the title."""
        return "band: ± standard deviation" if self.band else f"dashed: {self.dashed_name}" if self.dashed else ""


LOSS = Panel("loss", "Loss", "nats")
REWARD = Panel("reward", "Reward", "signed", band="reward_std")
PANELS = (
    REWARD,
    Panel("evaluation_reward", "Evaluation reward", "signed", noisy=False),
    LOSS,
    Panel("evaluation_loss", "Evaluation loss", "nats", noisy=False),
    Panel("rewards_margins", "Reward of the chosen over that of the rejected answer", "signed"),
    Panel("rewards_accuracies", "Pairs with the chosen answer ahead", "part"),
    Panel("length_mean", "Length of an answer, tokens", "count"),
    Panel("entropy", "Entropy", "nats"),
    Panel("mismatch_mean", "Mismatch of log-probabilities, mean", "nats", True, "mismatch_max", "largest", log=True),
    Panel("kl_reference", "Divergence from the reference", "nats"),
    Panel("clipped_high", "Clipped above, part of tokens", "part", True, "clipped_low", "below"),
    Panel("grad_norm", "Gradient norm"),
    Panel("lr", "Learning rate", noisy=False),
    Panel("tokens_per_second", "Tokens a second, all ranks", "rate"),
    Panel("mfu", "Model FLOPs utilisation", "part"),
    Panel("memory", "Memory of the fullest rank", "bytes", False, "memory_planned", "planned"),
    Panel("data_wait", "Waiting for data, part of the step", "part"),
)


def _panels(runs: Sequence[RunRecords]) -> list[Panel]:
    """Return ``PANELS``, and one for each other metric of an evaluation that is not of rewards."""
    keys = {key for run in runs for record in run.records for key in record if key.startswith("evaluation_")}
    more = sorted(keys - {panel.key for panel in PANELS}) if "evaluation_reward" not in keys else []
    shown = [key for key in more if not key.endswith(("count", "perplexity"))]
    return [*PANELS, *(Panel(key, f"Evaluation: {key[11:]}", "signed", noisy=False) for key in shown)]


def shown_panels(runs: Sequence[RunRecords]) -> list[Panel]:
    """Return the panels that a run has values for; what no run has is left out of them, too."""
    rewarded = any(has_reward(run.records) for run in runs)

    def curves_of(key: str) -> list[RunCurve]:
        return [points for run in runs if (points := curve(run.records, key)) is not None]

    panels = []
    for panel in _panels(runs):
        if not (curves := curves_of(panel.key)):
            continue
        if rewarded and panel is LOSS:
            panel = replace(panel, title="Policy loss", unit="signed")
        if not curves_of(panel.dashed):
            panel = replace(panel, dashed="", dashed_name="")
        band = panel.band if curves_of(panel.band) else ""
        log = panel.log and any((points.mean > 0).any() for points in curves)
        panels.append(replace(panel, band=band, log=log))
    return panels


def _value(record: Record, key: str) -> float | None:
    """Return the value of a step, or None if it has none."""
    if key == "memory":
        return record.get("memory_reserved", record.get("memory_allocated"))
    if key == "data_wait" and key in record:
        return record[key] / record["seconds"] if record.get("seconds") else None
    return record.get(key)


def curve(records: Sequence[Record], key: str, points: int = POINTS) -> RunCurve | None:
    """Return a quantity over the steps, in at most ``points``; None if no step has it."""
    import pandas

    before = {0: 0}  # step → tokens, of an evaluation before training
    steps = [
        (record["step"], record.get("tokens", before.get(record["step"])), _value(record, key)) for record in records
    ]
    rows = pandas.DataFrame([row for row in steps if row[2] is not None], columns=["step", "tokens", "value"])
    rows = rows.astype(float).replace([math.inf, -math.inf], math.nan)
    if not rows.value.notna().any():
        return None
    intervals = np.linspace(0, min(points, len(rows)), len(rows), endpoint=False).astype(np.int64)
    groups = rows.groupby(intervals)
    last, value = groups[["step", "tokens"]].last(), groups.value
    columns = (last.step, last.tokens, value.mean(), value.min(), value.max(), value.count())
    return RunCurve(*(column.to_numpy(np.float64) for column in columns))


def smoothed(curve: RunCurve, half_life: float) -> Values:
    """Return the weighted mean around each point; a point `half_life` steps away has weight 1/2. NaN stays.

    Near the beginning the half-life is a tenth of the steps so far, so that the line follows a steep fall.
    """
    lives = np.minimum(half_life, np.maximum(curve.step - curve.step[0], 1) / 10)
    places = np.cumsum(np.diff(curve.step, prepend=curve.step[0]) / lives)  # in half-lives
    nearness = 0.5 ** np.abs(places[:, None] - places)  # [points, points]
    finite = np.isfinite(curve.mean)
    weights = np.where(finite, curve.count, 0.0)
    sums = np.where(finite, curve.mean, 0.0) * weights
    return np.divide(nearness @ sums, nearness @ weights, out=np.full_like(sums, np.nan), where=finite)


def half_life(runs: Sequence[RunRecords]) -> int:
    """Return the steps to smooth over: of 1, 2, 5, 10, 20, …, the nearest to a hundredth of the longest run."""
    steps = max(len(run.records) for run in runs)
    choices = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    return min(choices, key=lambda choice: abs(math.log(choice / max(steps / 100, 0.5))))


# The picture


def picture(runs: Sequence[RunRecords]) -> bytes:
    """Return a PNG with each panel that a run has values for, and a colour for each run."""
    from matplotlib.figure import Figure

    panels = shown_panels(runs)
    rows: list[Any] = [["0", "0"], *([str(n), str(min(n + 1, len(panels) - 1))] for n in range(1, len(panels), 2))]
    figure = Figure(figsize=(12, 3.1 * len(rows) + 0.8), layout="constrained")
    places = figure.subplot_mosaic(rows, height_ratios=[1.4] + [1.0] * (len(rows) - 1))
    for number, panel in enumerate(panels):
        _draw(places[str(number)], panel, runs)
    if len(runs) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(runs), 4), frameon=False)
    figure.savefig(buffer := io.BytesIO(), dpi=130, format="png")
    return buffer.getvalue()


def draw_result(records: Sequence[Record], entropy: float | None, folder: Path) -> Path:
    """Draw the loss of steps and evaluations, and the unigram entropy of the text in nats, into `loss.png`; where
    there is a reward, that into `reward.png`. Return the file.
    """
    from matplotlib.figure import Figure

    panel = REWARD if has_reward(records) else LOSS
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, panel, [RunRecords(panel.key, list(records))])
    if (evaluated := curve(records, f"evaluation_{panel.key}")) is not None:
        axes.plot(evaluated.step, evaluated.mean, "o-", markersize=4, color=COLOURS[1], label="evaluation")
    if entropy is not None and panel is LOSS:
        axes.axhline(entropy, linestyle="--", color="gray", label=f"unigram entropy of the text, {entropy:.2f}")
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.03 * entropy))
    _mark_incidents(axes, records)
    axes.legend()
    with replacing(file := folder / f"{panel.key}.png") as scratch:
        figure.savefig(scratch, dpi=150, format="png")
    return file


def _mark_incidents(axes: Axes, records: Sequence[Record]) -> None:
    """Draw a line at each step before which a process was lost, or that was taken again."""
    for number, step in enumerate(record["step"] for record in records if "incident" in record):
        axes.axvline(step, color=COLOURS[-1], linewidth=0.8, linestyle=":", label=None if number else "incident")


def _draw(axes: Axes, panel: Panel, runs: Sequence[RunRecords]) -> None:
    shown: list[Values] = []
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        if (points := curve(run.records, panel.key)) is None:
            axes.plot([], [], color=colour, label=run.name)
        else:
            shown += _draw_run(axes, panel, run, points, colour, half_life(runs))
    _dress(axes, panel, np.concatenate(shown))


def _draw_run(axes: Axes, panel: Panel, run: RunRecords, points: RunCurve, colour: str, life: float) -> list[Values]:
    """Draw the curve of a run, with its band and its dashed line; return the values that must be seen."""
    scale, is_short = 2.0**-30 if panel.unit == "bytes" else 1.0, len(points.step) <= FEW

    def line_of(curve: RunCurve) -> Values:
        return scale * (smoothed(curve, life) if panel.noisy and len(curve.step) > FEW else curve.mean)

    line = line_of(points)
    shown = [line]
    if (band := curve(run.records, panel.band)) is not None:
        half, middle = line_of(band), np.interp(band.step, points.step, line)
        axes.fill_between(band.step, middle - half, middle + half, color=colour, alpha=0.15, linewidth=0)
        shown += [middle - half, middle + half]
    if panel.noisy and not is_short:
        axes.plot(points.step, points.mean * scale, color=colour, linewidth=0.7, alpha=0.3)
        if band is None:
            low, high = points.low * scale, points.high * scale
            axes.fill_between(points.step, low, high, color=colour, alpha=0.12, linewidth=0)
        shown.append(np.nanpercentile(points.mean * scale, [1, 99]))
    marker = "o" if is_short else ""
    axes.plot(points.step, line, color=colour, linewidth=1.6, label=run.name, marker=marker, markersize=3.5)
    if (dashed := curve(run.records, panel.dashed)) is not None:
        axes.plot(dashed.step, line_of(dashed), color=colour, linewidth=1.2, linestyle="--")
        shown.append(line_of(dashed))
    return shown


def _dress(axes: Axes, panel: Panel, shown: Values) -> None:
    """Set title, limits and ticks; rare outliers of the faint lines are cut off."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    words = ", ".join(filter(None, [{"nats": "nats a token", "bytes": "GiB"}.get(panel.unit), panel.note]))
    axes.set_title(panel.title + (f" ({words})" if words else ""), fontsize=10.5, loc="left")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=9, which="both")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.log:
        positive = shown[shown > 0]
        axes.set_yscale("log")
        axes.set_ylim(positive.min() / 1.3, positive.max() * 1.3)
        return
    low, high = np.nanmin(shown), np.nanmax(shown)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    from_zero = panel.unit in ("bytes", "part", "rate", "count") or panel.key == "lr"
    axes.set_ylim(0 if from_zero and low >= 0 else low - room, high + (0.06 * high or room if from_zero else room))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if panel.unit == "part":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif panel.unit == "rate":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


# The command


def plot(runs: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Draw the curves of runs into `out`, a `.png` or `.html` file, or into both in a run's folder; return the files.

    Without `out`, a run with answers gets a page of them beside its curves: `samples.html`.
    Raises `UserError` for a run that does not exist, has no step or is damaged, and a file that cannot be written.
    """
    if out is not None and out.suffix.lower() not in FORMS:
        raise UserError(f"--out {out}: its name must end in {' or '.join(FORMS)}")
    records, first = read_runs(runs), runs[0].expanduser()
    folder = Path() if len(runs) > 1 else first if first.is_dir() else first.parent
    targets = [folder / f"curves{suffix}" for suffix in FORMS] if out is None else [out.expanduser()]
    if not (into := targets[0].absolute().parent).is_dir() or not os.access(into, os.W_OK):
        raise UserError(f"--out {targets[0]}: there is no folder {into} that can be written to")
    for target in targets:
        with replacing(target) as scratch:
            scratch.write_bytes(FORMS[target.suffix.lower()](records))
    samples = folder / answers.NAME
    if out is None and len(runs) == 1 and samples.exists() and (places := read_steps(samples)):
        targets.append(folder / "samples.html")
        replace_text(targets[-1], answers.page(records[0].name, samples, places))
    return targets


def read_runs(paths: Sequence[Path]) -> list[RunRecords]:
    """Read runs, each named by its path below the folder of all. Raises `UserError` for a wrong one."""
    runs = []
    for path, (name, file) in zip(paths, named([_file(path) for path in paths]), strict=True):
        records = read_metrics(file)
        if not records:
            raise UserError(f"{path} has taken no step yet; try again when it has")
        runs.append(RunRecords(name, records))
    return runs


def named(files: Sequence[Path]) -> list[tuple[str, Path]]:
    """Name the files of runs by their folders, below that of all. Raises `UserError` for one that is given twice."""
    if twice := [file for i, file in enumerate(files) if file in files[:i]]:
        raise UserError(f"{twice[0].parent} is given twice; leave one out")
    common = os.path.commonpath([file.parents[1] for file in files])
    return [(file.parent.relative_to(common).as_posix(), file) for file in files]


def _file(path: Path) -> Path:
    file = path.expanduser().resolve()
    if file.is_dir() and not (file / NAME).exists():
        below = sorted(run.parent.name for run in file.glob(f"*/{NAME}"))
        inside = f"; runs in it: {', '.join(below[:5])}" if below else ""
        raise UserError(f"{path} has no {NAME}: it is not a run's folder, or the run has taken no step{inside}")
    if not file.exists():
        beside = [run.name for run in file.parent.glob("*") if run.is_dir() or run.suffix == ".jsonl"]
        near = nearest(file.name, beside)
        raise UserError(f"{path} does not exist.{near} A run is its folder, or the {NAME} in it")
    return file / NAME if file.is_dir() else file


def page(runs: Sequence[RunRecords], live: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the page; ``live``: what a page that is served has of each run beyond its curves."""
    data = page_data(runs, live)
    text = "\n".join(f"{run.name}: {final_line(run.records)}" for run in runs)
    files = ("curves.html", "curves.css", "curves_chart.js", "curves.js")
    return framed(data["headline"], text, data, __package__, *files, is_served=bool(live))


def page_data(runs: Sequence[RunRecords], live: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return what the page draws, as plain data."""
    return {
        "headline": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        "drawn": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "half_life": half_life(runs),
        "tokens": all("tokens" in record for run in runs for record in run.records if record["step"]),
        "panels": [{**asdict(panel), "note": panel.note} for panel in shown_panels(runs)],
        "live": bool(live),
        "runs": [_run(run) | dict(more) for run, more in zip(runs, live or [{}] * len(runs), strict=True)],
    }


def _run(run: RunRecords) -> dict[str, Any]:
    keys = {key for panel in _panels([run]) for key in (panel.key, panel.dashed, panel.band)}
    curves = {key: points for key in keys if (points := curve(run.records, key)) is not None}
    bests = {"evaluation_loss": np.nanmin, "evaluation_reward": np.nanmax}
    rewarded, last = has_reward(run.records), run.records[-1] if run.records else {"step": 0}
    return {
        "name": run.name,
        "steps": last["step"],
        "tokens": last.get("tokens"),
        "reward": rounded(final_mean(run.records, "reward")[0], 7) if rewarded else None,
        "loss": None if rewarded else rounded(final_mean(run.records)[0], 7),
        **{f"best_{key}": rounded(float(best(curves[key].mean)), 7) for key, best in bests.items() if key in curves},
        "rate": _median(run, "tokens_per_second"),
        "mfu": _median(run, "mfu"),
        "memory": float(np.nanmax(curves["memory"].high)) if "memory" in curves else None,
        "seconds": sum(record.get("seconds", 0.0) for record in run.records),
        "incidents": [[record["step"], record["incident"]] for record in run.records if "incident" in record],
        "curves": {key: _plain(points) for key, points in sorted(curves.items())},
    }


def _median(run: RunRecords, key: str) -> float | None:
    """Return the median: slow steps at the start or beside a checkpoint do not move it."""
    values = [record[key] for record in run.records if key in record]
    return rounded(statistics.median(values), 7) if values else None


def _plain(points: RunCurve) -> dict[str, list[float | None]]:
    """Return a curve as JSON values; low, high and count only if points stand for several steps."""
    keys = ["step", "tokens", "mean", *(["low", "high", "count"] if (points.count > 1).any() else [])]
    return {key: [rounded(value, 7) for value in getattr(points, key).tolist()] for key in keys}


FORMS: dict[str, Callable[[Sequence[RunRecords]], bytes]] = {".png": picture, ".html": lambda runs: page(runs).encode()}
