"""Shard-local steps: for the time of a step, an optimizer's sharded parameters are plain tensors.

- A *leaf* is a plain parameter over the very memory of a DTensor's local shard, so nothing is copied and no operation
  goes through DTensor's dispatch. A *stand-in* is what takes a parameter's place: a leaf, its gradient, its state.
- ``Swap`` puts stand-ins into the groups of the user's own optimizer object and takes them out again; what the
  optimizer made of state in between is shown as DTensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.optim.rebind import IsRows, as_rows, each_in, shard_like

State = dict[Any, Any]
"""An optimizer's ``state``: parameter → what it keeps for it."""


class StandIn(Protocol):
    """Takes the place of one parameter or several."""

    leaf: torch.Tensor

    def lend(self, state: State) -> Any:
        """Give the leaf its gradient; returns the leaf's state, or None if there is none yet."""

    def take_back(self) -> None:
        """Carry what the optimizer changed in the leaf over to the parameters."""

    def keep(self, state: State, entries: Any) -> None:
        """Carry the leaf's ``entries``, or None if it has none, over to the state of the parameters."""


def leaf_over(memory: torch.Tensor, parameter: torch.Tensor) -> nn.Parameter:
    """A plain parameter over ``memory``, trainable as ``parameter`` is, sharing its attributes."""
    leaf = nn.Parameter(memory.detach(), requires_grad=parameter.requires_grad)
    leaf.__dict__ = parameter.__dict__  # the very dict: what is set on one is set on the other
    return leaf


class Own:
    """A parameter whose leaf has gradient and state of its own: a plain one itself, or a whole one at its owner."""

    def __init__(self, shown: torch.Tensor, leaf: torch.Tensor) -> None:
        self.shown, self.leaf = shown, leaf
        self.memory = shown

    def lend(self, state: State) -> Any:
        """As a stand-in."""
        return state.get(self.shown)

    def take_back(self) -> None:
        """As a stand-in."""

    def keep(self, state: State, entries: Any) -> None:
        """As a stand-in."""
        _put(state, self.shown, entries)


class Nothing:
    """Keeps the place of a parameter that is not stepped now: without a gradient, and nothing is kept of it."""

    def __init__(self, like: torch.Tensor | None) -> None:
        device = None if like is None else _torch.local(like).device
        self.leaf: torch.Tensor = nn.Parameter(torch.zeros([1] * (1 if like is None else like.ndim), device=device))

    def lend(self, state: State) -> Any:
        """As a stand-in."""
        return None

    def take_back(self) -> None:
        """As a stand-in."""

    def keep(self, state: State, entries: Any) -> None:
        """As a stand-in."""


class Shard:
    """This rank's shard of a DTensor."""

    def __init__(self, shown: DTensor, is_rows: IsRows) -> None:
        self.shown, self._is_rows = shown, is_rows
        self.memory = _torch.local(shown)
        self.leaf: torch.Tensor = leaf_over(self.memory, shown)
        self._grad: torch.Tensor | None = None
        self._of_local: dict[int, DTensor] = {}

    def lend(self, state: State) -> Any:
        """As a stand-in."""
        shown, leaf = self.shown, self.leaf
        if leaf.requires_grad != shown.requires_grad:
            leaf.requires_grad_(shown.requires_grad)
        grad = shown.grad
        if grad is not None:
            leaf.grad = local_gradient(shown)
        self._grad = leaf.grad
        entries = state.get(shown)
        return None if entries is None else self._localise(entries)

    def take_back(self) -> None:
        """As a stand-in."""
        shown, leaf = self.shown, self.leaf
        if not _torch.begins_where(leaf, self.memory):  # the optimizer assigned new memory: p.data = ...
            self.memory.copy_(leaf.detach())
            leaf.data = self.memory
        if leaf.grad is not self._grad:
            shown.grad = None if leaf.grad is None else as_rows(leaf.grad, shown)
        leaf.grad = self._grad = None

    def keep(self, state: State, entries: Any) -> None:
        """As a stand-in."""
        _put(state, self.shown, None if entries is None else self._show(entries))
        self._of_local.clear()

    def _localise(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """In place where it is a dict or a list, so that the user's own objects stay."""
        if isinstance(value, DTensor):
            local = _torch.local(value)
            self._of_local[id(local)] = value
            return local
        if isinstance(value, torch.Tensor):
            shown = self.shown
            # Plain, though it goes by rows: a state dict from one process, the same whole tensor on every rank.
            if value.ndim and shown.ndim and len(value) == len(shown) and self._is_rows(path, value, shown):
                return self._localise(shard_like(value, shown))
            return value
        return each_in(value, self._localise, path)

    def _show(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        if isinstance(value, torch.Tensor):
            known = self._of_local.get(id(value))
            if known is not None:
                return known
            if not isinstance(value, DTensor) and self._is_rows(path, value, self.leaf):
                return as_rows(value, self.shown)
            return value
        return each_in(value, self._show, path)


def local_gradient(parameter: DTensor) -> torch.Tensor:
    """This rank's part of the gradient, cut as the parameter is."""
    grad = parameter.grad
    assert grad is not None
    if not isinstance(grad, DTensor):  # torch lets one assign it
        if grad.shape != parameter.shape:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} was given a plain gradient of shape "
                f"{tuple(grad.shape)}; give it a DTensor placed like the parameter, or the whole gradient"
            )
        return _torch.local(shard_like(grad, parameter))
    if not _torch.is_placed_as(grad, parameter):
        grad = grad.redistribute(placements=parameter.placements)
    return _torch.local(grad)


def _put(state: State, key: torch.Tensor, entries: Any) -> None:
    if entries is not None:
        if state.get(key) is not entries:
            state[key] = entries
    elif key in state:
        del state[key]


class Swap:
    """Groups and state of an optimizer, shown to its ``step`` as leaves.

    Args:
        groups: each parameter group, and what shall stand in it for the time of the step.
        holders: the optimizers that have state of their own: the user's, and those that it wraps.
    """

    def __init__(
        self,
        groups: Sequence[tuple[dict[str, Any], Sequence[StandIn]]],
        holders: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._groups, self._holders = groups, holders
        self._shown: list[list[torch.Tensor]] = []
        self._states: list[State] = []

    def enter(self) -> None:
        """Show leaves. ``leave`` must follow."""
        stand_ins = [stand_in for _, members in self._groups for stand_in in members]
        for group, members in self._groups:
            self._shown.append(group["params"])
            group["params"] = [stand_in.leaf for stand_in in members]
        lent_of: dict[int, State] = {}  # a wrapper may share the state of what it wraps
        for holder in self._holders:
            state: State = holder.state
            self._states.append(state)
            if id(state) not in lent_of:
                lent: State = defaultdict(dict)
                lent_of[id(state)] = lent
                if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, state))):
                    lent.update((key, value) for key, value in state.items() if not isinstance(key, torch.Tensor))
                for stand_in in stand_ins:
                    if (entries := stand_in.lend(state)) is not None:
                        lent[stand_in.leaf] = entries
            holder.state = lent_of[id(state)]  # type: ignore[assignment]

    def leave(self) -> None:
        """Show DTensors again, with what the optimizer changed."""
        stand_ins = [stand_in for _, members in self._groups for stand_in in members]
        for (group, _), shown in zip(self._groups, self._shown, strict=True):
            group["params"] = shown
        for stand_in in stand_ins:
            stand_in.take_back()
        done: set[int] = set()
        for holder, state in zip(self._holders, self._states, strict=True):
            lent = holder.state
            holder.state = state  # type: ignore[assignment]
            if id(state) in done:
                continue
            done.add(id(state))
            count = len(state)
            for stand_in in stand_ins:
                stand_in.keep(state, lent.pop(stand_in.leaf, None))
            state.update(lent)
            if len(state) != count:
                self._sort(state)
        self._shown, self._states = [], []

    def _sort(self, state: State) -> None:
        """New state comes in the order of memory; the user's is that of the groups."""
        found = dict(state)
        state.clear()
        members = [parameter for group, _ in self._groups for parameter in group["params"]]
        state.update((parameter, found.pop(parameter)) for parameter in members if parameter in found)
        state.update(found)


class Shards:
    """The stand-ins of one optimizer's parameters, made once."""

    def __init__(self) -> None:
        self._known: dict[int, Shard | Own] = {}

    def of(self, parameter: torch.Tensor, is_rows: IsRows) -> StandIn:
        """The stand-in of one parameter."""
        known = self._known.get(id(parameter))
        if known is not None and known.shown is parameter and known.memory is _torch.local(parameter):
            return known
        made = Shard(parameter, is_rows) if isinstance(parameter, DTensor) else Own(parameter, parameter)
        self._known[id(parameter)] = made
        return made

    def keep_only(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let go of parameters that the optimizer no longer holds."""
        kept = {id(parameter) for parameter in parameters}
        self._known = {key: each for key, each in self._known.items() if key in kept}
