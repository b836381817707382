"""Loading an optimizer: groups matched by the names of their parameters, state put where the optimizer keeps it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.filling import fill
from trueshard.checkpoint.found import Misfits
from trueshard.checkpoint.manifest import Entry
from trueshard.optim.rebind import family
from trueshard.optim.steps import Role, roles_of


@dataclass
class Plan:
    """What will be done to one optimizer (or to one that it wraps)."""

    optimizer: Any
    catalogue: Catalogue
    roles: dict[int, Role]
    """By ``id``: how the optimizer keeps the state of its sharded parameters."""
    settings: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    """A group, and the settings that it gets."""
    parts: list[tuple[Any, Any]] = field(default_factory=list)
    """A parameter (or another key of the state), and its state as it was saved."""
    templates: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Keys that are read, each with a tensor that is cut as what is read, for the checksum."""

    def settings_keys(self) -> list[str]:
        """Keys of the tensors in settings."""
        return [key for _, value in self.settings for key in state.references(value)]

    def apply(self) -> None:
        """Load. The state's dict stays the object it is."""
        for group, value in self.settings:
            own = state.join(value, {key: self.catalogue.whole(key) for key in state.references(value)})
            group.update(copy.deepcopy(own))
        found = {key: self._state(key, value) for key, value in self.parts}
        self.optimizer.state.clear()
        self.optimizer.state.update(found)

    def _state(self, key: Any, value: Any) -> Any:
        tensors = {}
        for path, where in state.located(value):
            if isinstance(key, torch.Tensor):
                tensors[where] = _like(self.catalogue.entries[where], path, key, self.roles.get(id(key)))
                fill(self.catalogue, where, tensors[where])
            else:
                tensors[where] = self.catalogue.whole(where)
        return state.join(value, tensors)


def plan(
    prefix: str, optimizer: Any, saved: Any, name_of: Mapping[int, str], catalogue: Catalogue, misfits: Misfits
) -> list[Plan]:
    """What loading ``saved`` into ``optimizer`` means; what does not fit is told to ``misfits``."""
    plans = []
    roles = roles_of(optimizer)
    for place, member in enumerate(family(optimizer)):
        record = saved if not place else saved.get("wrapped", {}).get(str(place))
        if record is None:
            continue
        one = _plan_one(prefix, member, record, name_of, Plan(member, catalogue, roles), misfits)
        plans.append(one)
    return plans


def _plan_one(
    prefix: str, optimizer: Any, saved: Any, name_of: Mapping[int, str], made: Plan, misfits: Misfits
) -> Plan:
    here = type(optimizer).__name__
    if saved["class"].rpartition(".")[2] != here:
        misfits.mismatched(prefix, f"{prefix!r} is a {saved['class']}, not a {here}")
        return made
    _match_groups(prefix, optimizer, saved, name_of, misfits, made)
    parameters = {name_of[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in name_of}
    for name, value in saved["state"].items():
        if name.startswith("@"):
            made.parts.append((name[1:], value))
        elif name in parameters:
            parameter = parameters[name]
            role = made.roles.get(id(parameter))
            if role is None or role.is_mine is not False:
                made.parts.append((parameter, value))
            for path, key in state.located(value):
                made.templates.append((key, _like(made.catalogue.entries[key], path, parameter, role, meta=True)))
    return made


def _match_groups(
    prefix: str, optimizer: Any, saved: Any, name_of: Mapping[int, str], misfits: Misfits, made: Plan
) -> None:
    old = [(group["params"], group["settings"]) for group in saved["groups"]]
    known = {name for members, _ in old for name in members}
    taken: set[int] = set()
    for g, group in enumerate(optimizer.param_groups):
        own = [name_of.get(id(p), f"<a parameter of no model given, shape {tuple(p.shape)}>") for p in group["params"]]
        same = next((i for i, (members, _) in enumerate(old) if i not in taken and set(members) == set(own)), None)
        if same is not None:
            taken.add(same)
            made.settings.append((group, old[same][1]))
        elif own and not known & set(own):
            misfits.new(f"{prefix}: group {g}")
        else:
            near = max(range(len(old)), key=lambda i: len(set(old[i][0]) & set(own)), default=None)
            before = set(old[near][0]) if near is not None else set()
            lost, added = sorted(before - set(own)), sorted(set(own) - before)
            if near is not None:
                taken.add(near)
            misfits.mismatched(
                f"{prefix}: group {g}",
                f"group {g} of {prefix!r} is not what was saved: missing here {lost[:3]}, new here {added[:3]}",
            )
    for i, (members, _) in enumerate(old):
        if i not in taken:
            text = (
                f"{prefix!r} was saved with a group of {members[:3]}{'…' if members[3:] else ''}, which it has not here"
            )
            misfits.unexpected(f"{prefix}: saved group {i}", text)


def _like(
    entry: Entry, path: tuple[Any, ...], parameter: torch.Tensor, role: Role | None, meta: bool = False
) -> torch.Tensor:
    """A tensor for a saved one, as the optimizer itself would hold it.

    Args:
        entry: the saved one.
        path: its keys in the state of ``parameter``.
        parameter: whose state it is.
        role: how the optimizer keeps it; None where nothing is sharded.
        meta: without memory.
    """
    dtype: torch.dtype = getattr(torch, entry.dtype)
    local = _torch.local(parameter)
    device: Any = "meta" if meta else local.device
    if role is not None and role.is_mine is None and isinstance(parameter, DTensor):
        shape = torch.Size(entry.shape)
        whole = torch.empty(shape, dtype=dtype, device="meta")
        if role.is_rows(path, whole, parameter):
            memory = torch.empty((*local.shape[:1], *shape[1:]), dtype=dtype, device=device)
            return _torch.dtensor_over(memory, parameter, shape, whole.stride())
    if not meta and not entry.shape and path[-1:] == ("step",):
        device = "cpu"  # where torch's optimizers keep it, unless capturable or fused
    return torch.empty(entry.shape, dtype=dtype, device=device)
