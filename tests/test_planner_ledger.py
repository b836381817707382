"""Live memory, traffic and operations of traces written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import studies
from messages import naming
from studies import Writer
from trueshard.planner import ledger
from trueshard.planner.trace import KINDS, Allocation, EventPlace, Free, Kernel, Trace


def small() -> Trace:
    """100 rest; 50 and 30 come, 50 goes, 60 comes (the peak: 190), 90 go."""
    writer = Writer()
    writer.rest(60, "parameters", "a", "a.weight")
    writer.rest(40, "optimizer", "a", "a.weight exp_avg")
    writer.at("forward", "a")
    first = writer.take(50, "gathered", what="a.weight")  # 0: 150
    second = writer.take(30, "activations")  # 1: 180
    writer.compute("aten.mm", 7)  # 2
    writer.give(first)  # 3: 130
    writer.at("backward", "b")
    third = writer.take(60, "gradients", what="b.weight")  # 4: 190
    writer.compute("aten.mm", 5, recomputed=True)  # 5
    writer.communicate("reduce_scatter", "reduce_scatter", 21, "a")  # 6
    writer.give(second)  # 7: 160
    writer.give(third)  # 8: 100
    return writer.trace


def test_the_curve_has_every_change_and_begins_with_what_rests() -> None:
    total = ledger.curve(small()).total
    assert total.positions.tolist() == [-1, 0, 1, 3, 4, 7, 8]
    assert total.bytes.tolist() == [100, 150, 180, 130, 190, 160, 100]
    assert total.at(np.array([-1, 2, 3, 6, 99])).tolist() == [100, 180, 130, 190, 100]


def test_kinds_and_units_add_up_to_the_total_everywhere() -> None:
    trace = studies.trace(studies.plan())
    live = ledger.curve(trace)
    everywhere = np.arange(-1, len(trace.events))
    assert tuple(live.by_kind) == KINDS
    for parts in (live.by_kind.values(), live.by_unit.values()):
        added = sum(part.at(everywhere) for part in parts)
        assert np.array_equal(added, live.total.at(everywhere))


def test_a_part_is_nothing_before_its_first_change() -> None:
    gradients = ledger.curve(small()).by_kind["gradients"]
    assert gradients.at(np.array([-1, 3, 4, 8])).tolist() == [0, 0, 60, 0]
    assert gradients.bytes.max() == 60


def test_the_peak_is_the_first_maximum_with_its_place_and_kinds() -> None:
    trace = small()
    assert ledger.peak(trace) == ledger.Peak(
        190,
        4,
        "backward",
        "b",
        {"parameters": 60, "gradients": 60, "optimizer": 40, "activations": 30},
    )
    place = EventPlace("clip", "")
    trace.events += [Allocation(place, 90, 90), Free(place, 90, 90)]
    assert ledger.peak(trace).position == 4


def test_the_peak_can_be_before_the_first_event() -> None:
    trace = Trace(resident=[Allocation(EventPlace("between", ""), 0, 10)])
    assert ledger.peak(trace) == ledger.Peak(10, -1, "between", "", {"temporary": 10})
    assert ledger.peak(Trace()).bytes == 0


def test_what_is_alive_at_the_peak() -> None:
    found = ledger.alive(small(), ledger.peak(small()).position)
    assert sum(each.bytes for each in found) == ledger.peak(small()).bytes
    largest = sorted(found, key=lambda each: -each.bytes)[:3]
    assert [(each.bytes, each.what) for each in largest] == [
        (60, "a.weight"),
        (60, "b.weight"),
        (40, "a.weight exp_avg"),
    ]


def test_traffic_and_operations() -> None:
    trace = small()
    assert ledger.received(trace) == {"reduce_scatter": 21}
    assert ledger.flops(trace) == 12
    assert ledger.flops(trace, recomputed=False) == 7


def test_by_unit_has_memory_traffic_and_operations() -> None:
    assert ledger.by_unit(small()) == {
        "a": ledger.UnitUse(bytes_at_peak=130, bytes_maximum=180, bytes_received=21, flops=7),
        "b": ledger.UnitUse(bytes_at_peak=60, bytes_maximum=60, bytes_received=0, flops=5),
    }


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Free(EventPlace("forward", ""), 77, 1), naming("event 9", "storage 77", "not alive")),
        (Free(EventPlace("forward", ""), 2, 50), naming("event 9", "storage 2", "not alive")),
        (Free(EventPlace("forward", ""), 0, 61), naming("event 9", "61 bytes", "storage 0", "a.weight", 60)),
        (Allocation(EventPlace("forward", ""), 1, 40), naming("event 9", "storage 1", "second")),
    ],
)
def test_a_trace_that_cannot_be_is_refused(event: Allocation | Free, message: str) -> None:
    trace = small()
    ledger.lifetimes(trace)
    trace.events.append(event)
    with pytest.raises(ValueError, match=message):
        ledger.lifetimes(trace)
    with pytest.raises(ValueError, match=message):
        ledger.curve(trace)


def test_a_number_may_be_taken_again_once_it_is_free() -> None:
    place = EventPlace("forward", "")
    ledger.lifetimes(Trace([Allocation(place, 1, 5), Free(place, 1, 5), Allocation(place, 1, 6)]))


class Counted(list[Any]):
    """A list that counts how often one of its elements is read."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.reads += 1
            yield each

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.reads += len(found) if isinstance(index, slice) else 1
        return found


def test_no_figure_reads_events_more_than_a_few_times() -> None:
    place = EventPlace("forward", "a")
    trace = Trace()
    for number in range(3_000):
        trace.events += [
            Allocation(place, number, number % 1000, kind=KINDS[number % 8], unit=f"layers.{number % 126}"),
            Kernel(place, "aten.mm", 1, 1, 1, "bfloat16"),
            Kernel(place, "aten.mul", 1, 1, 1, "bfloat16"),
        ]
        if number >= 1000:
            trace.events.append(Free(place, number - 1000, (number - 1000) % 1000))
    for function in (ledger.curve, ledger.by_unit, ledger.received, ledger.flops):
        trace.events = Counted(trace.events)
        function(trace)  # type: ignore[operator]
        assert len(trace.events) <= trace.events.reads <= 4 * len(trace.events), function.__name__
