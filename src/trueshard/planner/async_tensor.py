"""Asynchronous tensor parallelism: what torch's fused collectives and products hide of each other's time.

With sequence parallelism, torch's inductor (``torch/_inductor/fx_passes/micro_pipeline_tp.py``) cuts two pairs into as
many pieces as ranks share the matrices (``torch/distributed/_symmetric_memory``):

- an all-gather and the products that read it: a rank's own piece is multiplied first, while the others arrive;
- a product and the reduce-scatter of its result: a piece is sent while the next is computed, and the pieces are added
  by a kernel of its own at the end.

Not fused: the gradient of what several linear layers read, which is a sum of products, and gradients of weights, whose
product adds over the tokens that are gathered. ``shard()`` does not do this: it is a forecast of those who do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from trueshard.planner.trace import Allocation, Communication, Event, Free, Kernel

_COPIES = ("aten.clone", "aten.copy_", "aten._to_copy", "aten.cat")


def exposed_seconds(
    events: Sequence[Event], times: Sequence[float], communication: dict[int, float], memory_bandwidth: float
) -> dict[int, float]:
    """Return the seconds that are left of the collectives of the tensor axis that are fused, by position.

    Args:
        events: of a step.
        times: of the kernels, by position.
        communication: seconds of the collectives of the tensor axis, by position.
        memory_bandwidth: bytes a second that a memory-bound kernel reaches.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        if type(event) is Kernel and event.flops:
            for position in event.after:
                readers[position].append(i)
    found = {}
    for position, seconds in communication.items():
        event = events[position]
        assert isinstance(event, Communication)
        share = (event.ranks - 1) / event.ranks
        if event.op == "all_gather" and (beside := _beside_gather(events, times, readers[position])):
            found[position] = max(0.0, seconds - share * beside)
        elif event.op == "reduce_scatter" and (product := _producer(events, position)) is not None:
            left = max(seconds / event.ranks, seconds - share * times[product])
            found[position] = left + event.bytes / memory_bandwidth
    return found


def _beside_gather(events: Sequence[Event], times: Sequence[float], readers: Sequence[int]) -> float:
    """Return the seconds of the products that begin with this rank's own piece of what is gathered."""
    kernels = {i: event for i in readers if isinstance(event := events[i], Kernel)}
    forward = [i for i, each in kernels.items() if each.recomputed or each.place.phase == "forward"]
    if forward:
        return sum(times[i] for i in forward)
    return sum(times[i] for i in kernels) / 2  # gradients of an input and of a weight compute as much


def _producer(events: Sequence[Event], position: int) -> int | None:
    """Return the product whose result is scattered; None if something else made it."""
    for i in range(position - 1, -1, -1):
        event = events[i]
        if isinstance(event, (Allocation, Free)) or (isinstance(event, Kernel) and event.op in _COPIES):
            continue
        is_product = isinstance(event, Kernel) and event.flops > 0 and "attention" not in event.op
        return i if is_product else None
    return None
