"""What a trace adds up to: live memory over the step, its peak, traffic and operations.

A position is an index into ``trace.events``; -1 stands for the beginning, when ``trace.resident`` is all there is.
Figures at a position are those after its event. Everything here is one pass over the events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trueshard.planner.events import KINDS, Allocation, Communication, Free, Kernel, Kind, Phase, Trace

Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Series:
    """Bytes that change at some positions and are constant in between; 0 before the first."""

    positions: Numbers
    """Ascending, shape (n,)."""
    bytes: Numbers
    """From the position of the same index on, shape (n,)."""

    def at(self, positions: Numbers) -> Numbers:
        """Bytes at ``positions``, in their shape."""
        index = np.searchsorted(self.positions, positions, side="right")
        return np.concatenate([np.zeros(1, np.int64), self.bytes])[index]

    @property
    def maximum(self) -> int:
        """The most at any position."""
        return int(self.bytes.max(initial=0))


@dataclass(frozen=True)
class Curve:
    """Live bytes over a step."""

    total: Series
    """Begins at -1 and has every position at which memory is taken or given back."""
    by_kind: Mapping[Kind, Series]
    """All kinds, in the order of ``KINDS``; their sum is ``total``."""
    by_unit: Mapping[str, Series]
    """Units that memory belongs to, in the order in which they first appear; their sum is ``total``."""


@dataclass(frozen=True)
class Peak:
    """The most memory that is alive at one time, where it is reached first."""

    bytes: int
    position: int
    phase: Phase
    unit: str
    by_kind: Mapping[Kind, int]
    """Kinds with memory, in the order of ``KINDS``."""


@dataclass(frozen=True)
class UnitUse:
    """What belongs to one unit."""

    at_peak: int
    """Bytes alive when the step's live memory is highest."""
    maximum: int
    """The most bytes alive at any time."""
    received: int
    """Bytes from other ranks, in a step."""
    flops: int
    """Floating-point operations while the unit's forward or backward runs, recomputation included."""


def check(trace: Trace) -> None:
    """Hold a trace against what must be true of any.

    Raises:
        ValueError: a storage is freed that is not alive, allocated twice, or freed with another size.
    """
    for _ in _changes(trace):
        pass


def curve(trace: Trace) -> Curve:
    """Live memory over the step, by kind and by unit.

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
    return Curve(
        total=_series(where, change),
        by_kind={kind: _part(where, change, kind_of, numbers[kind]) for kind in KINDS},
        by_unit={unit: _part(where, change, unit_of, number) for unit, number in unit_numbers.items()},
    )


def peak(trace: Trace, of: Curve | None = None) -> Peak:
    """The first maximum of live memory.

    Args:
        trace: the step.
        of: its ``curve``, if it has been worked out already.
    """
    live = of or curve(trace)
    index = int(np.argmax(live.total.bytes))
    position = int(live.total.positions[index])
    phase, unit = (trace.events[position].place.phase, trace.events[position].place.unit) if position >= 0 else START
    here = np.array([position])
    parts = {kind: int(series.at(here)[0]) for kind, series in live.by_kind.items()}
    return Peak(
        int(live.total.bytes[index]), position, phase, unit, {kind: count for kind, count in parts.items() if count}
    )


START: tuple[Phase, str] = ("between", "")
"""Phase and unit of position -1."""


def alive(trace: Trace, position: int) -> list[Allocation]:
    """What is allocated at a position, in the order in which it was made."""
    found = {allocation.storage: allocation for allocation in trace.resident}
    for event in trace.events[: position + 1]:
        if type(event) is Allocation:
            found[event.storage] = event
        elif type(event) is Free:
            del found[event.storage]
    return list(found.values())


def largest(trace: Trace, n: int = 20) -> list[Allocation]:
    """The ``n`` largest storages that are alive at the peak, the largest first, then in the order they were made."""
    return sorted(alive(trace, peak(trace).position), key=lambda allocation: -allocation.bytes)[:n]


def received(trace: Trace) -> dict[str, int]:
    """Bytes that reach this rank in a step, by collective, in the order in which those first appear."""
    found: dict[str, int] = defaultdict(int)
    for event in trace.events:
        if type(event) is Communication:
            found[event.op] += event.received
    return dict(found)


def flops(trace: Trace, *, recomputed: bool = True) -> int:
    """Floating-point operations of a step; ``recomputed=False`` leaves out those that repeat the forward."""
    return sum(event.flops for event in trace.events if type(event) is Kernel and (recomputed or not event.recomputed))


def by_unit(trace: Trace, of: Curve | None = None) -> dict[str, UnitUse]:
    """What belongs to each unit, in the order in which units first appear in memory, communication, computation.

    Args:
        trace: the step.
        of: its ``curve``, if it has been worked out already.
    """
    live = of or curve(trace)
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
    """(position, +1 or -1, allocation) for all memory that is taken and given back, ``resident`` at -1."""
    found: dict[int, Allocation] = {}
    for position, event in _memory(trace):
        if type(event) is Free:
            allocation = found.pop(event.storage, None)
            if allocation is None:
                raise ValueError(f"event {position} frees storage {event.storage}, which is not alive")
            if allocation.bytes != event.bytes:
                raise ValueError(
                    f"event {position} frees {event.bytes} bytes of storage {event.storage} ({allocation.what}), "
                    f"which has {allocation.bytes}"
                )
            yield position, -1, allocation
        else:
            assert type(event) is Allocation
            if event.storage in found:
                raise ValueError(f"event {position} allocates storage {event.storage} ({event.what}) a second time")
            found[event.storage] = event
            yield position, 1, event


def _memory(trace: Trace) -> Iterable[tuple[int, Allocation | Free]]:
    for allocation in trace.resident:
        yield -1, allocation
    for position, event in enumerate(trace.events):
        if type(event) is Allocation or type(event) is Free:
            yield position, event


def _part(positions: Numbers, deltas: Numbers, of: Numbers, number: int) -> Series:
    mine = of == number
    return _series(positions[mine], deltas[mine])


def _series(positions: Numbers, deltas: Numbers) -> Series:
    """The running sum, with one entry a position: the last of several at the same."""
    last = np.append(positions[1:] != positions[:-1], True) if len(positions) else np.zeros(0, bool)
    return Series(positions[last], np.cumsum(deltas)[last])
