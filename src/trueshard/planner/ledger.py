"""Sums over a trace: live memory over the step, its peak, traffic and FLOPs.

A position is an index into ``trace.events``; -1 stands for the beginning, when only ``trace.resident`` is allocated.
Figures at a position hold after its event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trueshard.planner.trace import KINDS, Allocation, Communication, Free, Kernel, Kind, Phase, Place, Trace

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

    @property
    def maximum(self) -> int:
        """Largest number of bytes."""
        return int(self.bytes.max(initial=0))


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

    at_peak: int
    """Live bytes at the step's peak."""
    maximum: int
    """Largest live bytes at any position."""
    received: int
    """Bytes received from other ranks."""
    flops: int
    """FLOPs while the unit's forward or backward runs, recomputation included."""


def check(trace: Trace) -> None:
    """Raise if a trace is inconsistent.

    Raises:
        ValueError: a storage is freed that is not alive, allocated twice, or freed with another size.
    """
    for _ in _changes(trace):
        pass


def curve(trace: Trace) -> Curve:
    """Return live memory over the step, by kind and by unit.

    Raises:
        ValueError: as ``check``.
    """
    positions, deltas, kinds, units = [-1], [0], [0], [0]
    numbers: dict[str, int] = {kind: number for number, kind in enumerate(KINDS)}
    unit_numbers: dict[str, int] = {}
    for position, sign, allocation in _changes(trace):
        positions.append(position)
        deltas.append(sign * allocation.bytes)
        kinds.append(numbers[allocation.kind])
        units.append(unit_numbers.setdefault(allocation.unit, len(unit_numbers)))
    where, change = np.array(positions, np.int64), np.array(deltas, np.int64)
    kind_of, unit_of = np.array(kinds), np.array(units)

    def part(selected: NDArray[np.bool_]) -> Series:
        return _series(where[selected], change[selected])

    return Curve(
        total=_series(where, change),
        by_kind={kind: part(kind_of == numbers[kind]) for kind in KINDS},
        by_unit={unit: part(unit_of == number) for unit, number in unit_numbers.items()},
    )


def peak(trace: Trace, of: Curve | None = None) -> Peak:
    """Return the first maximum of live memory.

    Args:
        trace: the step.
        of: its ``curve``, if known.
    """
    live = of or curve(trace)
    index = int(np.argmax(live.total.bytes))
    position = int(live.total.positions[index])
    place = trace.events[position].place if position >= 0 else Place("between", "")
    parts = {kind: int(series.at(np.array([position]))[0]) for kind, series in live.by_kind.items()}
    by_kind = {kind: count for kind, count in parts.items() if count}
    return Peak(int(live.total.bytes[index]), position, place.phase, place.unit, by_kind)


def alive(trace: Trace, position: int) -> list[Allocation]:
    """Return the allocations that are live at a position, oldest first."""
    found = {allocation.storage: allocation for allocation in trace.resident}
    for event in trace.events[: position + 1]:
        if type(event) is Allocation:
            found[event.storage] = event
        elif type(event) is Free:
            del found[event.storage]
    return list(found.values())


def received(trace: Trace) -> dict[str, int]:
    """Return the bytes that this rank receives in a step, by collective, in the order of first use."""
    found: dict[str, int] = defaultdict(int)
    for event in trace.events:
        if type(event) is Communication:
            found[event.op] += event.received
    return dict(found)


def flops(trace: Trace, *, recomputed: bool = True) -> int:
    """Return the FLOPs of a step; ``recomputed=False`` leaves out those that repeat the forward."""
    return sum(event.flops for event in trace.events if type(event) is Kernel and (recomputed or not event.recomputed))


def by_unit(trace: Trace) -> dict[str, UnitUse]:
    """Return each unit's use, in the order in which units first appear in memory, communication, computation."""
    live = curve(trace)
    here = np.array([peak(trace, live).position])
    traffic: dict[str, int] = defaultdict(int)
    work: dict[str, int] = defaultdict(int)
    for event in trace.events:
        if type(event) is Kernel:
            work[event.place.unit] += event.flops
        elif type(event) is Communication:
            traffic[event.unit] += event.received
    nothing = Series(np.zeros(0, np.int64), np.zeros(0, np.int64))
    found = {}
    for unit in dict.fromkeys([*live.by_unit, *traffic, *work]):
        series = live.by_unit.get(unit, nothing)
        found[unit] = UnitUse(int(series.at(here)[0]), series.maximum, traffic.get(unit, 0), work.get(unit, 0))
    return found


def _changes(trace: Trace) -> Iterator[tuple[int, int, Allocation]]:
    """Yield (position, +1 or -1, allocation) for each allocation and free; ``resident`` is allocated at -1."""
    live: dict[int, Allocation] = {}
    for position, event in enumerate([*trace.resident, *trace.events], start=-len(trace.resident)):
        position = max(-1, position)
        if type(event) is Free:
            allocation = live.pop(event.storage, None)
            if allocation is None:
                raise ValueError(f"event {position} frees storage {event.storage}, which is not alive")
            if allocation.bytes != event.bytes:
                raise ValueError(
                    f"event {position} frees {event.bytes} bytes of storage {event.storage} ({allocation.what}), "
                    f"which has {allocation.bytes}"
                )
            yield position, -1, allocation
        elif type(event) is Allocation:
            if event.storage in live:
                raise ValueError(f"event {position} allocates storage {event.storage} ({event.what}) a second time")
            live[event.storage] = event
            yield position, 1, event


def _series(positions: Numbers, changes: Numbers) -> Series:
    """Sum up changes, with one entry for each position."""
    last = np.append(positions[1:] != positions[:-1], True) if len(positions) else np.zeros(0, bool)
    return Series(positions[last], np.cumsum(changes)[last])
