"""Sums over a trace: live memory over the step, its peak, traffic and FLOPs.

A position is an index into ``trace.events``; -1 stands for the beginning, when only ``trace.resident`` is allocated.
Figures at a position hold after its event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trueshard.planner.trace import KINDS, Allocation, Communication, EventPlace, Free, Kernel, Kind, Phase, Trace

Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Series:
    """Bytes as a step function of the position; 0 before the first."""

    positions: Numbers
    """(n,), ascending."""
    bytes: Numbers
    """(n,), from the position of the same index on."""

    def at(self, positions: Numbers) -> Numbers:
        """Return the bytes at ``positions``, in their shape."""
        index = np.searchsorted(self.positions, positions, side="right")
        return np.concatenate([np.zeros(1, np.int64), self.bytes])[index]


@dataclass(slots=True)
class Lifetime:
    """Positions between which a storage is live."""

    allocation: Allocation
    made: int
    """Position of the allocation; -1: resident."""
    freed: int
    """Position of the free; the number of events if it outlives the step."""


@dataclass(frozen=True)
class Curve:
    """Live bytes over a step."""

    total: Series
    """Has -1 and every position that allocates or frees."""
    by_kind: Mapping[Kind, Series]
    """All kinds, in the order of ``KINDS``; they sum to ``total``."""
    by_unit: Mapping[str, Series]
    """Units with memory, in the order in which they first appear; they sum to ``total``."""


@dataclass(frozen=True)
class Peak:
    """First maximum of live memory."""

    bytes: int
    position: int
    phase: Phase
    unit: str
    by_kind: Mapping[Kind, int]
    """Kinds with memory, in the order of ``KINDS``."""


@dataclass(frozen=True)
class UnitUse:
    """Memory, traffic and FLOPs of one unit."""

    bytes_at_peak: int
    """Live bytes at the step's peak."""
    bytes_maximum: int
    """Largest live bytes at any position."""
    bytes_received: int
    """Bytes received from other ranks."""
    flops: int
    """FLOPs while the unit's forward or backward runs, recomputation included."""


def lifetimes(trace: Trace) -> list[Lifetime]:
    """Return the lifetime of each storage, oldest first.

    Raises:
        ValueError: a storage is freed that is not alive, allocated twice, or freed with another size.
    """
    end = len(trace.events)
    every = [Lifetime(allocation, -1, end) for allocation in trace.resident]
    live = {lifetime.allocation.storage: lifetime for lifetime in every}
    for position, event in enumerate(trace.events):
        if type(event) is Allocation:
            if event.storage in live:
                raise ValueError(f"event {position} allocates storage {event.storage} ({event.what}) a second time")
            live[event.storage] = Lifetime(event, position, end)
            every.append(live[event.storage])
        elif type(event) is Free:
            if event.storage not in live:
                raise ValueError(f"event {position} frees storage {event.storage}, which is not alive")
            lifetime = live.pop(event.storage)
            lifetime.freed = position
            if lifetime.allocation.bytes != event.bytes:
                raise ValueError(
                    f"event {position} frees {event.bytes} bytes of storage {event.storage} "
                    f"({lifetime.allocation.what}), which has {lifetime.allocation.bytes}"
                )
    return every


def curve(trace: Trace) -> Curve:
    """Return live memory over the step, by kind and by unit.

    Raises:
        ValueError: as ``lifetimes``.
    """
    every = lifetimes(trace)
    by_kind: dict[Kind, list[Lifetime]] = {kind: [] for kind in KINDS}
    by_unit: dict[str, list[Lifetime]] = {}
    for lifetime in every:
        by_kind[lifetime.allocation.kind].append(lifetime)
        by_unit.setdefault(lifetime.allocation.unit, []).append(lifetime)
    total = _series(every, len(trace.events), start=[-1])
    return Curve(
        total,
        {kind: _series(part, len(trace.events)) for kind, part in by_kind.items()},
        {unit: _series(part, len(trace.events)) for unit, part in by_unit.items()},
    )


def _series(lives: Sequence[Lifetime], end: int, start: Sequence[int] = ()) -> Series:
    """Sum lifetimes up, with one entry for each position of ``start`` and each at which one begins or ends."""
    freed = [life for life in lives if life.freed < end]
    positions = np.array([*start, *(life.made for life in lives), *(life.freed for life in freed)], np.int64)
    sizes = [life.allocation.bytes for life in lives]
    changes = np.array([0] * len(start) + sizes + [-life.allocation.bytes for life in freed], np.int64)
    unique, index = np.unique(positions, return_inverse=True)
    sums = np.zeros(len(unique), np.int64)
    np.add.at(sums, index, changes)
    return Series(unique, np.cumsum(sums))


def peak(trace: Trace) -> Peak:
    """Return the first maximum of a step's live memory."""
    every = lifetimes(trace)
    total = _series(every, len(trace.events), start=[-1])
    at = int(np.argmax(total.bytes))
    position = int(total.positions[at])
    place = trace.events[position].place if position >= 0 else EventPlace("between", "")
    by_kind = dict.fromkeys(KINDS, 0)
    for allocation in _alive(every, position):
        by_kind[allocation.kind] += allocation.bytes
    kinds = {kind: count for kind, count in by_kind.items() if count}
    return Peak(int(total.bytes[at]), position, place.phase, place.unit, kinds)


def alive(trace: Trace, position: int) -> list[Allocation]:
    """Return the allocations that are live at a position, oldest first."""
    return _alive(lifetimes(trace), position)


def _alive(every: Sequence[Lifetime], position: int) -> list[Allocation]:
    return [lifetime.allocation for lifetime in every if lifetime.made <= position < lifetime.freed]


def mark_activations(trace: Trace) -> None:
    """Set the kind of memory made in forward and freed in backward, unless it is known to be of another one."""
    for lifetime in lifetimes(trace):
        allocation = lifetime.allocation
        if allocation.kind == "temporary" and lifetime.made >= 0 and lifetime.freed < len(trace.events):
            phases = allocation.place.phase, trace.events[lifetime.freed].place.phase
            allocation.kind = "activations" if phases == ("forward", "backward") else "temporary"


def received(trace: Trace, by: Literal["op", "axis"] = "op") -> dict[str, int]:
    """Return the bytes that this rank receives in a step, by collective or by axis, in the order of first use."""
    counts: dict[str, int] = defaultdict(int)
    for event in trace.events:
        if type(event) is Communication:
            counts[getattr(event, by)] += event.received
    return dict(counts)


def flops(trace: Trace, *, recomputed: bool = True) -> int:
    """Return the FLOPs of a step; ``recomputed=False`` leaves out those that repeat the forward.

    Of five products in the backward of fused attention, one is of scores, again. The rest is 6N + 12·L·h·s a token.
    """
    kernels = [event for event in trace.events if type(event) is Kernel and (recomputed or not event.recomputed)]
    again = 0 if recomputed else sum(kernel.flops // 5 for kernel in kernels if _is_backward_of_attention(kernel.op))
    return sum(kernel.flops for kernel in kernels) - again


def _is_backward_of_attention(op: str) -> bool:
    return "_scaled_dot_product_" in op and op.endswith("_backward")


def by_unit(trace: Trace) -> dict[str, UnitUse]:
    """Return each unit's use, in the order in which units first appear in memory, communication, computation."""
    live = curve(trace)
    here = live.total.positions[[int(np.argmax(live.total.bytes))]]
    traffic: dict[str, int] = defaultdict(int)
    work: dict[str, int] = defaultdict(int)
    for event in trace.events:
        if type(event) is Kernel:
            work[event.place.unit] += event.flops
        elif type(event) is Communication:
            traffic[event.unit] += event.received
    nothing = Series(np.zeros(0, np.int64), np.zeros(0, np.int64))
    uses = {}
    for unit in dict.fromkeys([*live.by_unit, *traffic, *work]):
        series = live.by_unit.get(unit, nothing)
        at_peak, most = int(series.at(here)[0]), int(series.bytes.max(initial=0))
        uses[unit] = UnitUse(at_peak, most, traffic.get(unit, 0), work.get(unit, 0))
    return uses
