"""Simulate a model with many equal blocks by a few of them: find these, shorten the model, extend its traces.

A *run* is a row of equal blocks in one container: equal in classes, shapes, dtypes, trainability, settings and in what
the plan says of them. A repeated pattern (dense, experts, dense, experts, …) is one block of several modules.

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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.planner import ledger
from trueshard.planner.trace import Allocation, Communication, Event, Free, Kernel, Place, Trace, Transfer
from trueshard.plans import Plan

LONGEST_PATTERN = 8
FEWEST = 8
"""Smallest number of equal blocks that make a run."""

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Run:
    """Equal blocks in a row."""

    container: str
    """Dotted name of the list that holds them."""
    start: int
    """Index of the first module."""
    period: int
    """Modules a block."""
    count: int
    """Blocks."""

    def block_of(self, name: str) -> int | None:
        """Return the index of the block to which a dotted name belongs, or None."""
        _, index, _ = self._split(name)
        block = (index - self.start) // self.period
        return block if 0 <= block < self.count else None

    def moved(self, name: str, blocks: int) -> str:
        """Return the dotted name of what is so many blocks behind ``name``, which belongs to a block."""
        prefix, index, rest = self._split(name)
        return f"{prefix}{index + blocks * self.period}{rest}"

    def _split(self, name: str) -> tuple[str, int, str]:
        """Return the three parts of a dotted name inside the container; the index is -1 if it is not inside."""
        prefix = f"{self.container}." if self.container else ""
        index, dot, rest = name[len(prefix) :].partition(".")
        is_inside = name.startswith(prefix) and index.isdecimal()
        return prefix, int(index) if is_inside else -1, dot + rest


def find_runs(model: nn.Module, plan: Plan) -> list[Run]:
    """Return the longest runs of at least ``FEWEST`` blocks of an unsharded model that are equal, also in ``plan``."""
    root = names.unwrap(model)
    policies = {
        name: (unit.kind, unit.reshard_after_forward, unit.activation_checkpointing, unit.unshard_in_backward)
        for unit in plan.units
        for name in unit.modules
    }
    uses = Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))
    tied = {parameter for parameter, count in uses.items() if count > 1}
    found: list[Run] = []
    for name, module in names.named_modules(root):
        inside = any(name.startswith(f"{run.container}.") for run in found)
        if isinstance(module, _CONTAINERS) and not inside and len(module) >= FEWEST:
            found += _runs_in(name, _classes(list(module), f"{name}." if name else "", policies, tied))
    return found


def _runs_in(container: str, classes: Sequence[int]) -> list[Run]:
    runs: list[Run] = []
    start = 0
    while start < len(classes):
        best = max(
            (Run(container, start, n, _repetitions(classes, start, n)) for n in range(1, LONGEST_PATTERN)),
            key=lambda run: (run.count * run.period, -run.period),
        )
        if best.count >= FEWEST:
            runs.append(best)
            start += best.count * best.period
        else:
            start += 1
    return runs


def _repetitions(classes: Sequence[int], start: int, period: int) -> int:
    pattern = classes[start : start + period]
    count = 1
    while classes[start + count * period : start + (count + 1) * period] == pattern:
        count += 1
    return count


def _classes(blocks: Sequence[nn.Module], prefix: str, policies: Mapping[str, Any], tied: set[int]) -> list[int]:
    """Return a number for each block; equal blocks have equal numbers."""
    traits = [_traits(names.unwrap(block), f"{prefix}{i}", policies, tied) for i, block in enumerate(blocks)]
    _equate_positions(traits)
    return [traits.index(each) for each in traits]


def _traits(block: nn.Module, name: str, policies: Mapping[str, Any], tied: set[int]) -> dict[Any, Any]:
    """Return all that must be equal for a block to be equal to another; an ``object()`` equals no other."""
    traits: dict[Any, Any] = {("", "shares"): object() if tied & {id(each) for each in block.parameters()} else None}
    if not _is_gathered_inside(block, name, policies):
        traits["", "gathered outside"] = object()
    for inner, module in names.named_modules(block):
        traits[inner] = type(module), module.training, policies.get(f"{name}.{inner}" if inner else name)
        for tensors in (_torch.own_parameters(module), _torch.own_buffers(module)):
            for key, tensor in tensors.items():
                layout = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous())
                traits[inner, key] = layout, tensor is not None and tensor.requires_grad
        traits[inner, "hooks"] = _torch.count_forward_hooks(module)
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN):
                traits[inner, key, "setting"] = value
    return traits


def _is_gathered_inside(block: nn.Module, name: str, policies: Mapping[str, Any]) -> bool:
    """True if all parameters of a block belong to units inside it; else units outside would shrink with it."""
    units = [unit for unit in policies if unit == name or unit.startswith(f"{name}.")]
    if name in units:
        return True
    held = [f"{name}.{each}" for each, _, _, _ in names.named_tensors(block, "parameters")]
    return all(any(each.startswith(f"{unit}.") for unit in units) for each in held)


def _equate_positions(traits: list[dict[Any, Any]]) -> None:
    """Make equal all whole numbers that count along the list (``layer_idx``)."""
    for key in [key for key in traits[0] if isinstance(key, tuple) and len(key) == 3]:
        values: list[Any] = [each.get(key) for each in traits]
        if all(type(value) is int for value in values) and len({value - i for i, value in enumerate(values)}) == 1:
            for each in traits:
                each[key] = "position"


# Fewer blocks


class _Shortened(nn.ModuleList):
    """Mixin for a list without some of its modules: names stay, and an index counts those that are left."""

    def __getitem__(self, index: Any) -> Any:
        left = list(self)[index]
        return nn.ModuleList(left) if isinstance(left, list) else left


def shorten(model: nn.Module, plan: Plan, runs: Sequence[Run], count: int) -> Plan:
    """Remove blocks in place; of each run, the first ``count`` stay. Return the plan of what is left.

    Names stay: the module behind blocks 0 to 29, of which six are left, is number 30 as before.
    """
    modules = dict(names.named_modules(names.unwrap(model)))
    for run in runs:
        container = modules[run.container]
        if isinstance(container, nn.ModuleList):
            names.mix_in(container, _Shortened)
        for index in range(run.start + count * run.period, run.start + run.count * run.period):
            _torch.own_modules(container).pop(str(index), None)

    def is_left(name: str) -> bool:
        return all((run.block_of(name) or 0) < count for run in runs)

    units = tuple(unit for unit in plan.units if all(map(is_left, unit.modules)))
    replicated = tuple(each for each in plan.replicated if is_left(each.name))
    return dataclasses.replace(plan, units=units, replicated=replicated)


# Many blocks from few

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


def extend(base: Trace, fewer: Sequence[Trace], runs: Sequence[Run]) -> Trace:
    """Return the trace of the whole model, which has ``runs``.

    ``base``: with ``KEPT`` blocks of each run; ``fewer``: for each run, with one block less of it.

    Raises:
        NotPeriodicError: it cannot be extended exactly.
    """
    known = labelled(base, runs)
    growth: Counter[tuple[int, str]] = Counter()
    for r, (less, run) in enumerate(zip(fewer, runs, strict=True)):
        _check_middle(known, r)
        for amount, difference in _growth(known, labelled(less, runs), r).items():
            growth[amount] += difference * (run.count - KEPT)
    made = _Extension(known, runs, growth).trace()
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
        self.growth = growth
        self.items: list[Any] = []
        self.residents = 0
        self.index: dict[tuple[Label, Ordinal], int] = {}
        """(new label, ordinal) → index of the new item."""

    def trace(self) -> Trace:
        base = self.base
        groups = itertools.groupby(range(len(base.items)), lambda index: (index < base.residents, base.labels[index]))
        for (is_resident, label), group in groups:
            indices = list(group)
            for new in self._new_labels(label, indices[0]):
                for index in indices:
                    self.index[new, base.ordinals[index]] = len(self.items)
                    self.items.append(self._moved(index, label, new))
            if is_resident:
                self.residents = len(self.items)
        return Trace(self.items[self.residents :], self.items[: self.residents])

    def _new_labels(self, label: Label, index: int) -> list[Label]:
        """Return the blocks that an old block stands for, in the order in which they run at ``index``."""
        new = self._targets(label, None, None)
        if label is not None and label[1] == COPIED:
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
        references = [
            self.index[target, self.base.ordinals[each]]
            for each in _references(self.base, item)
            for target in self._targets(self.base.labels[each], old, new)
        ]
        if isinstance(item, Free):
            changes["storage"] = self.items[references[0]].storage
        elif references:
            changes["after"] = tuple(sorted(each - self.residents for each in references))
        for name, amount in _amounts(item).items():
            if more := self.growth[index, name]:
                changes[name] = max(0, amount + more)
                if isinstance(item, Allocation):
                    changes["shape"] = ()  # it is unknown which dimension grows
        return dataclasses.replace(item, **changes)

    def _targets(self, label: Label, old: Label, new: Label) -> list[Label]:
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
        for r, run in enumerate(self.runs):
            if (block := run.block_of(name)) is not None:
                target = self._targets((r, block), old, new)[0]
                assert target is not None
                return run.moved(name, target[1] - block)
        return name
