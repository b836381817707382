"""Choose the modules that are units, and split and join them until FSDP2 accepts them.

``choose_units`` chooses modules whose parameters are gathered together:

- In order: the user's words; the model's hint (``_no_split_modules``, at any depth); else the structure.
- Structure is the shape of the tree, never attribute names: lists of composite modules are lists of blocks.
- A list inside a block (experts) belongs to its block, since a rank may skip an expert and the others would wait for
  it; the module that *holds* a very large list, which every rank runs, is gathered by itself.

``Grouping`` puts every parameter in exactly one unit. FSDP2 gathers the parameters below a module, without those of the
units inside it, and wants one trainable dtype and no tie with another unit. A unit that does not fit is split or joined
here, before anything is touched:

- a tie across units makes one unit of the modules that own the tied parameter; where those contain one another (or
  one is the root), the units between them are given up and the tie falls to their common ancestor;
- a module that several units hold is a unit of its own, which FSDP2 gathers at each of its calls;
- the trainable parameters of another dtype in a block become a unit of their own, by module;
- an embedding's backward does not read its weight, so an embedding outside every block is a unit that is not gathered
  for backward;
- a large output projection behind the last block is a unit, too: in the root its gathered weight and its whole gradient
  would live to the end of a backward that needs them at its beginning;
- stacked experts that ranks share are a unit, since they are sharded over other ranks than the rest of their block;
- what cannot be sharded is replicated: 0-dim, empty, a second trainable dtype inside one module, or in a module that
  several units hold and nobody calls (a ParameterDict), so that nothing says when to gather it.
"""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.model.names import Index
from trueshard.plans import Plan, Replicated, Unit, UnitKind

#: A list inside a block is large from here on (elements): 1 GiB in float32.
LARGE_LIST = 2**28

HEAD = 4 << 20
"""Bytes from which an output projection is a unit of its own: below, one more collective costs more than it frees."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_units(index: Index, words: Any) -> dict[str, str]:
    """Return the chosen modules: name → why. The root is not among them; it always is a unit.

    ``words``: as ``units`` of ``shard()``; None, ``""``, ``[""]`` and blanks mean ``"auto"``. Raises ValueError for one
    that matches nothing, or a module that has no forward; TypeError for one of another type.
    """
    modules = index.modules
    if callable(words) and not isinstance(words, type):
        chosen = {name: "units callable" for name, module in modules.items() if name and words(name, module)}
    else:
        chosen = {}
        for word in _spoken(words):
            chosen |= (_from_hints(index) or _from_structure(index)) if word == "..." else _matching(index, word)
    for name in chosen:
        if not has_forward(modules[name]):
            kind, children = type(modules[name]).__name__, [child for child, _ in _children(modules[name], name)]
            raise ValueError(
                f"units: {name!r} is a {kind} without a forward, so nothing says when to gather it; name "
                f"its children instead, by their class or as {children[:3]}"
            )
    return {name: chosen[name] for name in modules if name in chosen}


def is_automatic(words: Any) -> bool:
    """True if ``units`` is the automatic choice, or goes on from it."""
    return (isinstance(words, type) or not callable(words)) and "..." in _spoken(words)


def _spoken(words: Any) -> list[str | type]:
    """Return words and classes, ``"..."`` for the automatic choice."""
    if words is None or words is ... or isinstance(words, (str, type)):
        words = [words or "..."]
    if not isinstance(words, Iterable):
        raise TypeError(f"units must be words, classes or a callable, not {type(words).__name__}")
    stripped = [word.strip() if isinstance(word, str) else "..." if word is ... else word for word in words]
    for word in stripped:
        if not isinstance(word, str) and not (isinstance(word, type) and issubclass(word, nn.Module)):
            raise TypeError(f"units: {word!r} is neither a name, a glob, nor a module class")
    spoken = [word for word in stripped if word != ""] or ["auto"]
    if "auto" in spoken and len(spoken) > 1:
        raise ValueError('units: "auto" stands alone; for further units write "..." in its place')
    return ["..."] if spoken == ["auto"] else spoken


def _matching(index: Index, word: str | type) -> dict[str, str]:
    modules = [(name, module) for name, module in index.modules.items() if name]
    shown = word.__name__ if isinstance(word, type) else word
    if isinstance(word, type):
        result = {name: f"class {shown}" for name, module in modules if isinstance(module, word)}
    elif any(character in word for character in "*?["):
        result = dict.fromkeys(names.matching(word, (name for name, _ in modules)), f"glob {word}")
    else:
        result = {name: f"class {word}" for name, module in modules if word in _class_names(module)}
        result = result or {name: "named" for name, _ in modules if name == word}
    if result:
        return result
    classes = sorted({type(module).__name__ for _, module in modules})
    near = names.nearest(shown, [*classes, *(name for name, _ in modules)])
    raise ValueError(f"units: nothing in the model is called {shown!r}.{near} Classes present: {', '.join(classes)}")


def _class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__ if cls not in (nn.Module, object)}


def has_forward(module: nn.Module) -> bool:
    """True if the module can be called: a bare list or dict of modules has no forward."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _from_hints(index: Index) -> dict[str, str]:
    """Return modules of the classes under ``_no_split_modules`` anywhere in the model, as through PEFT's wrappers."""
    hints: set[str] = set()
    for module in index.modules.values():
        hint = getattr(module, "_no_split_modules", None)
        if isinstance(hint, (str, list, tuple, set, frozenset)):
            hints |= {word.strip() for word in ([hint] if isinstance(hint, str) else hint) if isinstance(word, str)}
    result: dict[str, str] = {}
    for name, module in index.modules.items():
        hit = hints & _class_names(module)
        if name and hit and _composite(module):
            result[name] = f"model hint {min(hit)}"
    # A hint inside a hint (an expert's class beside its block's) belongs to the outer one.
    return {name: why for name, why in result.items() if not any(name.startswith(f"{outer}.") for outer in result)}


def _composite(module: nn.Module) -> bool:
    """True for a module made of others, or of a class of the user's; not for a single layer of torch.nn."""
    return has_forward(module) and (
        next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")
    )


def _from_structure(index: Index) -> dict[str, str]:
    root, modules = index.root, index.modules
    result = (
        _members_of_lists(root, "", _composite, "block of a list")
        or _repeated_siblings(root, "")
        or _members_of_lists(root, "", has_forward, "layer of a list")  # nothing composite repeats
    )
    classes = {type(modules[name]) for name in result if _composite(modules[name])}
    for name, module in modules.items():
        if type(module) in classes and not any(_nested(name, block) for block in result):
            result[name] = "of the blocks' class"
    large: dict[str, str] = {}
    for name, module in modules.items():
        holder = name.rpartition(".")[0]
        if not isinstance(module, _LISTS) or not any(holder.startswith(f"{block}.") for block in result):
            continue
        if has_forward(modules[holder]) and sum(p.numel() for p in module.parameters()) >= LARGE_LIST:
            large[holder] = "holds a large list"
    return {**result, **large}


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    return [
        (f"{prefix}.{name}" if prefix else name, names.unwrap(child))
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]


def _members_of_lists(module: nn.Module, prefix: str, fits: Callable[[nn.Module], bool], why: str) -> dict[str, str]:
    """Return the members that fit of the outermost lists that hold at least two of them."""
    children = _children(module, prefix)
    members = [name for name, child in children if fits(child)]
    if isinstance(module, _LISTS) and len(members) >= 2:
        return dict.fromkeys(members, why)
    result: dict[str, str] = {}
    for name, child in children:
        result.update(_members_of_lists(child, name, fits, why))
    return result


def _repeated_siblings(module: nn.Module, prefix: str) -> dict[str, str]:
    """Return siblings of one composite class outside any list (``self.block1``, ``self.block2``), innermost level."""
    children = _children(module, prefix)
    result: dict[str, str] = {}
    for name, child in children:
        result.update(_repeated_siblings(child, name))
    if result:
        return result
    of_class: dict[type, list[str]] = {}
    for name, child in children:
        if _composite(child):
            of_class.setdefault(type(child), []).append(name)
    return {name: "repeated sibling" for group in of_class.values() if len(group) >= 2 for name in group}


# What FSDP2 accepts


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

    def __init__(self, index: Index) -> None:
        self.modules = index.modules
        self._order = {name: i for i, name in enumerate(self.modules)}
        self._name_of = {id(module): name for name, module in self.modules.items()}
        self.parameters = [
            _Parameter(held.name, held.tensor, list(dict.fromkeys(self._host(m) for m, _ in held.places)))
            for held in index.parameters
        ]
        self.replicated: dict[str, str] = {}
        self.groups: dict[str, _Group] = {}

    @classmethod
    def of_plan(cls, index: Index, plan: Plan) -> Grouping:
        """Return the units of ``plan``, measured on a model; raise ValueError for what the model does not have."""
        self = cls(index)
        parameter_names = {parameter.name for parameter in self.parameters}
        for unit in plan.units:
            for module in unit.modules:
                if module not in self.modules:
                    near = names.nearest(module, self.modules)
                    raise ValueError(f"the plan's unit {module!r} is no module of this model.{near}")
            self.groups[unit.name] = _Group(unit.modules, unit.kind, unit.why)
        for replicated in plan.replicated:
            if replicated.name not in parameter_names:
                raise ValueError(f"the plan replicates {replicated.name!r}, which is no parameter of this model")
            self.replicated[replicated.name] = replicated.why
        if "" not in self.groups:
            raise ValueError('the plan has no root unit (name ""); take one from shard() and edit that')
        return self

    def choose(
        self,
        chosen: Mapping[str, str],
        *,
        split_embeddings: bool,
        split_head: bool,
        experts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Make units of the ``chosen`` modules and of ``experts`` that ranks share (name → why), and of the rest."""
        for name, why in chosen.items():
            self.groups[name] = _Group((name,), "block", why)
        for name, why in experts.items():
            self.groups[name] = _Group((name,), "experts", why)
        self.groups[""] = _Group(("",), "root", "root")
        for parameter in self.parameters:
            if parameter.tensor.ndim == 0 or parameter.tensor.numel() == 0:
                kind = "empty" if parameter.tensor.ndim else "0-dim"
                self.replicated[parameter.name] = f"{kind}: nothing to shard"
        self._split_shared()
        self._join_ties()
        if split_embeddings:
            self._split_embeddings()
        if split_head:
            self._split_head()
        self._split_dtypes()

    # What is where

    def _host(self, module: nn.Module) -> str:
        """Return the name of the nearest module, from ``module`` upwards, with a forward (a ParameterList has none)."""
        name = self._name_of[id(module)]
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
        result: dict[str, list[_Parameter]] = {key: [] for key in self.groups}
        for parameter in self.parameters:
            homes = {names.nearest_above(owner, member) for owner in parameter.owners}
            if len(homes) == 1 and parameter.name not in self.replicated:
                result[homes.pop()].append(parameter)
        return result

    # Steps

    def _split_shared(self) -> None:
        """Make a unit of each outermost module that several units hold, replicate what is in one without a forward."""
        holders: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, module in self.modules.items():
            for child in _torch.own_modules(module).values():
                if child is not None:
                    holders[self._name_of[id(names.unwrap(child))]].add(name)
        keys: dict[str, set[str]] = {key: {key} for key in self.groups}
        for name in graphlib.TopologicalSorter(holders).static_order():
            if name in keys:
                continue
            keys[name] = set().union(*(keys[holder] for holder in holders[name]))
            if len(keys[name]) == 1 or not any(True for _ in self.modules[name].parameters()):
                continue
            if has_forward(self.modules[name]):
                self.groups[name], keys[name] = _Group((name,), "shared", "held by several units"), {name}
            else:
                inside = {id(tensor) for tensor in _torch.own_parameters(self.modules[name]).values()}
                of_module = (p.name for p in self.parameters if id(p.tensor) in inside)
                self.replicated |= dict.fromkeys(of_module, "held by several units in a module without a forward")

    def _join_ties(self) -> None:
        ties = [p for p in self.parameters if len(p.owners) > 1 and p.name not in self.replicated]
        given_up: set[str] = set()
        # Joining for one tie may part another; each round removes a unit or makes one that is not removed again.
        while parted := [p for p in ties if len(self._homes(p)) > 1]:
            owners, homes = parted[0].owners, self._homes(parted[0])
            are_separate = all(not _nested(a, b) for i, a in enumerate(owners) for b in owners[i + 1 :])
            if are_separate and not given_up & set(owners):
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
        result = []
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
            result.append(unit)
        return tuple(sorted(result, key=lambda unit: self._order[unit.modules[0]]))

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
