"""A study as one HTML file: memory over the step, its time line, alternatives, the largest tensors at the peak.

What is drawn is thinned out: peaks are kept, and streams stay as busy as they were. Another page has plans side by
side: their forecasts, and the settings and units that differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueshard.planner import ledger
from trueshard.planner.ledger import Curve, Numbers, Peak, Series
from trueshard.planner.report import compare, summary
from trueshard.planner.report.compare import Collapsed, collapse
from trueshard.planner.report.frame import framed
from trueshard.planner.timeline import Span, Timeline
from trueshard.planner.trace import Allocation, Communication, EventPlace, Kernel, Kind, Trace
from trueshard.planner.workload import Study
from trueshard.plans import Plan

STACK: tuple[Kind, ...] = (
    *("parameters", "optimizer", "inputs"),
    *("activations", "gradients", "gathered", "communication", "temporary"),
)
"""Kinds from the bottom up: those that stay, then those that come and go."""

BUCKETS = 1500
"""Buckets of the memory curve; each keeps its highest and its lowest value."""
BANDS = 36
"""Units that the curve tells apart; of more, neighbours are merged."""
SPANS = 6000
"""Spans of the time line; of more, short neighbours of one unit are merged."""
TENSORS = 25


def page(study: Study, grid: dict[str, Any] | None = None) -> str:
    """Return the page as text; ``grid``: the points of its sliders, of ``choose_plan.grid``."""
    files = ("page.html", "page_step.js", "page_draw.js", "page_grid.js", "page_tables.js")
    data = _data(study) | {"grid": grid}
    return framed(summary.headline(study.forecast), summary.text(study), data, __package__, *files)


def _data(study: Study) -> dict[str, Any]:
    forecast = study.forecast
    live = ledger.curve(study.trace)
    peak = ledger.peak(study.trace)
    this, *others = summary.every_plan(study)
    figures = summary.figures(forecast)
    if study.bill is not None:
        run = f"for {study.bill.amount:,.0f} {forecast.counted}"
        figures += [(name, 0.0, words, run) for name, words in study.bill.figures().items() if words]
    return {
        "headline": summary.headline(forecast),
        "counted": forecast.counted,
        "settings": summary.settings(study),
        "fits": forecast.fits,
        "verdict": summary.verdict(forecast),
        "tiles": [{"label": label, "value": words, "note": note} for label, _, words, note in figures],
        "reserved": forecast.peak_reserved_bytes,
        "budget": forecast.budget_bytes,
        "seconds": study.timeline.seconds,
        "memory": _memory(study, live, peak),
        "lanes": lanes(study.trace, study.timeline, SPANS),
        "gaps": gaps(study.timeline),
        "seconds_of_step": forecast.step_seconds,
        "parts": time_parts(study),
        "phases": phases(study.timeline),
        "imbalances": summary.imbalance_rows(study),
        "steps": summary.phase_rows(study),
        "steps_title": summary.phases_title(study),
        "alternatives": [{**this, "words": "This plan"}, *others],
        "tensors": _tensors(study, peak),
        "units": summary.unit_rows(study),
        "failures": list(study.failures.sentences if study.failures else ()),
        "reasons": list(dict.fromkeys(study.reasons)),
        "assumptions": list(dict.fromkeys(study.assumptions)),
    }


def _memory(study: Study, live: Curve, peak: Peak) -> dict[str, Any]:
    """Return the curve at the positions kept; parts as ``[index, bytes, index, bytes, ...]`` where they change."""
    kept = positions(live.total, BUCKETS)
    places = [study.trace.events[p].place if p >= 0 else EventPlace("between", "") for p in kept.tolist()]
    units = list(dict.fromkeys(place.unit for place in places))
    phases = list(dict.fromkeys(place.phase for place in places))
    return {
        "seconds": np.round(seconds_at(study.timeline, kept), 9).tolist(),
        "unit_names": units,
        "phase_names": phases,
        "unit": [units.index(place.unit) for place in places],
        "phase": [phases.index(place.phase) for place in places],
        "changes": len(live.total.positions),
        "kinds": [
            {"name": kind, "bytes": runs(live.by_kind[kind].at(kept))}
            for kind in STACK
            if live.by_kind[kind].bytes.any()
        ],
        "units": [
            {
                "name": band.name or "(root)",
                "bytes": runs(np.sum([live.by_unit[name].at(kept) for name in band.items], axis=0)),
            }
            for band in _bands(study, live)
        ],
        "peak": int(np.searchsorted(kept, peak.position)),
    }


def _bands(study: Study, live: Curve) -> list[Collapsed[str]]:
    """Return units in the plan's order, merged so that there are at most ``BANDS``."""
    names = [unit.name for unit in study.plan.units if unit.name in live.by_unit]
    names += [name for name in live.by_unit if name not in set(names)]
    merged = max(1, math.ceil(len(names) / BANDS))
    bands = []
    for start in range(0, len(names), merged):
        band = names[start : start + merged]
        rows = collapse(band, lambda name: name)
        label = rows[0].name if len(rows) == 1 else ", ".join(row.name or "(root)" for row in rows)
        bands.append(Collapsed(label, tuple(band)))
    return bands


def _tensors(study: Study, peak: Peak) -> list[dict[str, Any]]:
    """Return the largest tensors at the peak, equal ones of repeated units as one: by one, and by all together."""

    def what(held: Allocation) -> str:
        return held.what.removeprefix(f"{held.unit}.") if held.unit else held.what

    def same(held: Allocation) -> tuple[Any, ...]:
        return (what(held), held.kind, held.shape, held.dtype, held.bytes)

    rows = collapse(ledger.alive(study.trace, peak.position), lambda allocation: allocation.unit, same)
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


# Thinning


def positions(curve: Series, buckets: int) -> Numbers:
    """Return a curve's positions: all, or the first, the last, and the highest and lowest of each bucket."""
    count = len(curve.positions)
    if count <= 2 * buckets:
        return curve.positions
    edges = np.linspace(0, count, buckets + 1).astype(np.int64)
    keep = {0, count - 1}
    for start, end in itertools.pairwise(edges.tolist()):
        part = curve.bytes[start:end]
        keep |= {int(start + part.argmax()), int(start + part.argmin())}
    return curve.positions[sorted(keep)]


def runs(values: Numbers) -> list[int]:
    """Return ``[index, value, index, value, ...]`` where a sequence changes, its first value included."""
    changed = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return np.stack([changed, values[changed]], axis=1).reshape(-1).tolist()


def seconds_at(timeline: Timeline, at: Numbers) -> NDArray[np.float64]:
    """Return when the compute stream reaches positions of the trace: the end of the last kernel before each."""
    compute = sorted((span.event, span.end) for span in timeline.spans if span.stream == "compute")
    events = np.array([event for event, _ in compute], np.int64)
    ends = np.maximum.accumulate(np.array([0.0, *(end for _, end in compute)]))
    return ends[np.searchsorted(events, at, side="left")]


def phases(timeline: Timeline) -> list[dict[str, Any]]:
    """Return stretches of the compute stream in one phase; ``between`` is left out."""
    spans = [span for span in timeline.spans if span.stream == "compute" and span.phase != "between"]
    stretches = (list(stretch) for _, stretch in itertools.groupby(spans, lambda span: span.phase))
    return [{"name": spans[0].phase, "start": spans[0].start, "end": spans[-1].end} for spans in stretches]


def time_parts(study: Study) -> list[dict[str, Any]]:
    """Return ``name``, ``seconds`` and ``gap`` of the parts that add up to a step: computing by group, then gaps."""
    computing: dict[str, float] = defaultdict(float)
    for span in study.timeline.spans:
        if span.stream == "compute" and type(study.trace.events[span.event]) is Kernel:
            computing[_group(study.trace, span)] += span.end - span.start
    scale = study.forecast.compute_seconds / (sum(computing.values()) or 1.0)
    rows: list[tuple[str, float, bool]] = [(name, seconds * scale, False) for name, seconds in computing.items()]
    kinds = {"waiting": "waiting", "host": "host", "other ranks": "ranks"}
    rows += [(kinds[name], seconds, True) for name, seconds, _ in summary.time_parts(study) if name in kinds]
    return [{"name": name, "seconds": seconds, "gap": gap} for name, seconds, gap in rows if seconds > 0.0]


def gaps(timeline: Timeline) -> list[list[Any]]:
    """Return ``[kind, start, end]`` for the times in which nothing computes; short neighbours of a kind are merged."""
    shortest = timeline.seconds / 16384
    merged: list[list[Any]] = []
    for gap in timeline.gaps:
        last = merged[-1] if merged else None
        if last is not None and last[0] == gap.kind and gap.start - last[2] <= shortest:
            last[2] = round(gap.end, 9)
        else:
            merged.append([gap.kind, round(gap.start, 9), round(gap.end, 9)])
    return merged if len(merged) <= SPANS else [gap for gap in merged if gap[2] - gap[1] > shortest]


def lanes(trace: Trace, timeline: Timeline, limit: int) -> list[dict[str, Any]]:
    """Return a lane for each stream that is used, compute first.

    ``spans`` holds ``[start, end, busy, count, name, group, unit]`` of each, in seconds; the last three are indices
    into ``names``, ``groups`` and ``units``. A group is a phase, ``recompute``, or a stream.
    """
    streams: dict[str, list[_Merged]] = {"compute": []}
    for span in timeline.spans:
        streams.setdefault(span.stream, []).append(_Merged(span, _group(trace, span)))
    for spans in streams.values():
        spans.sort(key=lambda span: span.start)
    return [_lane(stream, _thinned(spans, timeline.seconds, limit)) for stream, spans in streams.items()]


def _group(trace: Trace, span: Span) -> str:
    """Return what gives a span its colour: a phase, ``recompute``, a stream, or a collective of the compute stream."""
    event = trace.events[span.event]
    if isinstance(event, Communication):
        return event.op if event.stream == "compute" else event.stream
    if isinstance(event, Kernel) and event.recomputed and span.stream == "compute":
        return "recompute"
    return span.phase if span.stream == "compute" else span.stream


class _Merged:
    """Neighbouring spans of one stream, group and unit."""

    def __init__(self, span: Span, group: str) -> None:
        self.start, self.end, self.busy, self.count = span.start, span.end, span.end - span.start, 1
        self.group, self.unit = group, span.unit
        self.names: dict[str, float] = defaultdict(float, {span.name: self.busy})

    def take(self, other: _Merged) -> None:
        self.end = max(self.end, other.end)
        self.busy += other.busy
        self.count += other.count
        for name, seconds in other.names.items():
            self.names[name] += seconds

    @property
    def name(self) -> str:
        return max(self.names, key=self.names.__getitem__)


def _thinned(spans: list[_Merged], seconds: float, limit: int) -> list[_Merged]:
    """Merge neighbours that are short and close, longer ones as needed, until at most ``limit`` spans are left."""
    shortest = seconds / 16384
    while len(spans) > limit and shortest < seconds:
        merged = spans[:1]
        for span in spans[1:]:
            last = merged[-1]
            close = span.start - last.end <= shortest
            short = min(span.end - span.start, last.end - last.start) <= shortest
            if close and short and (span.group, span.unit) == (last.group, last.unit):
                last.take(span)
            else:
                merged.append(span)
        spans = merged
        shortest *= 2
    return spans


def _lane(stream: str, spans: Iterable[_Merged]) -> dict[str, Any]:
    words: dict[str, dict[str, int]] = {"name": {}, "group": {}, "unit": {}}
    rows = []
    for span in spans:
        seconds = (round(second, 9) for second in (span.start, span.end, span.busy))
        indices = (indices_of.setdefault(getattr(span, key), len(indices_of)) for key, indices_of in words.items())
        rows.append([*seconds, span.count, *indices])
    return {"stream": stream, "spans": rows} | {f"{key}s": list(indices_of) for key, indices_of in words.items()}


# Plans side by side

_OF_FORECAST = ("hardware", "ranks", "sequence", "microbatch", "accumulation", "optimizer")
"""Settings of the job, which are the forecast's."""


def comparison(plans: Sequence[tuple[str, Plan]]) -> str:
    """Return the page of two plans or more, given with their names; raise ValueError for a plan without a forecast."""
    for name, plan in plans:
        if plan.forecast is None:
            raise ValueError(
                f"{name} has no forecast to compare; `trueshard plan MODEL --out FILE` writes plans with one"
            )
    forecasts = [plan.forecast for _, plan in plans if plan.forecast is not None]
    names = [name for name, _ in plans]
    differences = [[name, compare.diff(plans[0][1], plan)] for name, plan in plans[1:]]
    data = {
        "headline": f"{forecasts[0].model}: plans compared",
        "names": names,
        "plans": [
            {"where": summary.headline(one), "verdict": summary.verdict(one), **dataclasses.asdict(one)}
            for one in forecasts
        ],
        "figures": list(map(summary.figures, forecasts)),
        "settings": [_settings(plan) for _, plan in plans],
        "differences": differences,
    }
    title = f"{forecasts[0].model}: {' and '.join(names)}"
    text = "\n\n".join(f"{names[0]} → {name}\n{text}" for name, text in differences)
    return framed(title, text, data, __package__, "compare.html", "compare.js")


def _settings(plan: Plan) -> dict[str, str]:
    """Return a plan's settings in words; the batch is among them."""
    names = [field.name for field in dataclasses.fields(Plan) if field.name not in compare.NO_SETTINGS]
    of_job = {f"{name} (forecast)": str(getattr(plan.forecast, name)) for name in _OF_FORECAST}
    return {name: str(getattr(plan, name)) for name in names} | of_job
