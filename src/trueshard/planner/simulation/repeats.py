"""Find many equal blocks of a model, and leave a few of them; ``extension`` makes many of these again.

A *run* is a row of equal blocks in one container: equal in classes, shapes, dtypes, trainability, settings and in what
the plan says of them. A repeated pattern (dense, experts, dense, experts, …) is one block of several modules.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.parallel.tensor import by_name
from trueshard.planner.inputs.fake_tensors import fake_copy
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

    def place_of(self, name: str) -> tuple[int, int, str] | None:
        """Return the block to which a dotted name belongs, the module's number in it and the rest of the name."""
        _, index, rest = self._split(name)
        block, number = divmod(index - self.start, self.period)
        return (block, number, rest) if 0 <= block < self.count else None

    def moved(self, name: str, blocks: int, start: int | None = None) -> str:
        """Return the dotted name of what is so many blocks behind ``name``, which belongs to a block.

        ``start``: of the run to which the new name belongs, if it is another one of the same container.
        """
        prefix, index, rest = self._split(name)
        shift = 0 if start is None else start - self.start
        return f"{prefix}{index + shift + blocks * self.period}{rest}"

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
    styles = by_name(names.Index(root), plan, plan.styles) if plan.tensor > 1 else {}
    uses = Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))
    tied = {parameter for parameter, count in uses.items() if count > 1}
    runs: list[Run] = []
    for name, module in names.named_modules(root):
        inside = any(name.startswith(f"{run.container}.") for run in runs)
        if isinstance(module, _CONTAINERS) and not inside and len(module) >= FEWEST:
            runs += runs_in(name, _classes(list(module), f"{name}." if name else "", policies, tied, styles))
    return runs


def runs_in(container: str, classes: Sequence[Hashable]) -> list[Run]:
    """Return the longest runs of at least ``FEWEST`` in a container of modules of these classes."""
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


def _repetitions(classes: Sequence[Hashable], start: int, period: int) -> int:
    pattern = classes[start : start + period]
    count = 1
    while classes[start + count * period : start + (count + 1) * period] == pattern:
        count += 1
    return count


def _classes(
    blocks: Sequence[nn.Module], prefix: str, policies: Mapping[str, Any], tied: set[int], styles: Mapping[str, str]
) -> list[int]:
    """Return a number for each block; equal blocks have equal numbers."""
    traits = [_traits(names.unwrap(block), f"{prefix}{i}", policies, tied) for i, block in enumerate(blocks)]
    for i, of_block in enumerate(traits):
        start = f"{prefix}{i}."
        of_block["", "styles"] = {name[len(start) :]: style for name, style in styles.items() if name.startswith(start)}
    _equate_positions(traits)
    return [traits.index(of_block) for of_block in traits]


def _traits(block: nn.Module, name: str, policies: Mapping[str, Any], tied: set[int]) -> dict[Any, Any]:
    """Return all that must be equal for a block to be equal to another; an ``object()`` equals no other."""
    traits: dict[Any, Any] = {
        ("", "shares"): object() if tied & {id(parameter) for parameter in block.parameters()} else None
    }
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
    parameters = [f"{name}.{inner}" for inner, _, _, _ in names.named_tensors(block, "parameters")]
    return all(any(parameter.startswith(f"{unit}.") for unit in units) for parameter in parameters)


def _equate_positions(traits: list[dict[Any, Any]]) -> None:
    """Make equal all whole numbers that count along the list (``layer_idx``), in the blocks that have them."""
    for key in {key for of_block in traits for key in of_block if isinstance(key, tuple) and len(key) == 3}:
        held = {i: of_block[key] for i, of_block in enumerate(traits) if key in of_block}
        if all(type(value) is int for value in held.values()) and len({value - i for i, value in held.items()}) == 1:
            for i in held:
                traits[i][key] = "position"


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
    replicated = tuple(parameter for parameter in plan.replicated if is_left(parameter.name))
    # Globs of ``exact`` may name parameters that are gone; what they choose costs nothing.
    return dataclasses.replace(plan, units=units, replicated=replicated, exact=bool(plan.exact))


def short_copy(model: nn.Module, plan: Plan, runs: Sequence[Run], counts: Sequence[int]) -> tuple[nn.Module, Plan]:
    """Return a fake copy of ``model``, which stays as it is, with so many blocks of each run, and its plan."""
    modules = dict(names.named_modules(names.unwrap(model)))
    held = {run.container: _torch.own_modules(modules[run.container]) for run in runs}
    all_blocks = {container: dict(blocks) for container, blocks in held.items()}
    try:
        for run, count in zip(runs, counts, strict=True):
            plan = shorten(model, plan, [run], count)
        return fake_copy(model)[0], plan
    finally:
        for container, blocks in held.items():
            blocks.clear()
            blocks.update(all_blocks[container])
