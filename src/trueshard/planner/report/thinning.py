"""Thin a study out for drawing: peaks are kept, and streams stay as busy as they were."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueshard.planner.ledger import Numbers, Series
from trueshard.planner.timeline import Span, Timeline
from trueshard.planner.trace import Communication, Kernel, Trace


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
    return [{"name": each[0].phase, "start": each[0].start, "end": each[-1].end} for each in stretches]


def lanes(trace: Trace, timeline: Timeline, limit: int) -> list[dict[str, Any]]:
    """Return a lane for each stream that is used, compute first.

    ``spans`` holds ``[start, end, busy, count, name, group, unit]`` of each, in seconds; the last three are indices
    into ``names``, ``groups`` and ``units``. A group is a phase, ``recompute``, or a stream.
    """
    streams: dict[str, list[_Merged]] = {"compute": []}
    for span in timeline.spans:
        event = trace.events[span.event]
        if isinstance(event, Communication):
            group: str = event.stream
        elif isinstance(event, Kernel) and event.recomputed and span.stream == "compute":
            group = "recompute"
        else:
            group = span.phase if span.stream == "compute" else span.stream
        streams.setdefault(span.stream, []).append(_Merged(span, group))
    for stream, spans in streams.items():
        spans.sort(key=lambda each: each.start)
        streams[stream] = _thinned(spans, timeline.seconds, limit)
    return [_lane(stream, spans) for stream, spans in streams.items()]


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
        seconds = (round(each, 9) for each in (span.start, span.end, span.busy))
        indices = (known.setdefault(getattr(span, key), len(known)) for key, known in words.items())
        rows.append([*seconds, span.count, *indices])
    return {"stream": stream, "spans": rows} | {f"{key}s": list(known) for key, known in words.items()}
