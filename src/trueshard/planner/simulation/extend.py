"""The trace of a model with many equal blocks, from traces of the same model with six and with five of them.

Blocks 3 and 4 of six have neighbours on both sides that do, too. If their traces are identical, so are those of all
further blocks: block 3's events are repeated. Events that happen once for all blocks (a list operator of the
optimizer, a norm) grow by the same amount with every block. Both are checked event by event on the two traces; where
they do not hold, nothing is extended.

Every event is labelled with its block. Events between two blocks belong to the one before; memory freed outside of all
blocks, to the block that ended just before.

One thing is rounded: clipping sums the squares of all small parameters by rows of 1024 elements, and the number of
rows does not grow evenly. What these partial norms read and allocate (4 bytes a row) may be wrong by a row for each
block that was not simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueshard.planner import ledger
from trueshard.planner.simulation.repeats import Run, joined_name, split_name, with_counts
from trueshard.planner.trace import Allocation, Communication, Event, Free, Kernel, Place, Trace, Transfer

KEPT = 6
"""Blocks of a run that are simulated."""

COPIED = 2
"""Index of the block whose events are repeated."""

_COPY = 1 << 40
"""Added to a storage's number for each copy of its block."""

Label = tuple[int, int] | None
"""(run, block), or None outside of all blocks."""


class NotPeriodicError(Exception):
    """The blocks of a run behave differently, or what they share does not grow evenly."""


# Labels


@dataclass
class Labelled:
    """A trace with the block of each event and storage."""

    trace: Trace
    labels: list[Label]
    """By event."""
    ordinals: list[int]
    """By event: how many events of its block came before it."""
    storages: dict[int, tuple[Label, int]]
    """Storage → (its block, how many storages of that block were made before it)."""


def labelled(trace: Trace, runs: Sequence[Run]) -> Labelled:
    """Label a trace's events with their blocks.

    Args:
        trace: of a step.
        runs: of the model that was run.
    """

    @functools.cache
    def label_of(unit: str) -> Label:
        for r, run in enumerate(runs):
            if (block := run.block_of(unit.partition(" + ")[0])) is not None:
                return r, block
        return None

    labels: list[Label] = []
    for event in trace.events:
        label = label_of(event.place.unit)
        if label is None and isinstance(event, (Allocation, Communication, Transfer)):
            label = label_of(event.unit)
        labels.append(label)
    _fill_gaps(trace.events, labels)
    storages: dict[int, tuple[Label, int]] = {}
    made: Counter[Label] = Counter()
    for each in trace.resident:
        label = label_of(each.unit)
        storages[each.storage] = label, made[label]
        made[label] += 1
    counts: Counter[Label] = Counter()
    ordinals = []
    for at, event in enumerate(trace.events):
        if isinstance(event, Allocation):
            storages[event.storage] = labels[at], made[labels[at]]
            made[labels[at]] += 1
        elif isinstance(event, Free) and labels[at] is None:
            labels[at] = _freeing_block(trace.events, labels, at, storages[event.storage][0])
        ordinals.append(counts[labels[at]])
        counts[labels[at]] += 1
    return Labelled(trace, labels, ordinals, storages)


def _fill_gaps(events: Sequence[Event], labels: list[Label]) -> None:
    """Label events between a block and the next, in forward or backward, with the block before them."""
    before: int | None = None
    for at, label in enumerate(labels):
        if label is None:
            continue
        if before is not None and before < at - 1:
            last, phase = labels[before], events[before].place.phase
            assert last is not None
            near = label[0] == last[0] and abs(label[1] - last[1]) <= 1 and phase in ("forward", "backward")
            if near and all(event.place.phase == phase for event in events[before : at + 1]):
                labels[before + 1 : at] = [last] * (at - before - 1)
        before = at


def _freeing_block(events: Sequence[Event], labels: Sequence[Label], at: int, allocating: Label) -> Label:
    """Return the block that ended just before a free outside of all blocks, or else the one that allocated."""
    last = labels[at - 1] if at and events[at - 1].place.phase == events[at].place.phase else None
    near = allocating is not None and last is not None and last[0] == allocating[0]
    return last if near and events[at].place.phase in ("forward", "backward") else allocating


# Extension


def extend(base: Labelled, fewer: Sequence[Labelled], runs: Sequence[Run]) -> Trace:
    """Return the trace of the whole model.

    Args:
        base: trace with ``KEPT`` blocks of each run.
        fewer: for each run, the trace with one block less of it.
        runs: of the whole model.

    Raises:
        NotPeriodicError: it cannot be extended exactly.
    """
    growth: dict[int, tuple[int, ...]] = {}
    resident_growth: Counter[int] = Counter()
    for r, (less, run) in enumerate(zip(fewer, runs, strict=True)):
        _check_middle(base, r)
        for position, differences in _growth(base, less, r).items():
            more = tuple(each * (run.count - KEPT) for each in differences)
            before = growth.get(position, (0,) * len(more))
            growth[position] = tuple(a + b for a, b in zip(before, more, strict=True))
        for storage, difference in _resident_growth(base, less, r).items():
            resident_growth[storage] += difference * (run.count - KEPT)
    made = _Extension(base, runs, growth, resident_growth).trace()
    try:
        ledger.check(made)
    except ValueError as error:
        raise NotPeriodicError(str(error)) from error
    return made


_AMOUNTS: dict[type, tuple[str, ...]] = {
    Kernel: ("flops", "read", "written"),
    Communication: ("received", "bytes"),
    Allocation: ("bytes",),
    Free: ("bytes",),
    Transfer: ("bytes",),
}
"""Fields that may grow with the number of blocks."""


def _amounts(event: Event) -> tuple[int, ...]:
    return tuple(getattr(event, name) for name in _AMOUNTS[type(event)])


def _kind(event: Event) -> tuple[Any, ...]:
    """Return what is the same for any number of blocks."""
    if isinstance(event, Allocation):
        return ("allocation", event.place.phase, event.stream, event.kind, event.dtype)
    if isinstance(event, Free):
        return ("free", event.place.phase)
    if isinstance(event, Kernel):
        return ("kernel", event.place.phase, event.op, event.dtype, event.causal, event.recomputed)
    if isinstance(event, Communication):
        return ("communication", event.place.phase, event.op, event.stream, event.ranks, event.stride, event.dtype)
    return ("transfer", event.place.phase, event.direction)


def _block_trace(base: Labelled, label: Label) -> list[tuple[Any, ...]]:
    """Return one block's events, in order, with references relative to the block."""
    resident = [_kind(each) for each in base.trace.resident if base.storages[each.storage][0] == label]
    found: list[tuple[Any, ...]] = [("resident", *resident)]
    for event, own in zip(base.trace.events, base.labels, strict=True):
        if own == label:
            references: list[Any] = []
            if isinstance(event, Free):
                references = [_relative(*base.storages[event.storage], label)]
            elif isinstance(event, (Kernel, Communication)):
                references = [_relative(base.labels[at], base.ordinals[at], label) for at in event.after]
            found.append((*_kind(event), *_amounts(event), *references))
    return found


def _relative(label: Label, ordinal: int, origin: Label) -> tuple[Any, ...]:
    if label is None or origin is None or label[0] != origin[0]:
        return label, ordinal
    return label[0], "+", label[1] - origin[1], ordinal


def _check_middle(base: Labelled, r: int) -> None:
    """Raise unless the two blocks in the middle of run ``r`` have identical traces."""
    one, two = _block_trace(base, (r, COPIED)), _block_trace(base, (r, COPIED + 1))
    if one != two:
        different = next((f"{a} and {b}" for a, b in zip(one, two, strict=False) if a != b), "")
        different = different or f"{len(one)} and {len(two)} events"
        raise NotPeriodicError(f"two equal blocks behave differently: {different}")
    for event, label in zip(base.trace.events, base.labels, strict=True):
        if label == (r, COPIED) and isinstance(event, Free) and base.storages[event.storage][0] is None:
            raise NotPeriodicError("a block frees memory that belongs to none")


def _growth(base: Labelled, less: Labelled, r: int) -> dict[int, tuple[int, ...]]:
    """Map positions of events that happen once to how much their amounts grow with each block."""
    kept = [at for at, label in enumerate(base.labels) if label != (r, COPIED)]
    if [_after_removal(base.labels[at], r) for at in kept] != less.labels:
        raise NotPeriodicError("a block more does not add one block's events")
    found: dict[int, tuple[int, ...]] = {}
    for at, other in zip(kept, less.trace.events, strict=True):
        event = base.trace.events[at]
        if _kind(event) != _kind(other):
            raise NotPeriodicError(f"a block more changes other events: {_kind(event)}, {_kind(other)}")
        differences = tuple(a - b for a, b in zip(_amounts(event), _amounts(other), strict=True))
        if any(differences):
            found[at] = differences
    return found


def _resident_growth(base: Labelled, less: Labelled, r: int) -> dict[int, int]:
    """Map resident storages that are shared by blocks to the bytes that each block adds."""
    kept = [each for each in base.trace.resident if base.storages[each.storage][0] != (r, COPIED)]
    if len(kept) != len(less.trace.resident):
        raise NotPeriodicError("a block more does not add one block's memory")
    found: dict[int, int] = {}
    for each, other in zip(kept, less.trace.resident, strict=True):
        if _kind(each) != _kind(other):
            raise NotPeriodicError(f"a block more changes what is resident: {_kind(each)}, {_kind(other)}")
        if each.bytes != other.bytes:
            found[each.storage] = each.bytes - other.bytes
    return found


def _after_removal(label: Label, r: int) -> Label:
    return (r, label[1] - 1) if label is not None and label[0] == r and label[1] > COPIED else label


class _Extension:
    """Builds the whole model's trace.

    Labels of ``base`` are called old, those of the whole model new. The blocks before the copied one have the same
    index in both; those behind it are as far from the run's end.
    """

    def __init__(
        self,
        base: Labelled,
        runs: Sequence[Run],
        growth: Mapping[int, tuple[int, ...]],
        resident_growth: Mapping[int, int],
    ) -> None:
        self.base = base
        self.runs = runs
        self.kept = with_counts(runs, [KEPT] * len(runs))
        self.growth = growth
        self.resident_growth = resident_growth
        self.storages = {place: number for number, place in base.storages.items()}
        self.events: list[Event] = []
        self.position: dict[tuple[Label, int], int] = {}
        """(new label, ordinal) → position in the new trace."""

    def trace(self) -> Trace:
        at = 0
        for label, group in itertools.groupby(self.base.labels):
            end = at + len(list(group))
            for new in self._new_labels(label, at):
                for old_position in range(at, end):
                    self.position[new, self.base.ordinals[old_position]] = len(self.events)
                    self.events.append(self._moved(old_position, label, new))
            at = end
        return Trace(self.events, self._resident())

    def _new_labels(self, label: Label, position: int) -> list[Label]:
        """Return the blocks that an old block stands for, in the order in which they run at ``position``."""
        if label is None:
            return [None]
        new: list[Label] = [(label[0], block) for block in self._blocks(*label)]
        if label[1] == COPIED:
            before = (each for each in reversed(self.base.labels[:position]) if each is not None)
            neighbour = next((block for r, block in before if r == label[0] and block != COPIED), 0)
            if neighbour > COPIED:
                new.reverse()
        return new

    def _blocks(self, r: int, block: int) -> Sequence[int]:
        more = self.runs[r].count - KEPT
        if block == COPIED:
            return range(COPIED, COPIED + more + 1)
        return [block if block < COPIED else block + more]

    def _moved(self, position: int, old: Label, new: Label) -> Event:
        event = self.base.trace.events[position]
        place = Place(event.place.phase, self._name(event.place.unit, old, new))
        changes: dict[str, Any] = {"place": place}
        if not isinstance(event, (Free, Kernel)):
            changes["unit"] = self._name(event.unit, old, new)
        if isinstance(event, Allocation):
            changes["what"] = self._name(event.what, old, new)
        if isinstance(event, (Allocation, Free)):
            label, ordinal = self.base.storages[event.storage]
            target = self._target(label, old, new)
            changes["storage"] = event.storage if target is None else self._number(target, ordinal)
        if isinstance(event, (Kernel, Communication)) and event.after:
            positions = (each for after in event.after for each in self._positions(after, old, new))
            changes["after"] = tuple(sorted(positions))
        if (more := self.growth.get(position)) is not None:
            if isinstance(event, Allocation):
                changes["shape"] = ()  # it is unknown which dimension grows
            grown = (max(0, amount + each) for amount, each in zip(_amounts(event), more, strict=True))
            changes.update(zip(_AMOUNTS[type(event)], grown, strict=True))
        return dataclasses.replace(event, **changes)

    def _target(self, label: Label, old: Label, new: Label) -> Label:
        """Return the new label of what an event of ``old`` that becomes one of ``new`` refers to."""
        if label is None:
            return None
        if old is not None and new is not None and label[0] == old[0]:
            distance = label[1] - old[1]
            if old[1] == COPIED or abs(distance) <= 2:  # else from one end of the run to the other
                return label[0], new[1] + distance
        return label[0], self._blocks(*label)[0]

    def _number(self, target: tuple[int, int], ordinal: int) -> int:
        """Return the storage's number in the whole trace."""
        r, block = target
        more = self.runs[r].count - KEPT
        if block <= COPIED:
            return self.storages[(r, block), ordinal]
        if block > COPIED + more:
            return self.storages[(r, block - more), ordinal]
        return self.storages[(r, COPIED), ordinal] + _COPY * (block - COPIED)

    def _positions(self, position: int, old: Label, new: Label) -> list[int]:
        """Return the new positions that an old one stands for: those of all copies if seen from outside of the run."""
        label, ordinal = self.base.labels[position], self.base.ordinals[position]
        if label is None or label[1] != COPIED or (old is not None and old[0] == label[0]):
            return [self.position[self._target(label, old, new), ordinal]]
        return [self.position[(label[0], block), ordinal] for block in self._blocks(*label)]

    def _name(self, name: str, old: Label, new: Label) -> str:
        """Return the name in the whole model of a unit or parameter of the shortened one."""
        for container in {run.container for run in self.runs}:
            if (found := split_name(name, container)) is not None:
                return joined_name(container, self._index(container, found[0], old, new), found[1])
        return name

    def _index(self, container: str, index: int, old: Label, new: Label) -> int:
        """Return the position in the whole model's list of a module of the shortened one."""
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
        found: list[Allocation] = []
        for each in self.base.trace.resident:
            label, ordinal = self.base.storages[each.storage]
            new_labels = [None] if label is None else [(label[0], block) for block in self._blocks(*label)]
            found += [
                dataclasses.replace(
                    each,
                    bytes=each.bytes + self.resident_growth.get(each.storage, 0),
                    storage=each.storage if new is None else self._number(new, ordinal),
                    unit=self._name(each.unit, label, new),
                    what=self._name(each.what, label, new),
                )
                for new in new_labels
            ]
        return found
