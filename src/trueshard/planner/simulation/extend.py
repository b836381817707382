"""The trace of a model with many equal blocks, from traces of the same model with six and five of them.

The third and fourth of six equal blocks have neighbours that have neighbours on both sides. What happens in the third,
and just so in the fourth, happens in every further one: its events are repeated, wherever in the
step they stand. What happens once for all blocks (a list operator of the optimizer, a norm) grows by the same amount
with every block. Both are checked on the two traces, event by event; where they do not hold, nothing is extended.

One thing is rounded: clipping sums the squares of all small parameters by rows of 1024 elements, and the number of
rows does not grow evenly. What these partial norms read and take (4 bytes a row) may be wrong by a row for each block
that was not simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trueshard.planner.events import Allocation, Communication, Event, Free, Kernel, Trace, Transfer
from trueshard.planner.memory import ledger
from trueshard.planner.simulation.labels import Label, Labelled, rows_of_labels
from trueshard.planner.simulation.repeats import Run, with_counts

KEPT = 6
"""Blocks of a run that are simulated."""

COPIED = 2
"""The one that stands for all that are not."""

_COPY = 1 << 40
"""Added to a storage's number for each copy of the block that it belongs to."""


class NotPeriodicError(Exception):
    """The blocks of a run do not behave alike, or what all share does not grow evenly."""


def extend(base: Labelled, fewer: Sequence[Labelled], runs: Sequence[Run]) -> Trace:
    """The trace of the whole model.

    Args:
        base: with ``KEPT`` blocks of each run.
        fewer: for each run, with one block less of it.
        runs: of the whole model.

    Raises:
        NotPeriodicError: it cannot be extended exactly.
    """
    growth: dict[int, tuple[int, ...]] = {}
    held: dict[int, int] = {}
    for r, (less, run) in enumerate(zip(fewer, runs, strict=True)):
        _check_middle(base, r)
        for position, differences in _grown(base, less, r).items():
            more = tuple(each * (run.count - KEPT) for each in differences)
            before = growth.get(position, (0,) * len(more))
            growth[position] = tuple(a + b for a, b in zip(before, more, strict=True))
        for storage, difference in _grown_resident(base, less, r).items():
            held[storage] = held.get(storage, 0) + difference * (run.count - KEPT)
    made = _Extension(base, runs, growth, held).trace()
    try:
        ledger.check(made)
    except ValueError as error:
        raise NotPeriodicError(str(error)) from error
    return made


# What must hold


def _tokens(traced: Labelled, label: Label) -> list[tuple[Any, ...]]:
    """The events of one block, in order, without what tells blocks apart."""
    tokens = [
        _token(e, traced, label) for e, here in zip(traced.trace.events, traced.labels, strict=True) if here == label
    ]
    held = [_meaning(each) for each in traced.trace.resident if traced.of_storage[each.storage][0] == label]
    return [("held", *held), *tokens]


def _token(event: Event, traced: Labelled, label: Label) -> tuple[Any, ...]:
    return (*_meaning(event), *_amounts(event), *_references(event, traced, label))


def _meaning(event: Event) -> tuple[Any, ...]:
    """What stays the same however many blocks there are."""
    if isinstance(event, Allocation):
        return ("allocation", event.place.phase, event.stream, event.kind, event.dtype)
    if isinstance(event, Free):
        return ("free", event.place.phase)
    if isinstance(event, Kernel):
        return ("kernel", event.place.phase, event.op, event.dtype, event.causal, event.recomputed)
    if isinstance(event, Communication):
        return ("communication", event.place.phase, event.op, event.stream, event.ranks, event.stride, event.dtype)
    return ("transfer", event.place.phase, event.direction)


def _amounts(event: Event) -> tuple[int, ...]:
    """What may grow with the number of blocks."""
    if isinstance(event, Kernel):
        return event.flops, event.read, event.written
    if isinstance(event, Communication):
        return event.received, event.bytes
    return (event.bytes,)


def _references(event: Event, traced: Labelled, label: Label) -> tuple[Any, ...]:
    """What an event refers to, as seen from its block."""
    if isinstance(event, Free):
        return (_relative(*traced.of_storage[event.storage], label),)
    if isinstance(event, (Kernel, Communication)):
        return tuple(_relative(traced.labels[at], traced.of_event[at], label) for at in event.after)
    return ()


def _relative(where: Label, ordinal: int, seen_from: Label) -> tuple[Any, ...]:
    if where is None:
        return None, ordinal
    if seen_from is None or where[0] != seen_from[0]:
        return where, ordinal
    return where[0], "+", where[1] - seen_from[1], ordinal


def _check_middle(base: Labelled, r: int) -> None:
    one, two = _tokens(base, (r, COPIED)), _tokens(base, (r, COPIED + 1))
    if one != two:
        raise NotPeriodicError(f"two equal blocks behave differently: {_first_difference(one, two)}")
    for event, here in zip(base.trace.events, base.labels, strict=True):
        if here == (r, COPIED) and isinstance(event, Free) and base.of_storage[event.storage][0] is None:
            raise NotPeriodicError("a block frees memory that belongs to none")


def _grown(base: Labelled, less: Labelled, r: int) -> dict[int, tuple[int, ...]]:
    """Position in ``base`` of events that are there once → by how much their amounts grow with a block more."""
    kept = [at for at, here in enumerate(base.labels) if here != (r, COPIED)]
    renamed = [_after_removal(base.labels[at], r) for at in kept]
    if renamed != less.labels:
        raise NotPeriodicError("a block more does not add one block's events")
    grown: dict[int, tuple[int, ...]] = {}
    for at, event in zip(kept, less.trace.events, strict=True):
        mine = base.trace.events[at]
        if _meaning(mine) != _meaning(event):
            raise NotPeriodicError(f"a block more changes what else happens: {_meaning(mine)}, {_meaning(event)}")
        differences = tuple(a - b for a, b in zip(_amounts(mine), _amounts(event), strict=True))
        if any(differences):
            grown[at] = differences
    return grown


def _grown_resident(base: Labelled, less: Labelled, r: int) -> dict[int, int]:
    """Storage that is there from the beginning → by how many bytes it grows with a block more."""
    kept = [each for each in base.trace.resident if base.of_storage[each.storage][0] != (r, COPIED)]
    if len(kept) != len(less.trace.resident):
        raise NotPeriodicError("a block more does not add one block's memory")
    grown: dict[int, int] = {}
    for mine, other in zip(kept, less.trace.resident, strict=True):
        if _meaning(mine) != _meaning(other):
            raise NotPeriodicError(f"a block more changes what is held: {_meaning(mine)}, {_meaning(other)}")
        if mine.bytes != other.bytes:
            grown[mine.storage] = mine.bytes - other.bytes
    return grown


def _after_removal(label: Label, r: int) -> Label:
    return (r, label[1] - 1) if label is not None and label[0] == r and label[1] > COPIED else label


def _first_difference(one: Sequence[Any], two: Sequence[Any]) -> str:
    for a, b in zip(one, two, strict=False):
        if a != b:
            return f"{a} and {b}"
    return f"{len(one)} and {len(two)} events"


# The whole


class _Extension:
    def __init__(
        self, base: Labelled, runs: Sequence[Run], growth: Mapping[int, tuple[int, ...]], held: Mapping[int, int]
    ) -> None:
        self.base = base
        self.runs = runs
        self.kept = with_counts(runs, [KEPT] * len(runs))
        self.growth = growth
        self.held = held
        self.storages = _by_ordinal(base.of_storage)
        self.events: list[Event] = []
        self.at: dict[tuple[Label, int], int] = {}
        """(block of the whole model, ordinal) → position in the new trace."""

    def trace(self) -> Trace:
        base = self.base
        for first, after in rows_of_labels(base.labels):
            label = base.labels[first]
            if label is not None and label[1] == COPIED:
                self._copies(first, after, label[0], descending=self._descends(first, label[0]))
            else:
                self._copy(first, after, label, label if label is None else (label[0], self._whole(*label)))
        return Trace(self.events, self._resident())

    def _descends(self, first: int, r: int) -> bool:
        """Whether blocks come last to first here: told by the nearest other block of the run before ``first``."""
        for label in reversed(self.base.labels[:first]):
            if label is not None and label[0] == r and label[1] != COPIED:
                return label[1] > COPIED
        return False

    def _copies(self, first: int, after: int, r: int, *, descending: bool) -> None:
        blocks = range(COPIED, COPIED + self.runs[r].count - KEPT + 1)
        for block in reversed(blocks) if descending else blocks:
            self._copy(first, after, (r, COPIED), (r, block))

    def _whole(self, r: int, block: int) -> int:
        """A simulated block's place in the whole run: those behind the copied one stay as far from the end."""
        return block if block <= COPIED else self.runs[r].count - KEPT + block

    def _copy(self, first: int, after: int, old: Label, new: Label) -> None:
        base = self.base
        for at in range(first, after):
            event = base.trace.events[at]
            self.at[new, base.of_event[at]] = len(self.events)
            self.events.append(self._moved(event, at, old, new))

    def _moved(self, event: Event, at: int, old: Label, new: Label) -> Event:
        place = dataclasses.replace(event.place, unit=self._unit(event.place.unit, old, new), block=_block(new))
        changes: dict[str, Any] = {"place": place}
        if not isinstance(event, (Free, Kernel)):
            changes["unit"] = self._unit(event.unit, old, new)
        if isinstance(event, Allocation):
            changes["what"] = self._unit(event.what, old, new)
        if isinstance(event, (Allocation, Free)):
            changes["storage"] = self._storage(event.storage, old, new)
        if isinstance(event, (Kernel, Communication)) and event.after:
            places = (place for each in event.after for place in self._positions(each, old, new))
            changes["after"] = tuple(sorted(places))
        if (more := self.growth.get(at)) is not None:
            if isinstance(event, Allocation):
                changes["shape"] = ()  # grown, in a dimension that nobody knows
            grown = (max(0, amount + each) for amount, each in zip(_amounts(event), more, strict=True))
            changes.update(zip(_AMOUNTS[type(event)], grown, strict=True))
        return dataclasses.replace(event, **changes)

    def _target(self, where: Label, old: Label, new: Label) -> Label:
        """Where in the whole model something is to which an event refers."""
        if where is None:
            return None
        if old is None or new is None or where[0] != old[0]:
            return where[0], self._whole(*where)
        distance = where[1] - old[1]
        if old[1] != COPIED and abs(distance) > 2:  # from one end of the run to the other
            return where[0], self._whole(*where)
        return where[0], new[1] + distance

    def _storage(self, number: int, old: Label, new: Label) -> int:
        where, ordinal = self.base.of_storage[number]
        target = self._target(where, old, new)
        return number if target is None else self._number(target, ordinal)

    def _number(self, target: tuple[int, int], ordinal: int) -> int:
        r, block = target
        more = self.runs[r].count - KEPT
        if block <= COPIED:
            return self.storages[(r, block), ordinal]
        if block > COPIED + more:
            return self.storages[(r, block - more), ordinal]
        return self.storages[(r, COPIED), ordinal] + _COPY * (block - COPIED)

    def _positions(self, at: int, old: Label, new: Label) -> list[int]:
        """Where in the new trace those are that ``at`` stands for: all copies, as seen from outside of the run."""
        where, ordinal = self.base.labels[at], self.base.of_event[at]
        if where is None or where[1] != COPIED or (old is not None and old[0] == where[0]):
            return [self.at[self._target(where, old, new), ordinal]]
        blocks = range(COPIED, COPIED + self.runs[where[0]].count - KEPT + 1)
        return sorted(self.at[(where[0], block), ordinal] for block in blocks)

    def _unit(self, name: str, old: Label, new: Label) -> str:
        """The name in the whole model of a unit of the shortened one."""
        for container in {run.container for run in self.runs}:
            prefix = f"{container}." if container else ""
            position, _, rest = name[len(prefix) :].partition(".")
            if name.startswith(prefix) and position.isdecimal():
                return f"{prefix}{self._index(container, int(position), old, new)}{'.' if rest else ''}{rest}"
        return name

    def _index(self, container: str, index: int, old: Label, new: Label) -> int:
        """The position in the whole model's list of a module of the shortened one."""
        moved = 0
        for r, (run, kept) in enumerate(zip(self.runs, self.kept, strict=True)):
            block, inside = divmod(index - kept.start, run.period)
            if run.container != container or block < 0:
                continue
            if block < KEPT:
                target = self._target((r, block), old, new)
                assert target is not None
                return run.start + target[1] * run.period + inside
            moved += (run.count - KEPT) * run.period
        return index + moved

    def _resident(self) -> list[Allocation]:
        held: list[Allocation] = []
        for each in self.base.trace.resident:
            label, ordinal = self.base.of_storage[each.storage]
            each = dataclasses.replace(each, bytes=each.bytes + self.held.get(each.storage, 0))
            if label is None:
                unit, what = self._unit(each.unit, None, None), self._unit(each.what, None, None)
                held.append(dataclasses.replace(each, unit=unit, what=what))
                continue
            r, block = label
            more = self.runs[r].count - KEPT
            blocks = range(COPIED, COPIED + more + 1) if block == COPIED else [self._whole(r, block)]
            for new in blocks:
                unit = self._unit(each.unit, label, (r, new))
                what = self._unit(each.what, label, (r, new))
                held.append(dataclasses.replace(each, storage=self._number((r, new), ordinal), unit=unit, what=what))
        return held


_AMOUNTS: dict[type, tuple[str, ...]] = {
    Kernel: ("flops", "read", "written"),
    Communication: ("received", "bytes"),
    Allocation: ("bytes",),
    Free: ("bytes",),
    Transfer: ("bytes",),
}


def _block(label: Label) -> int:
    return -1 if label is None else label[1]


def _by_ordinal(of_storage: Mapping[int, tuple[Label, int]]) -> dict[tuple[Label, int], int]:
    return {place: number for number, place in of_storage.items()}
