"""`trueshard plot`: the curves of runs as a PNG and as an HTML page, and the answers of a run as another page, in the
frame and style of the planner's page.
"""

from __future__ import annotations

import datetime
import math
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
from trueshard.train.metrics.jsonl import read_steps
from trueshard.train.metrics.panels import PANELS, RunCurve, RunRecords, Values, curve, half_life, shown_panels
from trueshard.train.metrics.picture import picture
from trueshard.train.metrics.step_metrics import NAME, read_metrics
from trueshard.train.metrics.terminal import final_line, final_mean, has_reward

HERE = "trueshard.train.metrics"


def plot(runs: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Draw the curves of runs into `out`, a `.png` or `.html` file, or into both in a run's folder; return the files.

    Without `out`, a run with answers gets a page of them beside its curves: `samples.html`.
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
    answers = folder / ANSWERS
    if out is None and len(runs) == 1 and answers.exists() and (places := read_steps(answers)):
        targets.append(folder / "samples.html")
        replace_text(targets[-1], answers_page.page(found[0].name, answers, places))
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


def page(runs: Sequence[RunRecords]) -> str:
    """Return the page."""
    headline = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = {
        "headline": headline,
        "drawn": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "half_life": half_life(runs),
        "tokens": all("tokens" in record for run in runs for record in run.records if record["step"]),
        "panels": [asdict(panel) for panel in shown_panels(runs)],
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


BEST: dict[str, Callable[[Values], Any]] = {"evaluation_loss": np.nanmin, "evaluation_reward": np.nanmax}
"""Key of evaluations → how the best is chosen."""


def _run(run: RunRecords) -> dict[str, Any]:
    every = [other for panel in PANELS for other in (panel, *panel.others)]
    found = {panel.key: each for panel in every if (each := curve(run.records, panel)) is not None}
    best = {key: pick(found[key].mean) for key, pick in BEST.items() if key in found}
    rewarded, last = has_reward(run.records), run.records[-1]
    return {
        "name": run.name,
        "steps": last["step"],
        "tokens": last.get("tokens"),
        "reward": _number(final_mean(run.records, "reward")[0]) if rewarded else None,
        "loss": None if rewarded else _number(final_mean(run.records)[0]),
        **{f"best_{key}": _number(float(value)) for key, value in best.items()},
        "rate": _median(run, "tokens_per_second"),
        "mfu": _median(run, "mfu"),
        "memory": float(np.nanmax(found["memory"].high)) if "memory" in found else None,
        "seconds": sum(record.get("seconds", 0.0) for record in run.records),
        "curves": {key: _plain(each) for key, each in found.items()},
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
