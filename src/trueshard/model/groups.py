"""Split and join chosen modules into units that FSDP2 accepts, with every parameter in exactly one unit.

FSDP2 gathers the parameters below a module, without those of the units inside it, and wants one trainable dtype and no
tie with another unit. A unit that does not fit is split or joined here, before anything is touched:

- a tie across units makes one unit of the modules that own the tied parameter; where those contain one another (or
  one is the root), the units between them are given up and the tie falls to their common ancestor;
- the trainable parameters of another dtype in a block become a unit of their own, by module;
- an embedding's backward does not read its weight, so an embedding outside every block is a unit that is not gathered
  for backward;
- a large output projection behind the last block is a unit, too: in the root its gathered weight and its whole gradient
  would live to the end of a backward that needs them at its beginning;
- what cannot be sharded at all (0-dim, empty, a second trainable dtype inside one module) is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.model.units import has_forward
from trueshard.plans import Plan, Replicated, Unit, UnitKind

HEAD = 4 << 20
"""Bytes from which an output projection is a unit of its own: below, one more collective costs more than it frees."""


@dataclass
class _Parameter:
    name: str
    tensor: torch.Tensor
    owners: list[str]
    """Names of the modules that hold it: several for a tie."""


@dataclass
class _Group:
    modules: tuple[str, ...]
    kind: UnitKind
    why: str


class Grouping:
    """The units of one model: from chosen modules (``choose``), or from a plan (``of_plan``)."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(names.named_modules(model))
        self._order = {name: i for i, name in enumerate(self.modules)}
        name_of = {id(module): name for name, module in self.modules.items()}
        self.parameters = [
            _Parameter(held.name, held.tensor, list(dict.fromkeys(self._host(name_of[id(m)]) for m, _ in held.places)))
            for held in names.held_tensors(model, "parameters")
        ]
        self.replicated: dict[str, str] = {}
        self.groups: dict[str, _Group] = {}

    @classmethod
    def of_plan(cls, model: nn.Module, plan: Plan) -> Grouping:
        """Return the units of ``plan``, measured on ``model``; raise ValueError for what the model does not have."""
        self = cls(model)
        known = {parameter.name for parameter in self.parameters}
        for unit in plan.units:
            for module in unit.modules:
                if module not in self.modules:
                    near = names.nearest(module, self.modules)
                    raise ValueError(f"the plan's unit {module!r} is no module of this model.{near}")
            self.groups[unit.name] = _Group(unit.modules, unit.kind, unit.why)
        for each in plan.replicated:
            if each.name not in known:
                raise ValueError(f"the plan replicates {each.name!r}, which is no parameter of this model")
            self.replicated[each.name] = each.why
        if "" not in self.groups:
            raise ValueError('the plan has no root unit (name ""); take one from shard() and edit that')
        return self

    def choose(self, chosen: Mapping[str, str], *, split_embeddings: bool, split_head: bool) -> None:
        """Make units of the ``chosen`` modules (name → why) and of the rest."""
        for name, why in chosen.items():
            self.groups[name] = _Group((name,), "block", why)
        self.groups[""] = _Group(("",), "root", "root")
        for parameter in self.parameters:
            if parameter.tensor.ndim == 0 or parameter.tensor.numel() == 0:
                kind = "empty" if parameter.tensor.ndim else "0-dim"
                self.replicated[parameter.name] = f"{kind}: nothing to shard"
        self._join_ties()
        if split_embeddings:
            self._split_embeddings()
        if split_head:
            self._split_head()
        self._split_dtypes()

    # What is where

    def _host(self, name: str) -> str:
        """Return the nearest module, from ``name`` upwards, that has a forward (a ParameterList has none)."""
        while name and not has_forward(self.modules[name]):
            name = name.rpartition(".")[0]
        return name

    def home(self, owner: str) -> str:
        """Return the key of the group that gathers what ``owner`` holds."""
        return names.nearest_above(owner, self._members())

    def _members(self) -> dict[str, str]:
        return {module: key for key, group in self.groups.items() for module in group.modules}

    def _homes(self, parameter: _Parameter) -> set[str]:
        member = self._members()
        return {names.nearest_above(owner, member) for owner in parameter.owners}

    def _by_home(self) -> dict[str, list[_Parameter]]:
        member = self._members()
        found: dict[str, list[_Parameter]] = {key: [] for key in self.groups}
        for parameter in self.parameters:
            homes = {names.nearest_above(owner, member) for owner in parameter.owners}
            if len(homes) == 1 and parameter.name not in self.replicated:
                found[homes.pop()].append(parameter)
        return found

    # Steps

    def _join_ties(self) -> None:
        ties = [p for p in self.parameters if len(p.owners) > 1 and p.name not in self.replicated]
        given_up: set[str] = set()
        # Joining for one tie may part another; each round removes a unit or makes one that is not removed again.
        while parted := [p for p in ties if len(self._homes(p)) > 1]:
            owners, homes = parted[0].owners, self._homes(parted[0])
            apart = all(not _nested(a, b) for i, a in enumerate(owners) for b in owners[i + 1 :])
            if apart and not given_up & set(owners):
                self._make_tied_unit(owners, homes)
            else:
                # One owner contains another: give up the innermost unit between them.
                inner = max(homes, key=lambda key: (max(m.count(".") for m in self.groups[key].modules), key != ""))
                given_up |= set(self.groups.pop(inner).modules)

    def _make_tied_unit(self, owners: list[str], homes: set[str]) -> None:
        members = list(owners)
        for key in homes:
            # An owner that is itself a unit, or a member of an earlier tie, brings its group along.
            if key and set(self.groups[key].modules) & set(owners):
                members += [module for module in self.groups.pop(key).modules if module not in members]
        members = [m for m in members if not any(m != other and m.startswith(f"{other}.") for other in members)]
        members.sort(key=self._order.__getitem__)
        self.groups[" + ".join(members)] = _Group(tuple(members), "tied", "tied across units")

    def _split_embeddings(self) -> None:
        tied = {owner for parameter in self.parameters if len(parameter.owners) > 1 for owner in parameter.owners}
        for name, module in self.modules.items():
            plain = (
                isinstance(module, nn.Embedding)
                and set(_torch.own_parameters(module)) == {"weight"}
                and not _torch.own_modules(module)
            )
            if plain and name and name not in tied and self.home(name) == "":
                self.groups[name] = _Group((name,), "embedding", "embedding: not gathered for backward")

    def _split_head(self) -> None:
        blocks = [name for group in self.groups.values() if group.kind == "block" for name in group.modules]
        if not blocks:
            return
        sizes: dict[str, int] = {}
        for parameter in self._by_home()[""]:
            for owner in parameter.owners:
                alone = len(parameter.owners) == 1 and not _torch.own_modules(self.modules[owner])
                size = parameter.tensor.nbytes if alone else -(1 << 62)
                sizes[owner] = sizes.get(owner, 0) + size
        behind = max(map(self._order.__getitem__, blocks))
        heads = [name for name, size in sizes.items() if size >= HEAD and self._order[name] > behind]
        if heads:
            name = max(heads, key=self._order.__getitem__)
            self.groups[name] = _Group((name,), "head", "output projection: not kept to the end of backward")

    def _split_dtypes(self) -> None:
        for key, mine in self._by_home().items():
            by_dtype: dict[torch.dtype, list[_Parameter]] = {}
            for parameter in mine:
                if parameter.tensor.requires_grad:
                    by_dtype.setdefault(parameter.tensor.dtype, []).append(parameter)
            if len(by_dtype) > 1:
                sizes = {d: sum(p.tensor.nbytes for p in ps) for d, ps in by_dtype.items()}
                for dtype in sorted(by_dtype, key=lambda d: sizes[d], reverse=True)[1:]:
                    self._split_off(key, dtype, by_dtype[dtype], mine)

    def _split_off(self, key: str, dtype: torch.dtype, parameters: list[_Parameter], mine: list[_Parameter]) -> None:
        """Give the trainable ``parameters`` of ``dtype`` a unit of their own, as far as modules allow."""
        word = str(dtype).removeprefix("torch.")
        hosts: list[str] = []
        for parameter in parameters:
            owner = parameter.owners[0]
            below = [p for p in mine if any(o == owner or o.startswith(f"{owner}.") for o in p.owners)]
            pure = all(p.tensor.dtype == dtype for p in below if p.tensor.requires_grad)
            nested = any(_nested(owner, module) for group in self.groups.values() for module in group.modules if module)
            unit = owner in self.groups[key].modules
            if pure and not unit and len(parameter.owners) == 1 and not (nested and self.home(owner) != key):
                if not any(_nested(owner, host) for host in hosts) and owner not in hosts:
                    hosts.append(owner)
            else:
                self.replicated[parameter.name] = f"trainable {word} beside another dtype in one module"
        hosts = [h for h in hosts if not any(module.startswith(f"{h}.") for module in self._members())]
        if hosts:
            hosts.sort(key=self._order.__getitem__)
            inside = f" of {key}" if key else ""
            self.groups[" + ".join(hosts)] = _Group(tuple(hosts), "dtype", f"trainable {word}{inside}")

    # Result

    def units(self) -> tuple[Unit, ...]:
        """Return the units in the order of the model's modules, the root first."""
        found = []
        for key, gathered in self._by_home().items():
            group, mine = self.groups[key], [parameter.tensor for parameter in gathered]
            unit = Unit(
                name=key,
                modules=group.modules,
                kind=group.kind,
                parameters=sum(tensor.numel() for tensor in mine),
                bytes=sum(tensor.nbytes for tensor in mine),
                trainable=sum(tensor.numel() for tensor in mine if tensor.requires_grad),
                dtype="+".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in mine})) or "-",
                unshard_in_backward=group.kind != "embedding",
                why=group.why,
            )
            found.append(unit)
        return tuple(sorted(found, key=lambda unit: self._order[unit.modules[0]]))

    def replications(self) -> tuple[Replicated, ...]:
        """Return the parameters that every rank holds whole."""
        return tuple(
            Replicated(p.name, p.tensor.numel(), self.replicated[p.name])
            for p in self.parameters
            if p.name in self.replicated
        )


def _nested(a: str, b: str) -> bool:
    """True if one of two module names lies inside the other (the root contains all)."""
    return a == b or not a or not b or a.startswith(f"{b}.") or b.startswith(f"{a}.")
