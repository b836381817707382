"""The curves of runs as one HTML file, in the frame and the style of the planner's page.

Smoothing, axes and zoom are the reader's: the page has each curve's points, not pictures of them.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Sequence
from typing import Any

from trueshard.planner.showing.frame import SCRIPT, STYLE, framed
from trueshard.train.showing.report import final_line, final_loss
from trueshard.train.showing.runs import PANELS, PLANNED, Curve, Run, Values, curve, half_life

HERE = "trueshard.train.showing"


def page(runs: Sequence[Run]) -> str:
    """The page as text."""
    return framed(
        title=_headline(runs),
        text="\n".join(f"{run.name}: {final_line(run.records)}" for run in runs),
        data=_data(runs),
        main=(HERE, "curves.html"),
        styles=[STYLE, (HERE, "curves.css")],
        scripts=[SCRIPT, (HERE, "curves_chart.js"), (HERE, "curves.js")],
    )


def _headline(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _data(runs: Sequence[Run]) -> dict[str, Any]:
    panels = [panel for panel in PANELS if any(curve(run.records, panel) for run in runs)]
    return {
        "headline": _headline(runs),
        "drawn": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}",
        "half_life": half_life(runs),
        "tokens": all("tokens" in record for run in runs for record in run.records),
        "panels": [{"key": each.key, "title": each.title, "unit": each.unit, "noisy": each.noisy} for each in panels],
        "runs": [_run(run) for run in runs],
    }


def _run(run: Run) -> dict[str, Any]:
    loss, _ = final_loss(run.records)
    found = {panel.key: curve(run.records, panel) for panel in (*PANELS, PLANNED)}
    evaluated = found["evaluation_loss"]
    best = math.nan if evaluated is None else float(evaluated.mean[evaluated.mean == evaluated.mean].min())
    last = run.records[-1]
    return {
        "name": run.name,
        "steps": last["step"],
        "tokens": last.get("tokens"),
        "loss": _number(loss),
        "best": _number(best),
        "rate": _middle(run, "tokens_per_second"),
        "mfu": _middle(run, "mfu"),
        "memory": None if found["memory"] is None else float(found["memory"].high[found["memory"].count > 0].max()),
        "seconds": sum(record.get("seconds", 0.0) for record in run.records),
        "curves": {key: _curve(each) for key, each in found.items() if each is not None},
    }


def _middle(run: Run, key: str) -> float | None:
    """The median: the first steps and those beside a checkpoint do not count for more than others."""
    values = [record[key] for record in run.records if key in record]
    return _number(statistics.median(values)) if values else None


def _curve(found: Curve) -> dict[str, Any]:
    thinned = bool((found.count > 1).any())
    more = {"low": _numbers(found.low), "high": _numbers(found.high), "count": _numbers(found.count)} if thinned else {}
    return {"step": _numbers(found.step), "tokens": _numbers(found.tokens), "mean": _numbers(found.mean)} | more


def _numbers(values: Values) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    """With seven digits, whole where it is; None where it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.7g}")
