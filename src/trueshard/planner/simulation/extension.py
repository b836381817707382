"""Extend traces of a model with few equal blocks to one with many, exactly.

Traces with six and with five blocks of a run are extended. Blocks 3 and 4 of six have neighbours on both sides that do,
too. If their traces are identical, so are those of all further blocks: block 3's events are repeated. Events that
happen once for all blocks (a list operator of the optimizer, a norm) grow by the same amount with every block. Both are
checked event by event on the two traces; where they do not hold, nothing is extended.

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
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trueshard.planner import ledger
from trueshard.planner.simulation.repeats import Run
from trueshard.planner.trace import Allocation, Communication, Event, EventPlace, Free, HostCopy, Kernel, Phase, Trace

KEPT = 6
"""Blocks of a run that are simulated."""

COPIED = 2
"""Index of the block whose events are repeated."""

_COPY = 1 << 40
"""Added to a storage's number for each copy of its block."""

_FIELDS = {
    cls: [field.name for field in dataclasses.fields(cls)]
    for cls in (Allocation, Free, Kernel, Communication, HostCopy)
}
_VALUES = {cls: operator.attrgetter(*fields) for cls, fields in _FIELDS.items()}
"""Fields of an event: to make another from them is several times as fast as ``copy.copy``."""

Label = tuple[int, int] | None
"""(run, block), or None outside of all blocks."""

_PASSES = ("forward", "backward")
"""Phases that take the blocks one after the other."""

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
    label_of = _labels_of_units(runs)
    residents = len(trace.resident)
    items = [*trace.resident, *trace.events]
    labels = [label_of(allocation.unit) for allocation in trace.resident]
    made = {item.storage: at for at, item in enumerate(items) if isinstance(item, Allocation)}
    for event in trace.events:
        label = label_of(event.place.unit)
        if isinstance(event, Free) and _is_freed_at_last(event, label, labels[made[event.storage]]):
            label = labels[made[event.storage]]
        if label is None and isinstance(event, (Allocation, Communication, HostCopy)):
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


def _labels_of_units(runs: Sequence[Run]) -> Callable[[str], Label]:
    @functools.cache
    def label_of(unit: str) -> Label:
        for r, run in enumerate(runs):
            if (block := run.block_of(unit.partition(" + ")[0])) is not None:
                return r, block
        return None

    return label_of


def _is_freed_at_last(event: Free, place: Label, allocating: Label) -> bool:
    """True if a step frees it together with those of other blocks, while its place is still that of the last one."""
    near = place is None or allocating is None or (place[0] == allocating[0] and abs(place[1] - allocating[1]) <= 1)
    return not near and event.place.phase not in _PASSES


def _fill_gaps(events: Sequence[Event], labels: list[Label], start: int) -> None:
    """Label events between a block and the next, in forward or backward, with the block before, from ``start`` on."""
    before: int | None = None
    for at in range(start, len(labels)):
        if (label := labels[at]) is None:
            continue
        if before is not None and before < at - 1:
            last, phase = labels[before], events[before].place.phase
            assert last is not None
            near = label[0] == last[0] and abs(label[1] - last[1]) <= 1 and phase in _PASSES
            if near and all(event.place.phase == phase for event in events[before : at + 1]):
                labels[before + 1 : at] = [last] * (at - before - 1)
        before = at


def _freeing_block(events: Sequence[Event], labels: Sequence[Label], at: int, allocating: Label) -> Label:
    """Return the block that ended just before a free outside of all blocks, or else the one that allocated."""
    last = labels[at - 1] if at and events[at - 1].place.phase == events[at].place.phase else None
    near = allocating is not None and last is not None and last[0] == allocating[0]
    return last if near and events[at].place.phase in _PASSES else allocating


# Extension


def extend(base: Trace, fewer: Sequence[Trace], runs: Sequence[Run], recorded: Sequence[Run] | None = None) -> Trace:
    """Return the trace of the whole model, which has ``runs``.

    ``base``: with ``KEPT`` blocks of each run; ``fewer``: for each run, with one block less of it; ``recorded``: the
    runs of the model that made them, if they lie elsewhere in the same containers.

    Raises:
        NotPeriodicError: it cannot be extended exactly.
    """
    recorded = runs if recorded is None else recorded
    labelled_base = labelled(base, recorded)
    growth: Counter[tuple[int, str]] = Counter()
    for r, (less, run) in enumerate(zip(fewer, runs, strict=True)):
        _check_middle(labelled_base, r)
        for amount, difference in _growth(labelled_base, labelled(less, recorded), r).items():
            growth[amount] += difference * (run.count - KEPT)
    made = _Extension(labelled_base, runs, recorded, growth).trace()
    for name in ("host_bytes", "snapshot_bytes"):
        whole = getattr(base, name)
        blocks = ((run.count - KEPT) * (whole - getattr(less, name)) for less, run in zip(fewer, runs, strict=True))
        setattr(made, name, whole + sum(blocks))
    made.largest_imbalance = base.largest_imbalance
    try:
        ledger.lifetimes(made)
    except ValueError as error:
        raise NotPeriodicError(str(error)) from error
    return made


_AMOUNTS = ("flops", "read", "written", "received", "bytes")
"""Fields that may grow with the number of blocks."""

_TRAITS = ("op", "stream", "ranks", "stride", "axis", "kind", "dtype", "causal", "recomputed", "direction")
"""Fields that are the same for any number of blocks, as is the phase."""


_TRAITS_OF = {cls: [name for name in _TRAITS if name in fields] for cls, fields in _FIELDS.items()}
_AMOUNTS_OF = {cls: [name for name in _AMOUNTS if name in fields] for cls, fields in _FIELDS.items()}


def _kind(event: Event) -> tuple[Any, ...]:
    traits = (getattr(event, name) for name in _TRAITS_OF[type(event)])
    return (type(event).__name__.lower(), event.place.phase, *traits)


def _amounts(event: Event) -> dict[str, int]:
    return {name: getattr(event, name) for name in _AMOUNTS_OF[type(event)]}


def _block_trace(base: Labelled, label: Label) -> list[tuple[Any, ...]]:
    """Return one block's items, in order, with references relative to the block."""
    block_items: list[tuple[Any, ...]] = []
    for at, (item, block) in enumerate(zip(base.items, base.labels, strict=True)):
        if block == label:
            references = (
                _relative(base.labels[index], base.ordinals[index], label) for index in _references(base, item)
            )
            block_items.append((at < base.residents, *_kind(item), *_amounts(item).values(), *references))
    return block_items


def _references(base: Labelled, item: Event) -> list[int]:
    if isinstance(item, Free):
        return [base.made[item.storage]]
    return [base.residents + position for position in item.after] if isinstance(item, (Kernel, Communication)) else []


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
    growth: dict[tuple[int, str], int] = {}
    for at, other in zip(kept, less.items, strict=True):
        item = base.items[at]
        if _kind(item) != _kind(other):
            raise NotPeriodicError(f"a block more changes other events: {_kind(item)}, {_kind(other)}")
        for name, amount in _amounts(item).items():
            if difference := amount - getattr(other, name):
                growth[at, name] = difference
    return growth


class _Part(NamedTuple):
    """An old item, with what is the same for all that are made of it."""

    item: Any
    cls: Any
    values: tuple[Any, ...]
    place: tuple[Phase, str, Label]
    """Phase, old unit, and the block with which the unit changes."""
    growth: Mapping[str, int] | None


class _Extension:
    """Builds the whole model's trace.

    Labels and indices of ``base`` are called old, those of the whole model new. The blocks before the copied one have
    the same number in both; those behind it are as far from the run's end.
    """

    def __init__(
        self, base: Labelled, runs: Sequence[Run], recorded: Sequence[Run], growth: Counter[tuple[int, str]]
    ) -> None:
        self.base = base
        self.runs = runs
        self.recorded = recorded
        self.growth: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for (index, name), more in growth.items():
            self.growth[index][name] = more
        self.items: list[Any] = []
        self.residents = 0
        self.indices: defaultdict[Label, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        """New label → indices of its new items that are no allocations, and of those that are, each in order."""
        self.label_of = _labels_of_units(recorded)
        self.name = functools.cache(self._name)
        self.place = functools.cache(lambda phase, unit, old, new: EventPlace(phase, self.name(unit, old, new)))
        self.targets = functools.cache(self._targets)

    def trace(self) -> Trace:
        base = self.base
        groups = itertools.groupby(range(len(base.items)), lambda index: (index < base.residents, base.labels[index]))
        for (is_resident, label), group in groups:
            indices = list(group)
            parts = [self._part(index, label) for index in indices]
            for new in self._new_labels(label, indices[0]):
                self._add(parts, label, new)
            if is_resident:
                self.residents = len(self.items)
        return Trace(self.items[self.residents :], self.items[: self.residents])

    def _new_labels(self, label: Label, index: int) -> list[Label]:
        """Return the blocks that an old block stands for, in the order in which they run at ``index``."""
        new = list(self.targets(label, None, None))
        if label is not None and label[1] == COPIED:
            before = (near for near in reversed(self.base.labels[:index]) if near is not None)
            neighbour = next((block for r, block in before if r == label[0] and block != COPIED), 0)
            if neighbour > COPIED:
                new.reverse()
        return new

    def _blocks(self, r: int, block: int) -> Sequence[int]:
        more = self.runs[r].count - KEPT
        if block == COPIED:
            return range(COPIED, COPIED + more + 1)
        return [block if block < COPIED else block + more]

    def _part(self, index: int, old: Label) -> _Part:
        item: Any = self.base.items[index]
        at_last = isinstance(item, Free) and _is_freed_at_last(item, self.label_of(item.place.unit), old)
        place = item.place.phase, item.place.unit, None if at_last else old
        return _Part(item, type(item), _VALUES[type(item)](item), place, self.growth.get(index))

    def _add(self, parts: Sequence[_Part], old: Label, new: Label) -> None:
        """Add the items of a block, or of what is outside of all, for a new one: the innermost loop of a study."""
        items, (others, allocations) = self.items, self.indices[new]
        copied = old is not None and new is not None and old[1] == COPIED
        shift = _COPY * (new[1] - COPIED) if copied and new is not None else 0
        places: dict[tuple[Phase, str, Label], EventPlace] = {}
        for part in parts:
            item, cls = part.item, part.cls
            made: Any = cls(*part.values)
            if (place := places.get(part.place)) is None:
                phase, unit, label = part.place
                place = places[part.place] = self.place(phase, unit, label, None if label is None else new)
            made.place = place
            if cls is Free:
                made_at = self._indices([self.base.made[item.storage]], old, new)[0]
                made.storage = items[made_at].storage
            elif cls is not Kernel:
                made.unit = self.name(item.unit, old, new)
            if cls is Allocation:
                made.what = self.name(item.what, old, new)
                made.storage += shift
            elif (cls is Kernel or cls is Communication) and item.after:
                made.after = self._positions(item.after, old, new)
            for name, more in (part.growth or {}).items():
                setattr(made, name, max(0, getattr(item, name) + more))
                if cls is Allocation:
                    made.shape = ()  # it is unknown which dimension grows
            (allocations if cls is Allocation else others).append(len(items))
            items.append(made)

    def _positions(self, after: Sequence[int], old: Label, new: Label) -> tuple[int, ...]:
        indices = self._indices([self.base.residents + position for position in after], old, new)
        return tuple(sorted(index - self.residents for index in indices))

    def _indices(self, references: Sequence[int], old: Label, new: Label) -> list[int]:
        """Return the new indices of what an item refers to by old indices, when ``old`` becomes ``new``."""
        new_indices: list[int] = []
        for index in references:
            is_allocation, number = self.base.ordinals[index]
            targets = self.targets(self.base.labels[index], old, new)
            new_indices += [self.indices[target][is_allocation][number] for target in targets]
        return new_indices

    def _targets(self, label: Label, old: Label, new: Label) -> Sequence[Label]:
        """Return the new labels of what ``old``, which becomes ``new``, refers to; of all copies from outside."""
        if label is None:
            return [None]
        blocks = self._blocks(*label)
        if old is not None and new is not None and label[0] == old[0]:
            distance = label[1] - old[1]
            if old[1] == COPIED or abs(distance) <= 2:  # else from one end of the run to the other
                blocks = [new[1] + distance]
        return [(label[0], block) for block in blocks]

    def _name(self, name: str, old: Label, new: Label) -> str:
        for r, (was, run) in enumerate(zip(self.recorded, self.runs, strict=True)):
            if (block := was.block_of(name)) is not None:
                target = self.targets((r, block), old, new)[0]
                assert target is not None
                return was.moved(name, target[1] - block, run.start)
        return name
