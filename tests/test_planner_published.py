"""What the comparison with published runs models of other systems' code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import planner_published as published
from benchmarks import published_attention as attention
from benchmarks import published_traces as traces
from benchmarks.published_rows import Model, Setting
from trueshard.planner import ledger
from trueshard.planner.trace import Allocation, Communication, Free, Kernel, Trace

TINY = Model("tiny", 2, 64, 4, 128, 96, 2)


def steady(setting: Setting) -> Trace:
    return published.simulate(published.job(setting, 1)).steady


def attention_calls(trace: Trace) -> list[Kernel]:
    return [event for event in trace.events if isinstance(event, Kernel) and "attention" in event.op]


@pytest.mark.rest
def test_torchs_ring_is_what_is_counted() -> None:
    context, length = 4, 64
    setting = Setting(TINY, context, 1, length, loss="compiled", context=context, ring=True)
    with attention.keys_go_round():
        trace = published.simulated(setting).steady
    calls = attention_calls(trace)
    forward = [each for each in calls if each.place.phase == "forward"]
    assert len(forward) == context * TINY.layers
    assert len(calls) == 2 * len(forward)
    assert sum(each.causal for each in forward) == TINY.layers
    # A causal call of all tokens here is counted in full; each other one is half of that.
    here = 4 * TINY.hidden * (length // context) ** 2
    assert sum(each.flops for each in forward) == TINY.layers * here * (1 + (context - 1) / 2)

    collectives = [event for event in trace.events if isinstance(event, Communication)]
    on_axis = [each for each in collectives if each.axis == "context" and each.place.unit]
    sizes = {(each.op, each.place.phase): each.received for each in on_axis}
    # Keys and values with all heads: gathered in the forward and in the backward.
    whole = 2 * length * TINY.hidden * 2
    assert sizes["all_gather", "forward"] == sizes["all_gather", "backward"] == whole * (context - 1) // context
    # Their gradients, in float32, go on after each step.
    assert sizes["all_to_all", "backward"] == 2 * whole // context
    counts = {key: sum((each.op, each.place.phase) == key for each in on_axis) for key in sizes}
    assert counts["all_gather", "forward"] == counts["all_gather", "backward"] == TINY.layers
    assert counts["all_to_all", "backward"] == context * TINY.layers


@pytest.mark.rest
def test_the_ring_ends_with_its_context() -> None:
    setting = Setting(TINY, 2, 1, 32, loss="compiled", context=2)

    with attention.keys_go_round():
        assert len(attention_calls(steady(setting))) == 2 * 2 * TINY.layers
    assert len(attention_calls(steady(setting))) == 2 * TINY.layers


def kept(trace: Trace, size: int | None = None) -> int:
    """Return the bytes, of storages of one size, that the forward leaves for the backward."""
    begin = next(i for i, each in enumerate(trace.events) if each.place.phase == "backward")
    held = [each for each in ledger.lifetimes(trace) if each.made < begin <= each.freed]
    return sum(
        each.allocation.bytes
        for each in held
        if each.allocation.kind == "activations" and size in (None, each.allocation.bytes)
    )


@pytest.mark.rest
def test_keys_are_kept_with_all_heads() -> None:
    setting = Setting(TINY, 1, 2, 32, loss="compiled")
    plain = steady(setting)
    with attention.keys_repeated():
        repeated = steady(setting)
        recomputed = steady(replace(setting, recompute="full"))
    one = 2 * 32 * TINY.hidden * 2
    saved = 2 * one * TINY.key_value_heads // TINY.heads
    assert kept(repeated) - kept(plain) == TINY.layers * (2 * one - saved)
    unrepeated = steady(replace(setting, recompute="full"))
    assert kept(recomputed) == kept(unrepeated)


@pytest.mark.rest
def test_inputs_of_blocks_are_on_the_host_but_the_last() -> None:
    deep = replace(TINY, layers=9)
    setting = Setting(deep, 1, 2, 32, "full", loss="compiled")
    trace = steady(setting)
    moved = traces.inputs_on_host(trace)
    one = 2 * 32 * TINY.hidden * 2
    assert kept(trace, one) >= deep.layers * one
    assert kept(moved, one) == traces.STASH * one
    held = {each.storage for each in moved.resident}
    for each in moved.events:  # what leaves comes back, and is freed once
        if isinstance(each, Allocation):
            assert each.storage not in held
            held.add(each.storage)
        elif isinstance(each, Free):
            held.remove(each.storage)
    assert len(moved.events) - len(trace.events) == 2 * (kept(trace, one) // one - traces.STASH)


@pytest.mark.rest
def test_four_bits_take_what_torchao_takes() -> None:
    model = replace(TINY, intermediate=128)
    setting = Setting(model, 1, 1, 32, lora=(4, ("q_proj",)), quantize=True, storage="bfloat16", loss="chunked")
    made = steady(setting)
    ours = sum(each.bytes for each in made.resident if each.what.endswith(".packed"))
    theirs = sum(each.bytes for each in traces.on_one_device(made, setting).resident if each.what.endswith(".packed"))
    weights = model.layers * (3 * 64 * 64 + 3 * 64 * 128)
    assert ours == weights * (1 / 2 + 4 / 64)
    assert theirs == int(weights * (1 / 2 + 1 / 64 + 2 / (64 * 256)))


@pytest.mark.rest
def test_attention_is_computed_again_where_it_is_not_kept() -> None:
    setting = Setting(TINY, 1, 2, 32, "selective", loss="compiled")

    def forwards(trace: Trace) -> int:
        return sum("backward" not in call.op for call in attention_calls(trace))

    saved = steady(setting)
    with attention.attention_again():
        again = steady(setting)
    assert (forwards(saved), forwards(again)) == (TINY.layers, 2 * TINY.layers)
    output, sums = 2 * 32 * TINY.hidden * 2, 2 * TINY.heads * 32 * 4
    assert kept(saved) - kept(again) == TINY.layers * (output + sums)
