"""Extend traces of a model with six and with five equal blocks to one with many.

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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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

Ordinal = tuple[bool, int]
"""(whether it is an allocation, how many items of its block came before it that are or are not)."""


class NotPeriodicError(Exception):
    """The blocks of a run behave differently, or what they share does not grow evenly."""


# Labels


@dataclass
class Labelled:
    """A trace with the block of each item: ``residents`` resident allocations, then events."""

    items: list[Event]
    residents: int
    labels: list[Label]
    ordinals: list[Ordinal]
    made: dict[int, int]
    """Storage → index of the item that allocates it."""


def labelled(trace: Trace, runs: Sequence[Run]) -> Labelled:
    """Label a trace's items with their blocks of the ``runs`` of the model that made it."""

    @functools.cache
    def label_of(unit: str) -> Label:
        for r, run in enumerate(runs):
            if (block := run.block_of(unit.partition(" + ")[0])) is not None:
                return r, block
        return None

    residents = len(trace.resident)
    items = [*trace.resident, *trace.events]
    labels = [label_of(each.unit) for each in trace.resident]
    made = {item.storage: at for at, item in enumerate(items) if isinstance(item, Allocation)}
    for event in trace.events:
        label = label_of(event.place.unit)
        if label is None and isinstance(event, (Allocation, Communication, Transfer)):
            label = label_of(event.unit)
        labels.append(label)
    _fill_gaps(items, labels, residents)
    counts: defaultdict[tuple[Label, bool], Iterator[int]] = defaultdict(itertools.count)
    ordinals = []
    for at, item in enumerate(items):
        if isinstance(item, Free) and labels[at] is None:
            labels[at] = _freeing_block(items, labels, at, labels[made[item.storage]])
        is_allocation = isinstance(item, Allocation)
        ordinals.append((is_allocation, next(counts[labels[at], is_allocation])))
    return Labelled(items, residents, labels, ordinals, made)


def _fill_gaps(events: Sequence[Event], labels: list[Label], start: int) -> None:
    """From ``start`` on, label events between a block and the next, in forward or backward, with the block before."""
    before: int | None = None
    for at in range(start, len(labels)):
        if (label := labels[at]) is None:
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
    """Return the trace of the whole model, which has ``runs``.

    ``base``: with ``KEPT`` blocks of each run; ``fewer``: for each run, with one block less of it.

    Raises:
        NotPeriodicError: it cannot be extended exactly.
    """
    growth: Counter[tuple[int, str]] = Counter()
    for r, (less, run) in enumerate(zip(fewer, runs, strict=True)):
        _check_middle(base, r)
        for amount, difference in _growth(base, less, r).items():
            growth[amount] += difference * (run.count - KEPT)
    made = _Extension(base, runs, growth).trace()
    try:
        ledger.lifetimes(made)
    except ValueError as error:
        raise NotPeriodicError(str(error)) from error
    return made


_AMOUNTS = ("flops", "read", "written", "received", "bytes")
"""Fields that may grow with the number of blocks."""

_TRAITS = ("op", "stream", "ranks", "stride", "kind", "dtype", "causal", "recomputed", "direction")
"""Fields that are the same for any number of blocks, as is the phase."""


def _kind(event: Event) -> tuple[Any, ...]:
    traits = (getattr(event, name) for name in _TRAITS if hasattr(event, name))
    return (type(event).__name__.lower(), event.place.phase, *traits)


def _amounts(event: Event) -> dict[str, int]:
    return {name: getattr(event, name) for name in _AMOUNTS if hasattr(event, name)}


def _block_trace(base: Labelled, label: Label) -> list[tuple[Any, ...]]:
    """Return one block's items, in order, with references relative to the block."""
    found: list[tuple[Any, ...]] = []
    for at, (item, own) in enumerate(zip(base.items, base.labels, strict=True)):
        if own == label:
            references = (_relative(base.labels[each], base.ordinals[each], label) for each in _references(base, item))
            found.append((at < base.residents, *_kind(item), *_amounts(item).values(), *references))
    return found


def _references(base: Labelled, item: Event) -> list[int]:
    if isinstance(item, Free):
        return [base.made[item.storage]]
    return [base.residents + each for each in item.after] if isinstance(item, (Kernel, Communication)) else []


def _relative(label: Label, ordinal: Ordinal, origin: Label) -> tuple[Any, ...]:
    if label is None or origin is None or label[0] != origin[0]:
        return label, ordinal
    return label[0], "+", label[1] - origin[1], ordinal


def _check_middle(base: Labelled, r: int) -> None:
    one, two = _block_trace(base, (r, COPIED)), _block_trace(base, (r, COPIED + 1))
    if one != two:
        pairs = (f"{a} and {b}" for a, b in zip(one, two, strict=False) if a != b)
        different = next(pairs, f"{len(one)} and {len(two)} events")
        raise NotPeriodicError(f"two equal blocks behave differently: {different}")
    for item, label in zip(base.items, base.labels, strict=True):
        if label == (r, COPIED) and isinstance(item, Free) and base.labels[base.made[item.storage]] is None:
            raise NotPeriodicError("a block frees memory that belongs to none")


def _growth(base: Labelled, less: Labelled, r: int) -> dict[tuple[int, str], int]:
    """Map (index, amount) of items that are there once to how much that grows with each block."""
    kept = [at for at, label in enumerate(base.labels) if label != (r, COPIED)]
    behind: dict[Label, Label] = {(r, block): (r, block - 1) for block in range(COPIED + 1, KEPT)}
    if [behind.get(base.labels[at], base.labels[at]) for at in kept] != less.labels:
        raise NotPeriodicError("a block more does not add one block's events and memory")
    found: dict[tuple[int, str], int] = {}
    for at, other in zip(kept, less.items, strict=True):
        item = base.items[at]
        if _kind(item) != _kind(other):
            raise NotPeriodicError(f"a block more changes other events: {_kind(item)}, {_kind(other)}")
        for name, amount in _amounts(item).items():
            if difference := amount - getattr(other, name):
                found[at, name] = difference
    return found


class _Extension:
    """Builds the whole model's trace.

    Labels and indices of ``base`` are called old, those of the whole model new. The blocks before the copied one have
    the same number in both; those behind it are as far from the run's end.
    """

    def __init__(self, base: Labelled, runs: Sequence[Run], growth: Counter[tuple[int, str]]) -> None:
        self.base = base
        self.runs = runs
        self.kept = with_counts(runs, [KEPT] * len(runs))
        self.growth = growth
        self.items: list[Any] = []
        self.residents = 0
        self.index: dict[tuple[Label, Ordinal], int] = {}
        """(new label, ordinal) → index of the new item."""

    def trace(self) -> Trace:
        at = 0
        is_resident = [index < self.base.residents for index in range(len(self.base.items))]
        for (_, label), group in itertools.groupby(zip(is_resident, self.base.labels, strict=True)):
            end = at + len(list(group))
            for new in self._new_labels(label, at):
                for old_index in range(at, end):
                    self.index[new, self.base.ordinals[old_index]] = len(self.items)
                    self.items.append(self._moved(old_index, label, new))
            at = end
            if at <= self.base.residents:
                self.residents = len(self.items)
        return Trace(self.items[self.residents :], self.items[: self.residents])

    def _new_labels(self, label: Label, index: int) -> list[Label]:
        """Return the blocks that an old block stands for, in the order in which they run at ``index``."""
        if label is None:
            return [None]
        new: list[Label] = [(label[0], block) for block in self._blocks(*label)]
        if label[1] == COPIED:
            before = (each for each in reversed(self.base.labels[:index]) if each is not None)
            neighbour = next((block for r, block in before if r == label[0] and block != COPIED), 0)
            if neighbour > COPIED:
                new.reverse()
        return new

    def _blocks(self, r: int, block: int) -> Sequence[int]:
        more = self.runs[r].count - KEPT
        if block == COPIED:
            return range(COPIED, COPIED + more + 1)
        return [block if block < COPIED else block + more]

    def _moved(self, index: int, old: Label, new: Label) -> Event:
        item = self.base.items[index]
        changes: dict[str, Any] = {"place": Place(item.place.phase, self._name(item.place.unit, old, new))}
        if not isinstance(item, (Free, Kernel)):
            changes["unit"] = self._name(item.unit, old, new)
        if isinstance(item, Allocation):
            changes["what"] = self._name(item.what, old, new)
            if old is not None and new is not None and old[1] == COPIED:
                changes["storage"] = item.storage + _COPY * (new[1] - COPIED)
        references = _references(self.base, item)
        if isinstance(item, Free):
            label, ordinal = self.base.labels[references[0]], self.base.ordinals[references[0]]
            changes["storage"] = self.items[self.index[self._target(label, old, new), ordinal]].storage
        elif references:
            positions = (each - self.residents for after in references for each in self._indices(after, old, new))
            changes["after"] = tuple(sorted(positions))
        for name, amount in _amounts(item).items():
            if more := self.growth[index, name]:
                changes[name] = max(0, amount + more)
                if isinstance(item, Allocation):
                    changes["shape"] = ()  # it is unknown which dimension grows
        return dataclasses.replace(item, **changes)

    def _target(self, label: Label, old: Label, new: Label) -> Label:
        """Return the new label of what an event of ``old`` that becomes one of ``new`` refers to."""
        if label is None:
            return None
        if old is not None and new is not None and label[0] == old[0]:
            distance = label[1] - old[1]
            if old[1] == COPIED or abs(distance) <= 2:  # else from one end of the run to the other
                return label[0], new[1] + distance
        return label[0], self._blocks(*label)[0]

    def _indices(self, index: int, old: Label, new: Label) -> list[int]:
        """Return the new indices that an old one stands for: those of all copies if seen from outside of the run."""
        label, ordinal = self.base.labels[index], self.base.ordinals[index]
        if label is None or label[1] != COPIED or (old is not None and old[0] == label[0]):
            return [self.index[self._target(label, old, new), ordinal]]
        return [self.index[(label[0], block), ordinal] for block in self._blocks(*label)]

    def _name(self, name: str, old: Label, new: Label) -> str:
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
