"""Find many equal blocks of a model, and leave a few of them; ``extension`` makes many of these again.

A *run* is a row of equal blocks in one container: equal in classes, shapes, dtypes, trainability, settings and in what
the plan says of them. A repeated pattern (dense, experts, dense, experts, …) is one block of several modules.
"""

from __future__ import annotations

import dataclasses
import functools
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
    return Repeats(model).runs(plan)


class Repeats:
    """Equal blocks of one unsharded model, which stays as it is: what they are made of is compared once for all plans.

    A large model has a hundred thousand attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.root = names.unwrap(model)
        self.containers = {
            name: module
            for name, module in names.named_modules(self.root)
            if isinstance(module, _CONTAINERS) and len(module) >= FEWEST
        }
        uses = Counter(id(parameter) for _, parameter in self.root.named_parameters(remove_duplicate=False))
        self.tied = {parameter for parameter, count in uses.items() if count > 1}
        self.blocks = functools.cache(self._blocks)

    def runs(self, plan: Plan) -> list[Run]:
        """Return the longest runs of at least ``FEWEST`` blocks that are equal, also in ``plan``."""
        policies = {
            name: (unit.kind, unit.reshard_after_forward, unit.activation_checkpointing, unit.unshard_in_backward)
            for unit in plan.units
            for name in unit.modules
        }
        styles = by_name(names.Index(self.root), plan, plan.styles) if plan.tensor > 1 else {}
        runs: list[Run] = []
        for name in self.containers:
            if not any(name.startswith(f"{run.container}.") for run in runs):
                runs += runs_in(name, [_planned(block, policies, styles) for block in self.blocks(name)])
        return runs

    def _blocks(self, container: str) -> list[_Block]:
        prefix = f"{container}." if container else ""
        blocks = [names.unwrap(block) for block in self.containers[container]]
        traits = [_traits(block, self.tied) for block in blocks]
        _equate_positions(traits)
        return [
            _Block(
                f"{prefix}{i}",
                traits.index(traits[i]),
                tuple(inner for inner, _ in names.named_modules(block)),
                tuple(inner for inner, _, _, _ in names.named_tensors(block, "parameters")),
            )
            for i, block in enumerate(blocks)
        ]


@dataclass(frozen=True)
class _Block:
    """A block of a container."""

    name: str
    number: int
    """Equal blocks have equal numbers."""
    modules: tuple[str, ...]
    """Names inside the block, the block's own, ``""``, first; likewise ``parameters``."""
    parameters: tuple[str, ...]


def _planned(block: _Block, policies: Mapping[str, Any], styles: Mapping[str, str]) -> Hashable:
    """Return what must be equal for a block to be equal to another in a plan; an ``object()`` equals no other."""
    start = f"{block.name}."
    planned = tuple(policies.get(start + inner if inner else block.name) for inner in block.modules)
    shared = tuple((name[len(start) :], style) for name, style in styles.items() if name.startswith(start))
    return block.number, planned, shared, None if _is_gathered_inside(block, policies) else object()


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


def _traits(block: nn.Module, tied: set[int]) -> dict[Any, Any]:
    """Return what a block is made of; an ``object()`` equals no other."""
    traits: dict[Any, Any] = {
        ("", "shares"): object() if tied & {id(parameter) for parameter in block.parameters()} else None
    }
    for inner, module in names.named_modules(block):
        traits[inner] = type(module), module.training
        for tensors in (_torch.own_parameters(module), _torch.own_buffers(module)):
            for key, tensor in tensors.items():
                layout = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous())
                traits[inner, key] = layout, tensor is not None and tensor.requires_grad
        traits[inner, "hooks"] = _torch.count_forward_hooks(module)
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN):
                traits[inner, key, "setting"] = value
    return traits


def _is_gathered_inside(block: _Block, policies: Mapping[str, Any]) -> bool:
    """True if all parameters of a block belong to units inside it; else units outside would shrink with it."""
    if block.name in policies:
        return True
    units = [unit for unit in policies if unit.startswith(f"{block.name}.")]
    parameters = [f"{block.name}.{inner}" for inner in block.parameters]
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
