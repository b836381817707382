"""What a drawing leaves out, and what it never does."""

from __future__ import annotations

import numpy as np
import pytest

from trueshard.planner import ledger
from trueshard.planner.ledger import Series
from trueshard.planner.report import page
from trueshard.planner.timeline import Span, Timeline
from trueshard.planner.trace import Allocation, Communication, EventPlace, Free, Kernel, Trace


def test_thinning_keeps_the_extremes_of_every_bucket() -> None:
    random = np.random.default_rng(0)
    values = random.integers(0, 10**9, 10_000)
    values[[1234, 8765]] = 10**10, -1
    curve = Series(np.arange(10_000) * 3, values)
    kept = page.positions(curve, 50)
    assert len(kept) <= 102
    assert {0, 1234 * 3, 8765 * 3, 9999 * 3} <= set(kept.tolist())
    for start in range(0, 10_000, 200):
        bucket = values[start : start + 200]
        mine = curve.at(kept[(kept >= start * 3) & (kept < (start + 200) * 3)])
        assert bucket.max() in mine
        assert bucket.min() in mine
    assert page.positions(curve, 5000) is curve.positions


def test_runs_say_where_a_sequence_changes() -> None:
    assert page.runs(np.array([5, 5, 7, 7, 7, 0])) == [0, 5, 2, 7, 5, 0]


def test_memory_is_drawn_when_the_compute_stream_gets_there() -> None:
    place = EventPlace("forward", "a")
    trace = Trace(
        [
            Allocation(place, 0, 8),
            Kernel(place, "aten.mm", 1, 0, 0, ""),
            Allocation(place, 1, 8),
            Kernel(place, "aten.mm", 1, 0, 0, ""),
            Free(place, 0, 8),
        ]
    )
    timeline = Timeline(
        [Span("compute", 0.1, 0.5, "mm", "forward", "a", 1), Span("compute", 0.5, 0.9, "mm", "forward", "a", 3)], 1.0
    )
    positions = ledger.curve(trace).total.positions
    assert page.seconds_at(timeline, positions).tolist() == [0.0, 0.0, 0.5, 0.9]


def test_short_spans_are_put_together_and_stay_as_busy() -> None:
    place = EventPlace("forward", "a")
    trace = Trace([Kernel(place, "aten.mm", 1, 0, 0, "", recomputed=i >= 900) for i in range(1000)])
    spans = [
        Span(
            "compute",
            i * 1e-3,
            i * 1e-3 + 5e-4,
            "aten.mm" if i % 10 else "aten.mul",
            "forward",
            f"layers.{i // 100}",
            i,
        )
        for i in range(1000)
    ]
    spans.append(Span("all_gather", 0.0, 0.5, "all_gather", "forward", "layers.0", 1000))
    trace.events.append(Communication(place, "all_gather", "all_gather", 8, 1, 7, 8, "float32"))
    timeline = Timeline(spans, 1.0)
    compute, gathers = page.lanes(trace, timeline, limit=50)
    assert len(compute["spans"]) <= 50
    assert sum(span[2] for span in compute["spans"]) == pytest.approx(0.5)
    assert sum(span[3] for span in compute["spans"]) == 1000
    assert compute["units"] == [f"layers.{i}" for i in range(10)]
    assert compute["groups"] == ["forward", "recompute"]
    assert compute["names"] == ["aten.mm"]
    assert (gathers["stream"], gathers["spans"]) == ("all_gather", [[0.0, 0.5, 0.5, 1, 0, 0, 0]])
    assert len(page.lanes(trace, timeline, limit=2000)[0]["spans"]) == 1000
