"""Steps replayed through the model of the allocator: what goes on from step to step, fragmentation, workspaces."""

from __future__ import annotations

import random

import pytest

from trueshard.planner.reserve import replay
from trueshard.planner.trace import Allocation, EventPlace, Free, Kernel, Phase, Stream, Trace

KIB, MIB = 1 << 10, 1 << 20
PLACE = EventPlace("forward", "")


def take(storage: int, bytes: int, stream: Stream = "compute", what: str = "") -> Allocation:
    return Allocation(PLACE, storage, bytes, stream, what=what)


def give(storage: int) -> Free:
    return Free(PLACE, storage, 0)


def test_a_job_of_one_storage() -> None:
    trace = Trace([take(1, 31 * MIB + 100), give(1)], [take(0, 100)])
    result = replay(trace, trace)
    assert result.reserved == 34 * MIB
    assert result.peak_allocated == 32 * MIB + 512  # the rest of the 32 MiB is not split off


def test_what_the_first_step_makes_is_there_in_later_ones() -> None:
    first = Trace([take(1, 20 * MIB, what="exp_avg"), take(2, 30 * MIB), give(2)], [take(0, 10 * MIB)])
    steady = Trace([take(3, 30 * MIB), give(3)], [take(0, 10 * MIB), take(1, 20 * MIB)])
    result = replay(first, steady, repeats=5)
    assert result.reserved == 60 * MIB


@pytest.mark.parametrize("repeats", [0, 1, 7])
def test_a_resident_that_is_replaced_every_step_does_not_add_up(repeats: int) -> None:
    """Gradients of the last step are freed after forward, and new ones are left behind."""
    step = Trace(
        [take(3, 40 * MIB), give(1), give(0), take(2, 10 * MIB, what="a"), take(4, 10 * MIB, what="b"), give(3)],
        [take(0, 10 * MIB, what="a"), take(1, 10 * MIB, what="b")],
    )
    result = replay(step, step, repeats=repeats)
    assert result.reserved == 60 * MIB


def test_a_replaced_resident_is_found_by_what_it_is() -> None:
    """Two of one size on two streams: the one that is freed makes room on its own stream."""
    a, b = take(0, 20 * MIB, "all_gather", "a"), take(1, 20 * MIB, "reduce_scatter", "b")
    first = Trace([take(3, 20 * MIB, "reduce_scatter", "b"), take(2, 20 * MIB, "all_gather", "a")])
    steady = Trace([give(0), take(5, 20 * MIB, "all_gather"), give(1), take(6, 20 * MIB, "reduce_scatter")], [a, b])
    assert replay(first, steady, repeats=1).reserved == 40 * MIB


def test_a_replaced_resident_is_found_by_its_size_if_it_is_like_nothing() -> None:
    """What is left on other streams than the residents were stays where it is, the first for the first."""
    residents = [take(0, 20 * MIB, what="a"), take(1, 20 * MIB, what="b")]
    first = Trace([take(2, 20 * MIB, "all_gather"), take(3, 20 * MIB, "reduce_scatter")])
    steady = Trace([give(0), take(4, 20 * MIB, "all_gather"), give(1), take(5, 20 * MIB, "reduce_scatter")], residents)
    assert replay(first, steady, repeats=1).reserved == 40 * MIB


def test_what_the_next_step_does_not_know_is_freed_before_it() -> None:
    first = Trace([take(1, 50 * MIB)])
    steady = Trace([take(1, 30 * MIB), give(1)], [take(9, 12 * MIB)])
    result = replay(first, steady)
    # 12 MiB come from the freed 50; the 30 from what is left of them
    assert result.reserved == 50 * MIB


def test_fragmentation_is_seen() -> None:
    """Requests that grow, as from longer and longer sequences: none fits into what was freed before."""
    events: list[Allocation | Free] = []
    for index in range(20):
        events += [take(2 * index, (30 + 4 * index) * MIB), give(2 * index)]
    trace = Trace(list(events))
    assert replay(trace, trace).reserved == sum(30 + 4 * index for index in range(20)) * MIB


def test_storages_of_no_bytes_take_nothing() -> None:
    trace = Trace([take(1, 0), give(1), take(2, 0)], [take(0, 0)])
    result = replay(trace, trace)
    assert result.reserved == 0


def kernel(op: str, phase: Phase) -> Kernel:
    return Kernel(EventPlace(phase, ""), op, 0, 0, 0, "bfloat16")


def test_a_workspace_for_each_thread_that_multiplies_matrices() -> None:
    workspace = 32 * MIB
    forward = Trace([kernel("aten.mul", "forward"), kernel("aten.mm", "forward"), kernel("aten.bmm", "forward")])
    assert replay(forward, forward).reserved == 0
    assert replay(forward, forward, workspace_bytes=workspace).reserved == 32 * MIB
    both = Trace([*forward.events, kernel("aten.mm", "backward"), kernel("aten.mm", "optimizer")])
    assert replay(both, both, workspace_bytes=workspace).reserved == 64 * MIB


def random_trace(events: int) -> Trace:
    """Sizes and lifetimes at random; everything is freed at the end."""
    rng = random.Random(0)
    trace = Trace([], [take(index, rng.randint(1, 30 * MIB)) for index in range(500)])
    live: list[int] = []
    number = 500
    while len(trace.events) < events - len(live):
        if len(live) < 1000 and (not live or rng.random() < 0.52):
            stream: Stream = rng.choice(["compute", "compute", "all_gather"])
            trace.events.append(take(number, rng.randint(1, rng.choice([KIB, MIB, 64 * MIB])), stream))
            live.append(number)
            number += 1
        else:
            trace.events.append(give(live.pop(rng.randrange(len(live)))))
    trace.events += [give(storage) for storage in live]
    return trace


def test_a_long_trace_always_gives_the_same() -> None:
    trace = random_trace(20_000)
    result = replay(trace, trace)
    again = replay(trace, trace)
    assert (result.reserved, result.peak_allocated) == (again.reserved, again.peak_allocated)
    assert result.peak_allocated <= result.reserved
    assert replay(trace, trace, repeats=1).peak_allocated == result.peak_allocated
