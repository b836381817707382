"""A study as one HTML file: memory over the step, its time line, alternatives, the largest tensors at the peak."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trueshard.planner import ledger
from trueshard.planner.ledger import Curve, Peak
from trueshard.planner.report import report, thinning
from trueshard.planner.report.compare import Collapsed, collapse
from trueshard.planner.report.frame import SHOWING, framed
from trueshard.planner.trace import Allocation, Kind, Place
from trueshard.planner.workload import Study
from trueshard.text import size

STACK: tuple[Kind, ...] = (
    *("parameters", "optimizer", "inputs"),
    *("activations", "gradients", "gathered", "communication", "temporary"),
)
"""Kinds from the bottom up: those that stay, then those that come and go."""

BUCKETS = 1500
"""Of the memory curve; each keeps its highest and its lowest value."""
BANDS = 36
"""Units that the curve tells apart; of more, neighbours are merged."""
SPANS = 6000
"""Of the time line; of more, short neighbours of one unit are merged."""
TENSORS = 25


def page(study: Study) -> str:
    """Return the page as text."""
    return framed(
        title=report.headline(study.forecast),
        text=report.text(study),
        data=_data(study),
        main=(SHOWING, "page.html"),
        styles=[],
        scripts=[(SHOWING, name) for name in ("page_step.js", "page_draw.js", "page_tables.js")],
    )


def _data(study: Study) -> dict[str, Any]:
    forecast = study.forecast
    live = ledger.curve(study.trace)
    peak = ledger.peak(study.trace, live)
    mine, *others = report.every_plan(study)
    return {
        "headline": report.headline(forecast),
        "settings": report.settings(study),
        "fits": forecast.fits,
        "verdict": report.verdict(forecast),
        "tiles": _tiles(study),
        "reserved": forecast.peak_reserved_bytes,
        "budget": forecast.budget_bytes,
        "seconds": study.timeline.seconds,
        "memory": _memory(study, live, peak),
        "lanes": thinning.lanes(study.trace, study.timeline, SPANS),
        "phases": thinning.phases(study.timeline),
        "alternatives": [{**mine, "words": "This plan"}, *others],
        "tensors": _tensors(study, peak),
        "units": report.unit_rows(study),
        "reasons": list(dict.fromkeys(study.reasons)),
        "assumptions": list(dict.fromkeys(study.assumptions)),
    }


def _tiles(study: Study) -> list[dict[str, Any]]:
    forecast = study.forecast
    step = max(forecast.step_seconds, 1e-12)
    where = f"in {forecast.peak_phase}" + (f" of {forecast.peak_unit}" if forecast.peak_unit else "")
    exposed = forecast.exposed_communication_seconds
    rows = [
        ("Live peak", size(forecast.peak_live_bytes), where),
        ("Reserved peak", size(forecast.peak_reserved_bytes), f"of {size(forecast.budget_bytes)}"),
        ("Step", report.duration(forecast.step_seconds), f"{report.duration(forecast.compute_seconds)} computing"),
        ("Tokens a second", f"{forecast.tokens_per_second_per_rank:,.0f}", "a rank"),
        ("MFU", f"{forecast.mfu:.1%}", "recomputation not counted"),
        ("Received", size(forecast.bytes_received_per_step), f"a rank and step; {exposed / step:.1%} of time waiting"),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in rows]


def _memory(study: Study, live: Curve, peak: Peak) -> dict[str, Any]:
    """Return the curve at the positions kept; parts as ``[index, bytes, index, bytes, ...]`` where they change."""
    positions = thinning.positions(live.total, BUCKETS)
    places = [study.trace.events[p].place if p >= 0 else Place("between", "") for p in positions.tolist()]
    units = list(dict.fromkeys(place.unit for place in places))
    phases = list(dict.fromkeys(place.phase for place in places))
    return {
        "seconds": np.round(thinning.seconds_at(study.timeline, positions), 9).tolist(),
        "unit_names": units,
        "phase_names": phases,
        "unit": [units.index(place.unit) for place in places],
        "phase": [phases.index(place.phase) for place in places],
        "changes": len(live.total.positions),
        "kinds": [
            {"name": kind, "bytes": thinning.runs(live.by_kind[kind].at(positions))}
            for kind in STACK
            if live.by_kind[kind].bytes.any()
        ],
        "units": [
            {
                "name": band.name or "(root)",
                "bytes": thinning.runs(np.sum([live.by_unit[name].at(positions) for name in band.items], axis=0)),
            }
            for band in _bands(study, live)
        ],
        "peak": int(np.searchsorted(positions, peak.position)),
    }


def _bands(study: Study, live: Curve) -> list[Collapsed[str]]:
    """Return units in the plan's order, merged so that there are at most ``BANDS``."""
    names = [unit.name for unit in study.plan.units if unit.name in live.by_unit]
    names += [name for name in live.by_unit if name not in set(names)]
    each = max(1, math.ceil(len(names) / BANDS))
    found = []
    for start in range(0, len(names), each):
        band = names[start : start + each]
        rows = collapse(band, lambda name: name)
        label = rows[0].name if len(rows) == 1 else ", ".join(row.name or "(root)" for row in rows)
        found.append(Collapsed(label, tuple(band)))
    return found


def _tensors(study: Study, peak: Peak) -> list[dict[str, Any]]:
    """Return the largest tensors at the peak, equal ones of repeated units as one: by one, and by all together."""

    def what(each: Allocation) -> str:
        return each.what.removeprefix(f"{each.unit}.") if each.unit else each.what

    def same(each: Allocation) -> tuple[Any, ...]:
        return (what(each), each.kind, each.shape, each.dtype, each.bytes)

    rows = collapse(ledger.alive(study.trace, peak.position), lambda each: each.unit, same)
    by_each = sorted(rows, key=lambda row: (-row.items[0].bytes, -len(row.items)))
    by_sum = sorted(rows, key=lambda row: -row.items[0].bytes * len(row.items))
    chosen = {id(row): row for row in (*by_each[:TENSORS], *by_sum[:TENSORS])}
    return [
        {
            "what": what(row.items[0]) or "(unnamed)",
            "unit": row.name or "(root)",
            "kind": row.items[0].kind,
            "shape": " × ".join(f"{n:,}" for n in row.items[0].shape),
            "dtype": row.items[0].dtype,
            "bytes": row.items[0].bytes,
            "count": len(row.items),
        }
        for row in chosen.values()
        if row.items[0].bytes
    ]
