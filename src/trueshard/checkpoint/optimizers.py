"""Load an optimizer: groups are matched by the names of their parameters, state goes where the optimizer keeps it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.format import TensorEntry, dtype_of, join, located
from trueshard.optim.rebind import family
from trueshard.optim.stepping import Role, roles_of


@dataclass
class OptimizerLoad:
    """The changes to one optimizer, or to one that it wraps."""

    optimizer: Any
    catalogue: Catalogue
    roles: dict[int, Role]  # ``id`` of a sharded parameter → how the optimizer keeps its state
    settings: list[tuple[dict[str, Any], Any]] = field(default_factory=list)  # (group, its saved settings)
    parts: list[tuple[Any, Any]] = field(default_factory=list)  # (parameter or other key of the state, its saved state)
    templates: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # (key, meta tensor cut like it): checksums

    def apply(self) -> None:
        """Change the optimizer; its state dict remains the same object."""
        for group, value in self.settings:
            group.update(copy.deepcopy(self.catalogue.value(value)))
        found = {}
        for key, value in self.parts:
            tensors = {}
            for path, where in located(value):
                entry = self.catalogue.entries[where]
                is_own = isinstance(key, torch.Tensor)
                tensors[where] = _like(entry, path, key, self.roles.get(id(key))) if is_own else entry.empty()
                self.catalogue.fill(where, tensors[where])
            found[key] = join(value, tensors.__getitem__)
        self.optimizer.state.clear()
        self.optimizer.state.update(found)

    def match(self, prefix: str, saved: Any, name_of: Mapping[int, str]) -> Iterator[tuple[str, str, str]]:
        """Match groups and state with the record ``saved``; yield misfits: what is wrong, name, text."""
        here = type(self.optimizer).__name__
        if saved["class"].rpartition(".")[2] != here:
            yield "mismatched", prefix, f"{prefix!r} is a {saved['class']}, not a {here}"
            return
        yield from self._match_groups(prefix, saved["groups"], name_of)
        groups = self.optimizer.param_groups
        parameters = {name_of[id(p)]: p for group in groups for p in group["params"] if id(p) in name_of}
        for name, value in saved["state"].items():
            if name.startswith("@"):
                self.parts.append((name[1:], value))
            elif name in parameters:
                parameter = parameters[name]
                role = self.roles.get(id(parameter))
                if role is None or role.is_mine is not False:
                    self.parts.append((parameter, value))
                for path, key in located(value):
                    self.templates.append((key, _like(self.catalogue.entries[key], path, parameter, role, meta=True)))

    def _match_groups(self, prefix: str, saved: Any, name_of: Mapping[int, str]) -> Iterator[tuple[str, str, str]]:
        old = [(group["params"], group["settings"]) for group in saved]
        known = {name for members, _ in old for name in members}
        taken: set[int] = set()
        for g, group in enumerate(self.optimizer.param_groups):
            own = [
                name_of.get(id(p), f"<a parameter of no model given, shape {tuple(p.shape)}>") for p in group["params"]
            ]
            same = next((i for i, (members, _) in enumerate(old) if i not in taken and set(members) == set(own)), None)
            if same is not None:
                taken.add(same)
                self.settings.append((group, old[same][1]))
            elif own and not known & set(own):
                yield "new", f"{prefix}: group {g}", ""
            else:
                near = max(range(len(old)), key=lambda i: len(set(old[i][0]) & set(own)))
                taken.add(near)
                before = set(old[near][0])
                lost, added = sorted(before - set(own)), sorted(set(own) - before)
                text = f"group {g} of {prefix!r} is not what was saved: missing here {lost[:3]}, new here {added[:3]}"
                yield "mismatched", f"{prefix}: group {g}", text
        for i, (members, _) in enumerate(old):
            if i not in taken:
                shown = f"{members[:3]}{'…' if members[3:] else ''}"
                text = f"{prefix!r} was saved with a group of {shown}, which it has not here"
                yield "unexpected", f"{prefix}: saved group {i}", text


def optimizer_loads(optimizer: Any, saved: Any, catalogue: Catalogue) -> list[tuple[OptimizerLoad, Any]]:
    """Return the load of ``optimizer`` and of each one it wraps, with its saved record."""
    roles = roles_of(optimizer)
    found = []
    for place, member in enumerate(family(optimizer)):
        record = saved.get("wrapped", {}).get(str(place)) if place else saved
        if record is not None:
            found.append((OptimizerLoad(member, catalogue, roles), record))
    return found


def _like(
    entry: TensorEntry, path: tuple[Any, ...], parameter: torch.Tensor, role: Role | None, meta: bool = False
) -> torch.Tensor:
    """Make a tensor for ``entry``, sharded and placed as the optimizer itself would hold it, or on the meta device."""
    local = _torch.local(parameter)
    device: Any = "meta" if meta else local.device
    if role is not None and role.is_mine is None and isinstance(parameter, DTensor):
        whole = entry.empty("meta")
        if role.is_rows(path, whole, parameter):
            memory = torch.empty((*local.shape[:1], *whole.shape[1:]), dtype=dtype_of(entry.dtype), device=device)
            return _torch.dtensor_over(memory, parameter, whole.shape, whole.stride())
    if not meta and not entry.shape and path[-1:] == ("step",):
        device = "cpu"  # where torch's optimizers keep it, unless capturable or fused
    return entry.empty(device)
