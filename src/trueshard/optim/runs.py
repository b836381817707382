"""One step of an optimizer in several runs, on some of its parameters each, that leave what one run on all leaves.

What an optimizer has besides parameters and their state (numbers and objects in its groups, its attributes, and its
``state`` under keys that are no parameters) is the same at the beginning of each run: a count is one more after the
step, however many runs it took. A group keeps what the last run with a gradient in it left; what belongs to no group,
what the last run with any gradient left. For there are optimizers that count only where they find a gradient.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trueshard.optim.rebind import family

BINDING = "_trueshard_binding"
"""Attribute of an optimizer that holds what binds its steps."""
_NO_SETTINGS = ("params", "param_groups", "state", "defaults", BINDING)


class StepRuns:
    """The runs of one step: each but the last inside ``ahead``, with ``note_gradients`` in it; then ``finish``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        members = family(optimizer)
        self._groups = [group for member in members for group in member.param_groups]
        tables: list[dict[Any, Any]] = [*self._groups]
        tables += [table for member in members for table in (member.state, vars(member))]
        self._tables = {id(table): table for table in tables}
        self._fixed: dict[int, Any] = {id(kept): kept for kept in (*members, *tables)}
        """Objects that a copy of a setting refers to as the original does."""
        self._met: set[int] = set()
        """``id`` of the tables that the present run changes."""
        self._left: dict[int, dict[Any, Any]] = {}
        """Settings that the last run ahead of the others left, by ``id`` of the table."""

    def note_gradients(self) -> None:
        """See in which groups the present run finds gradients. Their parameters must be in place."""
        self._met = {id(group) for group in self._groups if any(p.grad is not None for p in group["params"])}
        if self._met:
            self._met |= self._tables.keys() - set(map(id, self._groups))

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Inside, give the optimizer a copy of its settings, for one run."""
        kept = {key: settings_of(table) for key, table in self._tables.items()}
        # One memo for all, so that what two tables share is one copy.
        memo = self._fixed | {id(p): p for group in self._groups for p in group["params"]}
        for value in (value for settings in kept.values() for value in settings.values()):
            if isinstance(value, torch.Tensor):
                memo[id(value)] = value.detach().clone()
        try:
            for key, settings in kept.items():
                self._tables[key].update(copy.deepcopy(settings, memo))
            yield
            self._left.update({key: settings_of(self._tables[key]) for key in self._met})
        finally:
            for key, settings in kept.items():
                _put(self._tables[key], settings)

    def finish(self) -> None:
        """Take over from the runs ahead what the last one, which has ended, had no gradients to count."""
        for key in self._left.keys() - self._met:
            table = self._tables[key]
            _put(table, {name: _become(table.get(name), value) for name, value in self._left[key].items()})


def settings_of(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return what a group, an optimizer's attributes or its state have besides parameters and their state."""
    return {key: value for key, value in table.items() if _is_setting(key, value)}


def _put(table: dict[Any, Any], settings: dict[Any, Any]) -> None:
    for key in settings_of(table).keys() - settings.keys():
        del table[key]
    table.update(settings)


def _become(original: Any, value: Any) -> Any:
    """Return ``original`` with what ``value`` holds, where it can take that: others may hold it."""
    if isinstance(value, torch.Tensor) and isinstance(original, torch.Tensor) and original.shape == value.shape:
        original.detach().copy_(value)
    elif type(original) is type(value) and hasattr(original, "__dict__"):
        vars(original).update(vars(value))
    else:
        return value
    return original


def _is_setting(key: Any, value: Any) -> bool:
    if isinstance(key, torch.Tensor) or key in _NO_SETTINGS or (key == "step" and callable(value)):
        return False
    return not str(key).endswith("_hooks") and not isinstance(value, (torch.optim.Optimizer, nn.Module))
