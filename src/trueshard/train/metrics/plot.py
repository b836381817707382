"""`trueshard plot`: the curves of runs as a PNG and as an HTML page, and the answers of a run as another page, in the
frame and style of the planner's page.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trueshard.errors import UserError
from trueshard.files import replace_text, replacing
from trueshard.planner.report.frame import framed
from trueshard.text import nearest
from trueshard.train.metrics import answers_page
from trueshard.train.metrics.answers import NAME as ANSWERS
from trueshard.train.metrics.answers_page import rounded
from trueshard.train.metrics.curves import PANELS, RunCurve, RunRecords, curve, half_life, picture, shown_panels
from trueshard.train.metrics.step_metrics import NAME, read_metrics, read_steps
from trueshard.train.metrics.terminal import final_line, final_mean, has_reward


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
    answers = folder / ANSWERS
    if out is None and len(runs) == 1 and answers.exists() and (places := read_steps(answers)):
        targets.append(folder / "samples.html")
        replace_text(targets[-1], answers_page.page(records[0].name, answers, places))
    return targets


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
    if file.is_dir() and not (file / NAME).exists():
        below = sorted(run.parent.name for run in file.glob(f"*/{NAME}"))
        inside = f"; runs in it: {', '.join(below[:5])}" if below else ""
        raise UserError(f"{path} has no {NAME}: it is not a run's folder, or the run has taken no step{inside}")
    if not file.exists():
        beside = [run.name for run in file.parent.glob("*") if run.is_dir() or run.suffix == ".jsonl"]
        near = nearest(file.name, beside)
        raise UserError(f"{path} does not exist.{near} A run is its folder, or the {NAME} in it")
    return file / NAME if file.is_dir() else file


def page(runs: Sequence[RunRecords]) -> str:
    """Return the page."""
    headline = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = {
        "headline": headline,
        "drawn": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "half_life": half_life(runs),
        "tokens": all("tokens" in record for run in runs for record in run.records if record["step"]),
        "panels": [{**asdict(panel), "note": panel.note} for panel in shown_panels(runs)],
        "runs": [_run(run) for run in runs],
    }
    text = "\n".join(f"{run.name}: {final_line(run.records)}" for run in runs)
    return framed(headline, text, data, __package__, "curves.html", "curves.css", "curves_chart.js", "curves.js")


def _run(run: RunRecords) -> dict[str, Any]:
    keys = {key for panel in PANELS for key in (panel.key, panel.dashed, panel.band)}
    curves = {key: points for key in keys if (points := curve(run.records, key)) is not None}
    bests = {"evaluation_loss": np.nanmin, "evaluation_reward": np.nanmax}
    rewarded, last = has_reward(run.records), run.records[-1]
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
