"""Blocks that repeat: where they are, and the same model with fewer of them.

A *run* is a row of equal blocks in one container: equal in classes, shapes, dtypes, trainability, settings and in what
the plan says of them. A pattern of several (dense, experts, dense, experts, …) is one block of that many modules.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trueshard import names
from trueshard.plans import Plan, Unit

LONGEST_PATTERN = 8
FEWEST = 8
"""Repetitions from which on a run is worth shortening."""

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Run:
    """Equal blocks in a row."""

    container: str
    """Dotted name of the list that holds them."""
    start: int
    """Position of the first module."""
    period: int
    """Modules a block."""
    count: int
    """Blocks."""

    def block_of(self, name: str) -> int | None:
        """The block to which a dotted name belongs, or None."""
        prefix = f"{self.container}." if self.container else ""
        if not name.startswith(prefix):
            return None
        position = name[len(prefix) :].partition(".")[0]
        if not position.isdecimal():
            return None
        block, _ = divmod(int(position) - self.start, self.period)
        return block if 0 <= block < self.count else None


def find_runs(model: nn.Module, plan: Plan) -> list[Run]:
    """The longest runs of at least ``FEWEST`` equal blocks, none inside another.

    Args:
        model: unsharded.
        plan: with this model's units; what it says of a unit is part of what makes blocks equal.
    """
    root = names.unwrap(model)
    told = {name: _told(unit) for unit in plan.units for name in unit.modules}
    shared = _shared(root)
    found: list[Run] = []
    for name, module in names.named_modules(root):
        inside = any(name.startswith(f"{run.container}.") for run in found)
        if isinstance(module, _CONTAINERS) and not inside and len(module) >= FEWEST:
            found += _runs_in(name, list(module), told, shared)
    return found


def _runs_in(container: str, blocks: Sequence[nn.Module], told: Mapping[str, Any], shared: set[int]) -> list[Run]:
    prefix = f"{container}." if container else ""
    looks = _looks([names.unwrap(block) for block in blocks], prefix, told, shared)
    runs: list[Run] = []
    start = 0
    while start < len(looks):
        best = max(
            (Run(container, start, period, _repetitions(looks, start, period)) for period in range(1, LONGEST_PATTERN)),
            key=lambda run: (run.count * run.period, -run.period),
        )
        if best.count >= FEWEST:
            runs.append(best)
            start += best.count * best.period
        else:
            start += 1
    return runs


def _repetitions(looks: Sequence[Any], start: int, period: int) -> int:
    pattern = looks[start : start + period]
    count = 1
    while looks[start + count * period : start + (count + 1) * period] == pattern:
        count += 1
    return count if len(pattern) == period and count > 1 else 1


def _looks(blocks: Sequence[nn.Module], prefix: str, told: Mapping[str, Any], shared: set[int]) -> list[Any]:
    """For each block, what must be equal for it to be equal to another."""
    looks: list[dict[Any, Any]] = []
    for i, block in enumerate(blocks):
        look: dict[Any, Any] = {("", "shared"): object() if shared & {id(p) for p in block.parameters()} else None}
        if not _gathers_its_own(block, f"{prefix}{i}", told):
            look["", "gathered outside"] = object()
        for name, module in names.named_modules(block):
            look[name] = type(module), module.training, told.get(f"{prefix}{i}.{name}" if name else f"{prefix}{i}")
            for kind in (module._parameters, module._buffers):
                for key, tensor in kind.items():
                    look[name, key] = tensor if tensor is None else _shape_of(tensor)
            look[name, "hooks"] = len(module._forward_hooks), len(module._forward_pre_hooks)
            for key, value in vars(module).items():
                if isinstance(value, _PLAIN):
                    look[name, key, "setting"] = value
        looks.append(look)
    _forget_positions(looks)
    seen: list[dict[Any, Any]] = []
    return [next((k for k, known in enumerate(seen) if known == look), _add(seen, look)) for look in looks]


def _gathers_its_own(block: nn.Module, name: str, told: Mapping[str, Any]) -> bool:
    """Whether all parameters of a block belong to units inside of it: otherwise those of other units would shrink."""
    units = [unit for unit in told if unit == name or unit.startswith(f"{name}.")]
    if name in units:
        return True
    held = [f"{name}.{each}" for each, _, _, _ in names.named_tensors(block, "parameters")]
    return all(any(each.startswith(f"{unit}.") for unit in units) for each in held)


def _add(seen: list[dict[Any, Any]], look: dict[Any, Any]) -> int:
    if look not in seen:
        seen.append(look)
    return seen.index(look)


def _shape_of(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.is_contiguous()


def _forget_positions(looks: list[dict[Any, Any]]) -> None:
    """A whole number that counts along the list (``layer_idx``) is no difference."""
    for key in looks[0]:
        if not (isinstance(key, tuple) and len(key) == 3):
            continue
        values: list[Any] = [look.get(key) for look in looks]
        if all(type(value) is int for value in values) and len({value - i for i, value in enumerate(values)}) == 1:
            for look in looks:
                look[key] = "position"


def _shared(root: nn.Module) -> set[int]:
    """Parameters with several names."""
    seen: set[int] = set()
    twice: set[int] = set()
    for _, parameter in root.named_parameters(remove_duplicate=False):
        (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice


def _told(unit: Unit) -> tuple[Any, ...]:
    return unit.kind, unit.reshard_after_forward, unit.activation_checkpointing, unit.unshard_in_backward


# The same with fewer


def shorten(model: nn.Module, runs: Sequence[Run], counts: Sequence[int]) -> Callable[[str], str | None]:
    """Remove blocks in place, so that of each run ``counts`` are left, from its beginning.

    Returns:
        The name in the shortened model of a module or unit of the whole one; None where it was removed.
    """
    modules: dict[str, Any] = dict(names.named_modules(names.unwrap(model)))
    for run, count in sorted(zip(runs, counts, strict=True), key=lambda each: -each[0].start):
        first, last = run.start + count * run.period, run.start + run.count * run.period
        del modules[run.container][first:last]
    return lambda name: _renamed(name, runs, counts)


def _renamed(name: str, runs: Sequence[Run], counts: Sequence[int]) -> str | None:
    moved = name
    for run, count in zip(runs, counts, strict=True):
        prefix = f"{run.container}." if run.container else ""
        match = re.fullmatch(rf"{re.escape(prefix)}(\d+)(\..*)?", name)
        if match is None:
            continue
        position = int(match[1])
        first, last = run.start + count * run.period, run.start + run.count * run.period
        if first <= position < last:
            return None
        if position >= last:
            now = re.fullmatch(rf"{re.escape(prefix)}(\d+)(\..*)?", moved)
            assert now is not None
            moved = f"{prefix}{int(now[1]) - (last - first)}{match[2] or ''}"
    return moved


def with_counts(runs: Sequence[Run], counts: Sequence[int]) -> list[Run]:
    """Where the runs are in the model that ``shorten`` leaves."""
    gone: dict[str, int] = {}
    left = []
    for run, count in zip(runs, counts, strict=True):
        before = gone.get(run.container, 0)
        left.append(dataclasses.replace(run, start=run.start - before, count=count))
        gone[run.container] = before + (run.count - count) * run.period
    return left


def shortened(plan: Plan, renamed: Callable[[str], str | None]) -> Plan:
    """``plan`` for a shortened model."""
    units = []
    for unit in plan.units:
        modules = [renamed(name) for name in unit.modules]
        left = tuple(name for name in modules if name is not None)
        if left and len(left) == len(modules):
            units.append(dataclasses.replace(unit, name=" + ".join(left), modules=left))
    replicated = [
        dataclasses.replace(each, name=name) for each in plan.replicated if (name := renamed(each.name)) is not None
    ]
    return dataclasses.replace(plan, units=tuple(units), replicated=tuple(replicated))
