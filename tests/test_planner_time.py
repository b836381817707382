"""The time line of traces that can be worked out by hand, and published figures."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from trueshard.planner import timeline
from trueshard.planner.hardware import Hardware, hardware
from trueshard.planner.timeline import schedule
from trueshard.planner.trace import Allocation, Communication, Event, EventPlace, Free, HostCopy, Kernel, Trace

# A device on which a kernel takes flops seconds, a collective received seconds, and nothing has a latency.
PLAIN = {"matmul": 1.0, "attention": 1.0, "memory": 1.0}
PLAIN |= {"launch_seconds": 0.0, "collective_seconds": 0.0, "kernel_seconds": 0.0}
UNIT = {
    "memory_bandwidth": 1.0,
    "peak_flops": {"bfloat16": 1.0, "float32": 1.0},
    "link_bandwidth": 1.0,
    "link_efficiency": 1.0,
    "link_latency": 0.0,
    "network_bandwidth": 1.0,
    "network_efficiency": 1.0,
    "network_latency": 0.0,
    "host_bandwidth": 1.0,
    "eager": PLAIN,
    "compile": PLAIN,
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setattr(timeline, "BASE_LATENCY", 0.0)
    return hardware("h100", **UNIT)


def compute(seconds: int, phase: str = "forward", unit: str = "a", after: tuple[int, ...] = (), op: str = "aten.mm"):
    return Kernel(EventPlace(phase, unit), op, seconds, 0, 0, "bfloat16", after)  # type: ignore[arg-type]


def collective(op: str, seconds: int, phase: str = "forward", stream: str | None = None, after=(), ranks=8, stride=1):
    place = EventPlace(phase, "a")  # type: ignore[arg-type]
    return Communication(place, op, stream or op, ranks, stride, seconds, seconds, "bfloat16", after=after)  # type: ignore[arg-type]


def elementwise(read: int, written: int, op: str = "aten.mul", unit: str = "a", phase: str = "forward") -> Kernel:
    return Kernel(EventPlace(phase, unit), op, 0, read, written, "bfloat16")  # type: ignore[arg-type]


def spans(device: Hardware, *events: Event, mode: str = "eager", ranks_per_node: int = 8):
    line = schedule(Trace(list(events)), device, ranks_per_node, mode)  # type: ignore[arg-type]
    return {span.event: (span.start, span.end) for span in line.spans}, line


def forwards(units: int, gather: int, copy: int, work: int, small: int = 0) -> list[Event]:
    """Events of the forwards of some units: a gather, the copy out of its buffer, the work, and small kernels."""
    events: list[Event] = []
    for _ in range(units):
        events += [collective("all_gather", gather), compute(copy, after=(len(events),)), compute(work)]
        events += [elementwise(4, 4)] * small
    return events


COPY = compute(1, "backward", op="fsdp.chunk_cat")
GATHER = collective("all_gather", 2, "backward")
REDUCE = collective("reduce_scatter", 5, "backward")
TO_GATHER = [dataclasses.replace(elementwise(1, 1, op), stream="all_gather") for op in ("aten.copy_", "fsdp.copy_in")]
REDUCED = dataclasses.replace(compute(1, "backward", after=(0,), op="aten.div_"), stream="reduce_scatter")
LINES: dict[str, tuple[list[Event], dict[str, float], dict[int, tuple[float, float]], dict[str, float]]] = {
    "kernels run in a row": (
        [compute(2), compute(3)],
        {},
        {0: (0, 2), 1: (2, 5)},
        {"seconds": 5, "compute_seconds": 5, "exposed_seconds": 0},
    ),
    "an all-gather overlaps kernels before it and is waited for by its reader": (
        [compute(2), collective("all_gather", 5), compute(1), compute(1, after=(1,))],
        {},
        {1: (0, 5), 2: (2, 3), 3: (5, 6)},
        {"exposed_seconds": 2},
    ),
    "a new forward gathers nothing before what was before it": (
        [compute(7, "optimizer"), collective("all_gather", 1), compute(1, after=(1,))],
        {},
        {1: (7, 8)},
        {},
    ),
    "a reduce-scatter runs behind compute, the next copy waits for it, and clipping for all": (
        [
            *(compute(4, "backward"), COPY, collective("reduce_scatter", 3, "backward"), compute(2, "backward")),
            *(COPY, collective("reduce_scatter", 9, "backward"), compute(1, "clip"), compute(1, "optimizer")),
        ],
        {},
        {2: (5, 8), 3: (5, 7), 4: (8, 9), 5: (9, 18), 6: (18, 19)},
        {"exposed_seconds": 1 + 9, "seconds": 20},
    ),
    "what follows a reduction on its stream stays behind compute": (
        [
            *(collective("reduce_scatter", 5, "backward"), REDUCED, compute(2, "backward")),
            collective("all_reduce", 4, "backward", after=(0,), ranks=2, stride=8),
            *(compute(1, "backward"), compute(1, "optimizer")),
        ],
        {},
        {1: (5, 6), 2: (0, 2), 3: (6, 10), 4: (2, 3), 5: (10, 11)},
        {"exposed_seconds": 7},
    ),
    "the copy into an all-gather does not wait for compute": (
        [compute(9), *TO_GATHER, collective("all_gather", 3), compute(1, after=(3,))],
        {},
        {1: (0, 1), 2: (1, 3), 3: (3, 6)},
        {},
    ),
    "other collectives are waited for": (
        [compute(1, "clip"), collective("all_reduce", 2, "clip", "compute"), compute(1, "clip")],
        {},
        {0: (0, 1), 1: (1, 3), 2: (3, 4)},
        {"exposed_seconds": 2, "compute_seconds": 2},
    ),
    "transfers have their own stream": (
        [compute(1), HostCopy(EventPlace("forward", "a"), "to_device", 4), compute(1), compute(1, after=(1,))],
        {},
        {1: (0, 4), 2: (1, 2), 3: (4, 5)},
        {},
    ),
    "nothing starts before the host issues it": (
        [compute(1), compute(1), compute(5), compute(1)],
        {"launch_seconds": 2.0},
        {0: (2, 3), 1: (4, 5), 2: (6, 11), 3: (11, 12)},
        {"host_seconds": 2 + 1 + 1, "exposed_seconds": 0},
    ),
    "the host takes longer to gather a unit": (
        [collective("all_gather", 1), compute(1, after=(0,)), collective("all_reduce", 1, "clip", "compute")],
        {"launch_seconds": 1.0, "collective_seconds": 4.0},
        {0: (5, 6), 1: (6, 7), 2: (7, 8)},
        {"host_seconds": 5, "exposed_seconds": 2},
    ),
    "in forward two buffers exist: a gather waits for the copy before the last": (
        forwards(4, gather=1, copy=1, work=9),
        {},
        {0: (0, 1), 3: (1, 2), 6: (2, 3), 9: (12, 13), 1: (1, 2), 4: (11, 12), 7: (21, 22), 10: (31, 32)},
        {},
    ),
    "in forward slow gathers are exposed": (
        forwards(3, gather=10, copy=1, work=4),
        {},
        {0: (0, 10), 3: (10, 20), 6: (20, 30)},
        {"exposed_seconds": 10 + 5 + 5, "seconds": 35},
    ),
    "in backward a gather waits for the copy of the unit that runs": (
        [
            *(GATHER, compute(3, "backward", after=(0,)), GATHER, compute(10, "backward")),
            *(compute(3, "backward", after=(2,)), GATHER, compute(10, "backward")),
        ],
        {},
        # The second is not at 2, when the stream is free: its buffer is the one that is copied out until 5.
        {0: (0, 2), 1: (2, 5), 2: (5, 7), 4: (15, 18), 5: (18, 20)},
        {},
    ),
    "one group has one queue": ([REDUCE, GATHER], {}, {1: (5, 7)}, {}),
    "two groups have two": ([REDUCE, dataclasses.replace(GATHER, ranks=2, stride=8)], {}, {1: (0, 2)}, {}),
}
"""Events, costs of the host, spans by event, and sums."""


@pytest.mark.parametrize("case", LINES)
def test_events_are_laid_on_streams(case: str, device: Hardware) -> None:
    events, costs, expected, sums = LINES[case]
    at, line = spans(hardware("h100", **UNIT | {"eager": PLAIN | costs}), *events)
    assert {event: at[event] for event in expected} == expected
    assert {name: getattr(line, name) for name in sums} == sums


def test_without_streams_everything_is_in_a_row(device: Hardware) -> None:
    events = compute(2), collective("all_gather", 5), compute(1), collective("reduce_scatter", 3), compute(1)
    at, line = spans(hardware("cpu", **UNIT), *events)
    assert [at[i][0] for i in range(5)] == [0, 2, 7, 8, 11]
    assert (line.seconds, line.exposed_seconds, line.compute_seconds) == (12, 8, 4)


def test_over_nodes_ranks_wait_for_the_slowest(device: Hardware) -> None:
    within = spans(device, compute(9), collective("all_gather", 1))[1]
    _, across = spans(device, compute(9), collective("all_gather", 1, ranks=64))
    assert within.seconds == pytest.approx(9)
    assert across.seconds == pytest.approx(9 + 9 * 3 * timeline.STRAGGLING)


def test_exposed_and_host_and_compute_make_up_the_step(device: Hardware) -> None:
    slow = hardware("h100", **{**UNIT, "eager": {**PLAIN, "launch_seconds": 1.0}})
    events = forwards(5, gather=7, copy=1, work=3)
    for _ in range(5):
        events += [compute(4, "backward"), compute(1, "backward", op="fsdp.chunk_cat")]
        events.append(collective("reduce_scatter", 9, "backward"))
    events.append(compute(2, "optimizer"))
    _, line = spans(slow, *events)
    assert line.seconds == pytest.approx(line.compute_seconds + line.exposed_seconds + line.host_seconds)


def test_gaps_are_the_times_in_which_nothing_computes(device: Hardware) -> None:
    events = [
        collective("all_gather", 5, ranks=16),
        compute(2, after=(0,)),
        collective("all_reduce", 3, stream="compute"),
    ]
    slow = dataclasses.replace(device, eager=dataclasses.replace(device.eager, launch_seconds=0.5))
    _, line = spans(slow, *events, compute(1))
    parts = (line.compute_seconds, line.exposed_seconds, line.host_seconds, line.straggling_seconds)
    assert sum(parts) == pytest.approx(line.seconds)
    assert min(parts) > 0
    for kind, seconds in zip(("waiting", "host", "ranks"), parts[1:], strict=True):
        assert sum(gap.end - gap.start for gap in line.gaps if gap.kind == kind) == pytest.approx(seconds)


def test_a_long_trace_is_scheduled_in_seconds(device: Hardware) -> None:
    line = schedule(Trace(forwards(2000, gather=7, copy=1, work=3, small=40)), device, 8, "compile")
    assert len([span for span in line.spans if span.stream == "all_gather"]) == 2000
    starts = [span.start for span in line.spans if span.stream == "compute"]
    assert starts == sorted(starts)


# Roofline


def test_a_kernel_is_bound_by_arithmetic_or_by_memory() -> None:
    h100 = hardware("h100")
    rate = h100.peak_flops["bfloat16"] * h100.eager.matmul
    big = Kernel(EventPlace("forward", "a"), "aten.mm", 2 * 8192**3, 4 * 8192**2, 2 * 8192**2, "bfloat16")
    assert timeline.operation_seconds(big, h100, "eager") == pytest.approx(2 * 8192**3 / rate)
    thin = Kernel(EventPlace("forward", "a"), "aten.mm", 2 * 8192**2, 2 * 8192**2, 16384, "bfloat16")
    assert timeline.operation_seconds(thin, h100, "eager") == pytest.approx(
        (2 * 8192**2 + 16384) / (3.35e12 * h100.eager.memory)
    )
    tiny = elementwise(4, 4)
    assert timeline.operation_seconds(tiny, h100, "eager") == h100.eager.kernel_seconds


def test_float32_is_without_tf32() -> None:
    h100 = hardware("h100")
    kernel = Kernel(EventPlace("forward", "a"), "aten.mm", 10**13, 1, 1, "float32")
    halves = dataclasses.replace(kernel, dtype="bfloat16")
    ratio = timeline.operation_seconds(kernel, h100, "eager") / timeline.operation_seconds(halves, h100, "eager")
    assert ratio == pytest.approx(989.4 / 66.9)


def test_causal_attention_computes_half(device: Hardware) -> None:
    whole = compute(10, op="aten._scaled_dot_product_flash_attention")
    assert timeline.operation_seconds(whole, device, "eager") == 10
    assert timeline.operation_seconds(dataclasses.replace(whole, causal=True), device, "eager") == 5


def test_what_is_overwritten_moves_once_and_a_gather_reads_what_it_writes() -> None:
    assert timeline.moved_bytes(elementwise(30, 20, "aten.copy_")) == 30
    assert timeline.moved_bytes(elementwise(30, 20, "aten.add_")) == 50
    assert timeline.moved_bytes(elementwise(1000, 20, "aten.embedding")) == 40


def test_compiled_neighbours_move_memory_once(device: Hardware) -> None:
    place = EventPlace("forward", "a")
    events: list[Event] = [
        elementwise(10, 10),
        _result(place, 1),
        elementwise(10, 10),
        _result(place, 2),
        Free(place, 1, 10),
        compute(7),
    ]
    assert sum(timeline.all_seconds(events, device, "eager")) == 20 + 20 + 7
    times = timeline.all_seconds(events, device, "compile")
    assert times[0] == 20  # reads 10 from outside, writes the second result; the first was never in memory
    assert times[2] == 0
    assert times[5] == 7


def test_what_outlives_a_fused_kernel_is_written(device: Hardware) -> None:
    place = EventPlace("forward", "a")
    events: list[Event] = [elementwise(10, 10), _result(place, 1), elementwise(10, 10), _result(place, 2)]
    assert sum(timeline.all_seconds(events, device, "compile")) == 30


def test_a_collectives_buffer_is_not_written_by_the_fused_kernel_before_it(device: Hardware) -> None:
    place = EventPlace("forward", "a")
    events: list[Event] = [elementwise(10, 10), elementwise(10, 10), _result(place, 1)]
    buffer = Allocation(place, 2, 80, what="aten.new_empty")
    events += [buffer, collective("all_gather", 70, stream="compute"), compute(7)]
    assert timeline.all_seconds(events, device, "compile") == [20, 0, 0, 0, 0, 7]


def test_a_fused_kernel_begins_with_what_a_collective_brought_and_spans_none(device: Hardware) -> None:
    """Of a collective that the compute stream waits for; one on a stream of its own ends earlier or later."""

    def times(stream: str) -> list[float]:
        brought = dataclasses.replace(elementwise(10, 10), after=(2,))
        events = [elementwise(10, 10), elementwise(10, 10), collective("reduce_scatter", 5, stream=stream)]
        return timeline.all_seconds([*events, brought, elementwise(10, 10)], device, "compile")

    assert times("compute") == [10, 0, 0, 10, 0]
    assert times("reduce_scatter") == [10, 0, 0, 20, 20]


def _result(place: EventPlace, storage: int) -> Allocation:
    return Allocation(place, storage, 10, what="aten.mul")


def test_nothing_is_fused_over_units_or_matrix_products(device: Hardware) -> None:
    events: list[Event] = [elementwise(10, 10), compute(1), elementwise(10, 10), elementwise(10, 10, unit="b")]
    assert timeline.all_seconds(events, device, "compile") == timeline.all_seconds(events, device, "eager")


# Network


def test_a_collective_in_a_node_takes_received_bytes_over_bus_bandwidth() -> None:
    h100 = hardware("h100")
    gather = collective("all_gather", 10**9)
    expected = timeline.BASE_LATENCY + 7 * h100.link_latency + 10**9 / (450e9 * 0.8)
    assert timeline.communication_seconds(gather, h100, 8) == pytest.approx(expected)


def test_over_nodes_the_ranks_of_a_node_share_their_adapters() -> None:
    h100 = hardware("h100")
    # 8 × 50 GB/s are more than NVLink takes in
    assert timeline.bus_bandwidth(8, 16, h100) == pytest.approx(450e9 * 0.8)
    assert timeline.bus_bandwidth(4, 16, h100) == pytest.approx(4 * 50e9 * 0.96)
    assert timeline.bus_bandwidth(1, 16, h100) == pytest.approx(50e9 * 0.96)


@pytest.mark.parametrize(
    ("ranks", "stride", "ranks_per_node", "expected"),
    [
        (8, 1, 8, (8, 1)),
        (16, 1, 8, (8, 2)),
        (16, 8, 8, (1, 16)),
        (4, 2, 8, (4, 1)),
        (8, 4, 8, (2, 4)),
        (2, 1, 8, (2, 1)),
    ],
)
def test_ranks_of_a_group_are_spread_over_nodes(ranks: int, stride: int, ranks_per_node: int, expected: object) -> None:
    assert timeline.spread(collective("all_gather", 1, ranks=ranks, stride=stride), ranks_per_node) == expected


def test_latency_grows_with_nodes_and_an_all_reduce_may_be_a_tree() -> None:
    h100 = hardware("h100")
    small = [timeline.communication_seconds(collective("all_gather", 1, ranks=n), h100, 8) for n in (8, 64, 512)]
    assert small == sorted(small)
    assert small[2] == pytest.approx(
        timeline.BASE_LATENCY + 448 * h100.link_latency + 63 * h100.network_latency, rel=1e-6
    )
    tree = timeline.communication_seconds(collective("all_reduce", 1, ranks=512), h100, 8)
    steps = 7 * h100.link_latency + 6 * h100.network_latency
    assert tree == pytest.approx(timeline.BASE_LATENCY + 2 * steps, rel=1e-6)


def test_an_all_to_all_goes_through_each_ranks_own_adapter() -> None:
    h100 = hardware("h100")
    within = timeline.communication_seconds(collective("all_to_all", 10**9), h100, 8)
    across = timeline.communication_seconds(collective("all_to_all", 10**9, ranks=64), h100, 8)
    assert across == pytest.approx(10**9 * 56 / 63 / (50e9 * 0.96), rel=0.01)
    assert across > 5 * within


def test_a_group_of_one_takes_no_time() -> None:
    assert timeline.communication_seconds(collective("all_gather", 0, ranks=1), hardware("h100"), 8) == 0


def test_nodes_of_no_ranks_are_refused(device: Hardware) -> None:
    with pytest.raises(ValueError, match="ranks_per_node=0"):
        schedule(Trace(), device, 0)


# Published figures


@pytest.mark.rest
def test_published_throughput_is_met_within_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    published = importlib.import_module("benchmarks.planner_published")
    held = (8, "eager", None), (128, "compile", None), (128, "compile", "float8")
    rows = [row for row in published.ROWS if row.source == "titan-2024"]
    rows = [row for row in rows if (row.setting.ranks, row.setting.mode, row.matmul) in held]
    assert len(rows) == len(held)
    for row in rows:
        found = published.forecast(row)
        assert abs(found["error"]) < 0.1, row
        assert abs(found["memory_error"]) < published.GOALS["reserved"], row
        assert found["exposed_seconds"] < 0.1 * found["step_seconds"]
