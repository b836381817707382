"""Plans side by side on one page: their forecasts, memory by kind, parts of a step, settings and units that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
    first = plans[0][1]
    lines = [[name, compare.diff(first, plan)] for name, plan in plans[1:]]
    return framed(
        title=f"{forecasts[0].model}: {' and '.join(names)}",
        text="\n\n".join(f"{names[0]} → {name}\n{text}" for name, text in lines),
        data={
            "headline": f"{forecasts[0].model}: plans compared",
            "names": names,
            "plans": [_plan(each) for each in forecasts],
            "figures": _figures(forecasts),
            "settings": _settings([plan for _, plan in plans]),
            "differences": lines,
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
    rows: list[tuple[str, list[float], list[str]]] = []

    def add(label: str, values: list[float], words: list[str]) -> None:
        rows.append((label, values, words))

    for label, key in (("Live peak", "peak_live_bytes"), ("Reserved peak", "peak_reserved_bytes")):
        counts = [getattr(each, key) for each in forecasts]
        add(label, counts, [size(count) for count in counts])
    received = [each.bytes_received_per_step for each in forecasts]
    add("Received in a step", list(received), [size(count) for count in received])
    seconds = [each.step_seconds for each in forecasts]
    add("Step", seconds, [summary.duration(each) for each in seconds])
    speeds = [each.tokens_per_second_per_rank for each in forecasts]
    add(f"{forecasts[0].counted.capitalize()} a second and rank", speeds, [f"{each:,.0f}" for each in speeds])
    shares = [each.mfu for each in forecasts]
    add("MFU", shares, [f"{each:.1%}" for each in shares])
    return [
        {"label": label, "cells": words, "change": f"{values[-1] / values[0] - 1:+.1%}" if values[0] else ""}
        for label, values, words in rows
    ]


_NOT_SETTINGS = ("units", "replicated", "resolved_for", "forecast")


def _settings(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Return the settings that differ; the batch is among them."""
    every = []
    for plan in plans:
        row = {key: value for key, value in dataclasses.asdict(plan).items() if key not in _NOT_SETTINGS}
        for key in ("hardware", "ranks", "sequence", "microbatch", "accumulation", "optimizer"):
            row[f"{key} (forecast)"] = getattr(plan.forecast, key)
        every.append(row)
    rows = []
    for key in every[0]:
        cells = [str(row.get(key)) for row in every]
        if len(set(cells)) > 1:
            rows.append({"label": key, "cells": cells})
    return rows
