"""KempnerForge's rows: what its code does otherwise, and boards whose devices no switch joins."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks import planner_published as published
from benchmarks import published_kempner as kempner
from benchmarks.published_rows import Model
from benchmarks.published_traces import in_one_graph
from trueshard.planner.hardware import hardware
from trueshard.planner.timeline import BASE_LATENCY, bus_bandwidth, communication_seconds
from trueshard.planner.trace import Allocation, Communication, EventPlace, Free, Trace

TINY = Model("tiny", 2, 64, 4, 1000, 128, 2)
FORWARD, BACKWARD, LATER = EventPlace("forward", ""), EventPlace("backward", ""), EventPlace("optimizer", "")


def test_devices_joined_in_pairs_have_a_part_of_the_links() -> None:
    board, switched = hardware("h200-4gpu"), hardware("h200", ranks_per_node=4)
    whole = 450e9 * 0.8
    assert [bus_bandwidth(ranks, 1, board) for ranks in (2, 3, 4)] == pytest.approx([whole / 3, whole * 2 / 3, whole])
    assert [bus_bandwidth(ranks, 1, switched) for ranks in (2, 3, 4)] == pytest.approx([whole] * 3)
    assert bus_bandwidth(2, 2, board) == pytest.approx(2 * 50e9 * 0.96)  # the adapters are slower
    assert bus_bandwidth(1, 2, board) == pytest.approx(50e9 * 0.96)
    exchange = Communication(FORWARD, "all_to_all", "compute", 2, 1, 10**9, 10**9, "bfloat16")
    seconds = communication_seconds(exchange, board, 4)
    assert seconds == pytest.approx(BASE_LATENCY + board.link_latency + 10**9 / (whole / 3))
    assert bus_bandwidth(8, 1, hardware("mi300x")) == pytest.approx(448e9 * 0.7)


def test_a_compiled_model_returns_all_gradients_together() -> None:
    def made(storage: int, place: EventPlace, kind: str, what: str = "aten.mm", size: int = 4) -> Allocation:
        return Allocation(place, storage, size, kind=kind, what=what, shape=(size, 1))  # type: ignore[arg-type]

    trace = Trace(
        [
            made(1, BACKWARD, "gradients"),
            made(2, FORWARD, "temporary"),
            Free(BACKWARD, 2, 4),  # was not made in this backward
            made(3, BACKWARD, "temporary", "aten._log_softmax_backward_data", 9),
            made(4, BACKWARD, "temporary"),  # of the parameter's shape
            made(5, BACKWARD, "temporary", size=5),
            *(Free(BACKWARD, storage, 4) for storage in (3, 4, 5)),
            Free(LATER, 1, 4),
        ]
    )
    events = in_one_graph(trace).events
    assert [event.storage for event in events if isinstance(event, Free)] == [2, 5, 3, 4, 1]
    assert len(events) == len(trace.events)


@pytest.mark.rest
def test_each_projection_gathers_and_logits_stay() -> None:
    (row,) = (row for row in kempner.ROWS if row.setting.ranks == 4 and row.setting.tensor == 2)
    setting = replace(row.setting, model=TINY, sequence=64, tensor=2)
    with kempner.projections_alone():
        trace = published.simulate(published.job(setting, 2)).steady
    in_blocks = [
        event for event in trace.events
        if isinstance(event, Communication) and event.axis == "tensor" and ".layers." in event.place.unit
    ]  # fmt: skip
    microbatches = 2 * TINY.layers
    counts = Counter(event.op for event in in_blocks)
    # And once the gradient of what the embedding gives to the first block.
    assert counts["all_gather"] == 12 * microbatches + 2
    # The last reduce-scatter of a recomputed block is not needed.
    assert counts["reduce_scatter"] == 8 * microbatches
    # Both microbatches' logits are whole on each rank, and the first's outlive its backward.
    logits = setting.microbatch * setting.sequence * TINY.vocabulary * 2
    alive: dict[int, int] = {each.storage: each.bytes for each in trace.resident}
    most = 0
    for event in trace.events:
        if isinstance(event, Allocation):
            alive[event.storage] = event.bytes
        elif isinstance(event, Free):
            alive.pop(event.storage, None)
        if event.place.phase == "backward":
            most = max(most, sum(size == logits for size in alive.values()))
    assert most == 4
    assert sum(size == logits for size in alive.values()) == 1
