"""Shards in host memory: what is on the device, what is copied, and when."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import planning
from resting import all_but
from trueshard.options import Options
from trueshard.planner import ledger
from trueshard.planner.hardware import hardware
from trueshard.planner.simulation.offloading import offloaded
from trueshard.planner.simulation.simulate import Simulation, simulate
from trueshard.planner.timeline import schedule
from trueshard.planner.trace import Allocation, Communication, Event, EventPlace, Free, HostCopy, Kernel, Trace
from trueshard.planner.workload import Job, Workload

FORWARD, BACKWARD, CLIP, STEP, BETWEEN = (
    EventPlace("forward", "a"),
    EventPlace("backward", "a"),
    EventPlace("clip", ""),
    EventPlace("optimizer", ""),
    EventPlace("between", ""),
)


def taking(
    place: EventPlace, storage: int, size: int, kind: str, stream: str = "compute", what: str = ""
) -> Allocation:
    return Allocation(place, storage, size, stream, kind, "a", what)  # type: ignore[arg-type]


def kernel(place: EventPlace, op: str, reads=(), writes=(), stream: str = "compute", after=()) -> Kernel:
    return Kernel(place, op, 0, 8, 8, "float32", after, stream=stream, reads=reads, writes=writes)  # type: ignore[arg-type]


def collective(op: str, stream: str) -> Communication:
    place = FORWARD if op == "all_gather" else BACKWARD
    return Communication(place, op, stream, 4, 1, 30, 40, "float32", "a")  # type: ignore[arg-type]


def gather(cast: bool) -> list[Event]:
    """Storage 1 is the shard, 10 its cast, 11 what is gathered."""
    made: list[Event] = []
    if cast:
        made += [
            kernel(FORWARD, "aten._to_copy", (1,), (10,), "all_gather"),
            taking(FORWARD, 10, 4, "communication", "all_gather"),
        ]
    made += [
        taking(FORWARD, 11, 40, "communication", "all_gather"),
        kernel(FORWARD, "fsdp.all_gather_copy_in", (10 if cast else 1, 11), (11,), "all_gather"),
        collective("all_gather", "all_gather"),
    ]
    made += [Free(FORWARD, 10, 4)] if cast else []
    return [*made, Free(FORWARD, 11, 40)]


def reduce(*, replicas: bool = False) -> list[Event]:
    """Storage 21 is the gradient."""
    made: list[Event] = [
        kernel(BACKWARD, "fsdp.chunk_cat"),
        taking(BACKWARD, 21, 8, "gradients", "reduce_scatter"),
        collective("reduce_scatter", "reduce_scatter"),
    ]
    made += [collective("all_reduce", "all_reduce")] if replicas else []
    return [*made, kernel(BACKWARD, "aten.mm")]


def numbered(events: list[Event], resident: list[Allocation] | None = None) -> Trace:
    shard = taking(BETWEEN, 1, 8, "parameters", what="w")
    return Trace(events, [shard] if resident is None else resident)


def live(trace: Trace) -> list[int]:
    """Bytes after each event."""
    series = ledger.curve(trace).total
    return [int(series.at([i])[0]) for i in range(len(trace.events))]  # type: ignore[arg-type]


def names(trace: Trace) -> list[str]:
    return [
        event.op
        if isinstance(event, (Kernel, Communication))
        else event.direction
        if isinstance(event, HostCopy)
        else f"{'+' if isinstance(event, Allocation) else '-'}{event.bytes}"
        for event in trace
    ]


def test_a_shard_that_is_cast_is_on_the_device_until_the_cast_is_made() -> None:
    made = offloaded(numbered(gather(cast=True)), {"w"})
    assert made.resident == []
    begin = ["to_device", "+8", "aten._to_copy", "+4", "-8"]
    assert names(made) == [*begin, "+40", "fsdp.all_gather_copy_in", "all_gather", "-4", "-40"]
    assert made.events[2].after == (0,)  # type: ignore[union-attr]
    assert live(made)[-1] == 0


def test_a_shard_that_is_not_cast_is_on_the_device_until_it_is_gathered() -> None:
    made = offloaded(numbered(gather(cast=False)), {"w"})
    assert names(made) == ["+40", "to_device", "+8", "fsdp.all_gather_copy_in", "all_gather", "-8", "-40"]
    assert made.events[2].stream == "all_gather"  # type: ignore[union-attr]
    ledger.lifetimes(made)


def test_a_gradient_leaves_the_device_as_soon_as_it_is_reduced() -> None:
    trace = numbered([*reduce(), kernel(CLIP, "aten._foreach_mul_", (21,), (21,), after=(2,)), Free(BETWEEN, 21, 8)])
    made = offloaded(trace, {"w"})
    assert names(made) == [
        "fsdp.chunk_cat",
        "+8",
        "reduce_scatter",
        "to_host",
        "-8",
        "aten.mm",
        "aten._foreach_mul_",
    ]
    transfer, clip = made.events[3], made.events[-1]
    assert isinstance(transfer, HostCopy)
    assert isinstance(clip, Kernel)
    assert (transfer.bytes, transfer.unit, transfer.stream) == (8, "a", "reduce_scatter")
    assert (clip.stream, clip.after) == ("host", (3,))


def test_what_replicas_reduce_stays_until_backward_ends() -> None:
    made = offloaded(numbered([*reduce(replicas=True), kernel(CLIP, "aten.mul", (21,), (21,))]), {"w"})
    transfer = next(event for event in made if isinstance(event, HostCopy))
    assert transfer.stream == "all_reduce"
    assert names(made)[3:] == ["all_reduce", "to_host", "aten.mm", "-8", "aten.mul"]


def test_state_and_what_the_optimizer_makes_are_in_host_memory() -> None:
    resident = [
        taking(BETWEEN, 1, 8, "parameters", what="w"),
        taking(BETWEEN, 2, 100, "parameters", what="replicated"),
        taking(BETWEEN, 3, 200, "parameters", what="buffer"),
        taking(BETWEEN, 4, 8, "optimizer", what="w.exp_avg"),
        taking(BETWEEN, 5, 100, "optimizer", what="replicated.exp_avg"),
    ]
    step: list[Event] = [
        kernel(STEP, "aten._foreach_sqrt", (4,), (6,)),
        taking(STEP, 6, 8, "temporary"),
        kernel(STEP, "aten.sqrt", (5,), (7,)),
        taking(STEP, 7, 100, "temporary"),
        Free(STEP, 6, 8),
        Free(STEP, 7, 100),
    ]
    made = offloaded(numbered(step, resident), {"w"})
    assert [each.storage for each in made.resident] == [2, 3, 5]
    assert names(made) == ["aten._foreach_sqrt", "aten.sqrt", "+100", "-100"]
    assert [event.stream for event in made if isinstance(event, Kernel)] == ["host", "compute"]


# Real steps


WORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": {"mixed_precision": "bf16"},
    "kept": {"mixed_precision": "bf16", "reshard_after_forward": "never"},
}


@functools.cache
def simulated(words: str, offload: str, ranks: int = 4) -> Simulation:
    choices = Options(**{**WORDS[words], "units": "Block", "offload": offload})
    return simulate(Job(planning.blocks(), (ranks,), microbatch=2, choices=choices))


def moved(trace: Trace, direction: str) -> int:
    return sum(each.bytes for each in trace.events if isinstance(each, HostCopy) and each.direction == direction)


PARAMETERS = sum(parameter.numel() for parameter in planning.blocks().model().parameters())


@pytest.mark.parametrize("words", all_but(["cast"], WORDS))
def test_every_shard_comes_before_each_gather_and_every_gradient_goes_once(words: str) -> None:
    for trace in (simulated(words, "cpu").first, simulated(words, "cpu").steady):
        ledger.lifetimes(trace)
        assert moved(trace, "to_host") == PARAMETERS * 4 // 4
        for phase in ("forward", "backward"):
            shards: dict[str, int] = {}
            gathered: dict[str, int] = {}
            for event in trace.events:
                if event.place.phase != phase:
                    continue
                if isinstance(event, HostCopy) and event.direction == "to_device":
                    shards[event.unit] = shards.get(event.unit, 0) + event.bytes
                if isinstance(event, Communication) and event.op == "all_gather":
                    size = 2 if event.dtype == "bfloat16" else 4
                    gathered[event.unit] = gathered.get(event.unit, 0) + event.bytes // size
            # A gather of n elements needs n / 4 of float32 from each of 4 ranks.
            assert shards == gathered
            assert bool(shards) == (phase == "forward" or words != "kept")


@pytest.mark.rest
@pytest.mark.parametrize("words", WORDS)
def test_device_memory_is_that_without_offloading_less_what_rests_on_the_host(words: str) -> None:
    on_device, on_host = simulated(words, "none").steady, simulated(words, "cpu").steady
    rests = {kind: ledger.peak(on_device).by_kind.get(kind, 0) for kind in ("parameters", "optimizer")}
    assert sum(rests.values()) >= PARAMETERS * 12 // 4
    before, after = ledger.peak(on_device), ledger.peak(on_host)
    shards = [event for event in on_host if isinstance(event, HostCopy) and event.direction == "to_host"]
    reduced = sum(event.bytes for event in shards)
    assert before.bytes - after.bytes >= sum(rests.values())
    assert before.bytes - after.bytes <= sum(rests.values()) + reduced
    assert not [each for each in on_host.resident if each.kind in ("parameters", "optimizer")]
    assert live(on_host)[-1] == sum(each.bytes for each in on_host.resident) == 0


def test_one_rank_copies_its_parameters_for_each_use() -> None:
    trace = simulated("plain", "cpu", ranks=1).steady
    assert moved(trace, "to_host") == PARAMETERS * 4
    forward = Trace([each for each in trace.events if each.place.phase == "forward"])
    assert moved(forward, "to_device") == PARAMETERS * 4


def test_the_host_holds_up_the_next_forward() -> None:
    slow, fast = hardware("h100", host_memory_bandwidth=1e6), hardware("h100", host_memory_bandwidth=1e15)
    trace = simulated("cast", "cpu").steady
    lines = [schedule(trace, device, 8) for device in (slow, fast)]
    on_host = [event for event in trace.events if isinstance(event, Kernel) and event.stream == "host"]
    assert {event.place.phase for event in on_host} == {"clip", "optimizer"}
    spent = sum(span.end - span.start for span in lines[0].spans if span.stream == "host")
    assert spent > sum(event.written for event in on_host) / 1e6
    assert lines[0].seconds - lines[1].seconds == pytest.approx(spent, rel=0.01)
    assert lines[0].seconds >= lines[0].compute_seconds + spent
    for line in lines:
        reads = {span.event: span for span in line.spans}
        for span in line.spans:
            event = trace.events[span.event]
            for position in getattr(event, "after", ()):
                assert span.start >= reads[position].end - 1e-12


def test_a_trace_of_a_cpu_stays_as_it_is() -> None:
    job = Job(planning.blocks(), (4,), microbatch=2, choices=Options(units="Block", offload="cpu"), on_cpu=True)
    trace = simulate(job, whole=True).steady
    assert not [event for event in trace.events if isinstance(event, HostCopy)]
    assert sum(each.bytes for each in trace.resident if each.kind == "parameters") == PARAMETERS * 4 // 4


@pytest.mark.rest
def test_a_large_model_needs_less_of_the_device() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "vocab_size": 128}
    make = planning.hub("LlamaForCausalLM", "LlamaConfig", 8, **sizes, num_attention_heads=4, use_cache=False)
    workload = Workload("llama", make[0], planning.OPTIMIZERS["adamw foreach"], *make[1:])
    on_device, on_host = (
        simulate(Job(workload, (2,), choices=Options(mixed_precision="bf16", offload=word))) for word in ("none", "cpu")
    )
    peaks = [ledger.peak(each.steady) for each in (on_device, on_host)]
    assert peaks[1].by_kind["parameters"] < 1024  # the buffers of rotary embeddings
    assert peaks[1].bytes < 0.5 * peaks[0].bytes
