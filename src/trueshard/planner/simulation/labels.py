"""Which block of a model each event of a trace belongs to.

What happens between two blocks belongs to the one before; memory that is given back outside of all, to the block that
ended just before.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trueshard.planner.events import Allocation, Communication, Event, Free, Trace, Transfer

Label = tuple[int, int] | None
"""(run, block), or None outside of all blocks."""


@dataclass
class Labelled:
    """A trace with, for each event, to which block it belongs."""

    trace: Trace
    labels: list[Label]
    of_storage: dict[int, tuple[Label, int]]
    """Storage → (its block, how many storages of that block were made before it)."""
    of_event: list[int]
    """How many events of its block came before it."""


def labelled(trace: Trace, label_of: Callable[[str], Label]) -> Labelled:
    """Sort a trace's events by block."""
    label_of = functools.cache(label_of)
    labels = [_own_label(event, label_of) for event in trace.events]
    _fill_gaps(trace.events, labels)
    of_storage: dict[int, tuple[Label, int]] = {}
    made: Counter[Label] = Counter()
    for each in trace.resident:
        where = label_of(each.unit)
        of_storage[each.storage] = where, made[where]
        made[where] += 1
    counts: Counter[Label] = Counter()
    of_event = []
    for at, event in enumerate(trace.events):
        if isinstance(event, Allocation):
            of_storage[event.storage] = labels[at], made[labels[at]]
            made[labels[at]] += 1
        elif isinstance(event, Free) and labels[at] is None:
            labels[at] = _giver(trace.events, labels, at, of_storage[event.storage][0])
        of_event.append(counts[labels[at]])
        counts[labels[at]] += 1
    return Labelled(trace, labels, of_storage, of_event)


def _giver(events: Sequence[Event], labels: Sequence[Label], at: int, made: Label) -> Label:
    """Which block gives memory back outside of all: the one that ended just before, or else the one that took it."""
    last = labels[at - 1] if at and events[at - 1].place.phase == events[at].place.phase else None
    near = made is not None and last is not None and last[0] == made[0]
    return last if near and events[at].place.phase in ("forward", "backward") else made


def _own_label(event: Event, label_of: Callable[[str], Label]) -> Label:
    """The block in which something happens or, outside of all, to which it belongs."""
    here = label_of(event.place.unit)
    if here is None and isinstance(event, (Allocation, Communication, Transfer)):
        return label_of(event.unit)
    return here


def _fill_gaps(events: Sequence[Event], labels: list[Label]) -> None:
    """What happens between a block and the next, forward or backward, belongs to the one before."""
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


def rows_of_labels(labels: Sequence[Label]) -> list[tuple[int, int]]:
    """(first, after last) of each row of equal labels."""
    groups: list[tuple[int, int]] = []
    first = 0
    for at in range(1, len(labels) + 1):
        if at == len(labels) or labels[at] != labels[first]:
            groups.append((first, at))
            first = at
    return groups
