"""Plans side by side on one page: their forecasts, memory by kind, parts of a step, settings and units that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from trueshard.planner.report import compare, summary
from trueshard.planner.report.frame import SHOWING, framed
from trueshard.planner.report.page import STACK
from trueshard.plans import Forecast, Plan
from trueshard.text import size


def page(plans: Sequence[tuple[str, Plan]]) -> str:
    """Return the page as text; ``plans`` are (name, plan), two or more.

    Raises:
        ValueError: a plan has no forecast; it is named.
    """
    for name, plan in plans:
        if plan.forecast is None:
            raise ValueError(
                f"{name} has no forecast to compare; `trueshard plan MODEL --out FILE` writes plans with one"
            )
    forecasts = [plan.forecast for _, plan in plans if plan.forecast is not None]
    names = [name for name, _ in plans]
    differences = [[name, compare.diff(plans[0][1], plan)] for name, plan in plans[1:]]
    return framed(
        title=f"{forecasts[0].model}: {' and '.join(names)}",
        text="\n\n".join(f"{names[0]} → {name}\n{text}" for name, text in differences),
        data={
            "headline": f"{forecasts[0].model}: plans compared",
            "names": names,
            "plans": list(map(_plan, forecasts)),
            "figures": _figures(forecasts),
            "settings": _settings([plan for _, plan in plans]),
            "differences": differences,
        },
        main=(SHOWING, "compare.html"),
        styles=[],
        scripts=[(SHOWING, "compare.js")],
    )


def _plan(forecast: Forecast) -> dict[str, Any]:
    waiting = forecast.exposed_communication_seconds
    rest = max(forecast.step_seconds - forecast.compute_seconds - waiting, 0.0)
    return {
        "where": summary.headline(forecast),
        "verdict": summary.verdict(forecast),
        "fits": forecast.fits,
        "live": forecast.peak_live_bytes,
        "reserved": forecast.peak_reserved_bytes,
        "budget": forecast.budget_bytes,
        "kinds": [[kind, forecast.peak_by_kind.get(kind, 0)] for kind in STACK],
        "seconds": forecast.step_seconds,
        "parts": [["computing", forecast.compute_seconds], ["waiting", waiting], ["rest", rest]],
    }


def _figures(forecasts: Sequence[Forecast]) -> list[dict[str, Any]]:
    """Return rows of a table: a label, a cell of each plan, and by how much the last differs from the first."""
    counted = forecasts[0].counted.capitalize()
    figures: list[tuple[str, str, Callable[[Any], str]]] = [
        ("Live peak", "peak_live_bytes", size),
        ("Reserved peak", "peak_reserved_bytes", size),
        ("Received in a step", "bytes_received_per_step", size),
        ("Step", "step_seconds", summary.duration),
        (f"{counted} a second and rank", "tokens_per_second_per_rank", "{:,.0f}".format),
        ("MFU", "mfu", "{:.1%}".format),
    ]
    rows = []
    for label, field, words in figures:
        values = [getattr(forecast, field) for forecast in forecasts]
        change = f"{values[-1] / values[0] - 1:+.1%}" if values[0] else ""
        rows.append({"label": label, "cells": list(map(words, values)), "change": change})
    return rows


_OF_FORECAST = ("hardware", "ranks", "sequence", "microbatch", "accumulation", "optimizer")
"""Settings of the job, which are the forecast's."""


def _settings(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Return the settings that differ; the batch is among them."""
    names = [field.name for field in dataclasses.fields(Plan) if field.name not in compare.NO_SETTINGS]
    columns = [(name, [getattr(plan, name) for plan in plans]) for name in names]
    columns += [(f"{name} (forecast)", [getattr(plan.forecast, name) for plan in plans]) for name in _OF_FORECAST]
    rows = [{"label": label, "cells": list(map(str, values))} for label, values in columns]
    return [row for row in rows if len(set(row["cells"])) > 1]
