"""What the comparison with published runs models of other systems' code."""

from __future__ import annotations

from benchmarks import planner_published as published
from benchmarks import ring
from benchmarks.published_rows import Model, Setting
from trueshard.planner.trace import Communication, Kernel

TINY = Model("tiny", 2, 64, 4, 128, 96, 2)


def test_torchs_ring_is_what_is_counted() -> None:
    context, length = 4, 64
    setting = Setting(TINY, context, 1, length, loss="compiled", context=context, ring=True)
    with ring.keys_go_round():
        events = published.simulated(setting).steady.events
    attention = [each for each in events if isinstance(each, Kernel) and "attention" in each.op]
    forward = [each for each in attention if each.place.phase == "forward"]
    assert len(forward) == context * TINY.layers
    assert len(attention) == 2 * len(forward)
    assert sum(each.causal for each in forward) == TINY.layers
    # A causal call of all tokens here is counted in full; each other one is half of that.
    here = 4 * TINY.hidden * (length // context) ** 2
    assert sum(each.flops for each in forward) == TINY.layers * here * (1 + (context - 1) / 2)

    on_axis = [
        each for each in events if isinstance(each, Communication) and each.axis == "context" and each.place.unit
    ]
    sizes = {(each.op, each.place.phase): each.received for each in on_axis}
    # Keys and values with all heads: gathered in the forward and in the backward.
    whole = 2 * length * TINY.hidden * 2
    assert sizes["all_gather", "forward"] == sizes["all_gather", "backward"] == whole * (context - 1) // context
    # Their gradients, in float32, go on after each step.
    assert sizes["all_to_all", "backward"] == 2 * whole // context
    counts = {key: sum((each.op, each.place.phase) == key for each in on_axis) for key in sizes}
    assert counts["all_gather", "forward"] == counts["all_gather", "backward"] == TINY.layers
    assert counts["all_to_all", "backward"] == context * TINY.layers


def test_the_ring_ends_with_its_context() -> None:
    setting = Setting(TINY, 2, 1, 32, loss="compiled", context=2)

    def calls_of_attention() -> int:
        events = published.simulate(published.job(setting, 1)).steady.events
        return sum(isinstance(each, Kernel) and "attention" in each.op for each in events)

    with ring.keys_go_round():
        assert calls_of_attention() == 2 * 2 * TINY.layers
    assert calls_of_attention() == 2 * TINY.layers
