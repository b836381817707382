"""What the keys of a DCP directory mean. Whoever saves chooses them, so they are recognised by what they lead to.

- Models: the nested dict (or the top level, as TorchTitan has it) that holds most of the names that the model has.
- Optimizers: whatever has ``param_groups``. By name and nested, as torch's ``get_optimizer_state_dict`` makes it and
  Accelerate saves it; by name and flat (``state.<name>.exp_avg``), as TorchTitan saves it; or by number, as
  ``Optimizer.state_dict()`` makes it, where the places in the groups say what is meant, as they do for torch.
- All else are entries of the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trueshard.checkpoint import state
from trueshard.checkpoint.dcp_parts import DcpCatalogue, Part
from trueshard.checkpoint.manifest import Entry, Manifest
from trueshard.checkpoint.store import Store
from trueshard.checkpoint.tensorfile import dtype_name

_OPTIMIZER = re.compile(r"(|.*?\.)param_groups\.")
_USUAL = ("model", "models", "state_dict", "optimizer", "optimizers", "optim")
"""What is never an entry of the user."""


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A saved tensor or value."""

    part: Part
    key: str
    path: tuple[Any, ...]

    @property
    def tensor(self) -> TensorStorageMetadata | None:
        saved = self.part.saved[self.key]
        return saved if isinstance(saved, TensorStorageMetadata) else None

    def after(self, root: str) -> tuple[Any, ...]:
        """The path below ``root``, which the key begins with."""
        path, length = self.path, len(root)
        while length > 0:
            first = str(path[0])
            if len(first) >= length:
                return (first[length:], *path[1:])
            length -= len(first) + 1
            path = path[1:]
        return path


_Tree = dict[tuple[Any, ...], _Leaf]
"""Leaves by their path from some place on."""


@dataclass
class _Optimizer:
    """An optimizer as it was saved."""

    part: Part
    root: str
    groups: dict[int, _Tree] = field(default_factory=dict)
    settings: dict[str, _Tree] = field(default_factory=dict)
    """Of each parameter, where no groups were saved."""
    state: dict[str, _Tree] = field(default_factory=dict)

    def add(self, leaf: _Leaf, known: Callable[[str], str]) -> None:
        """Put a leaf where it belongs; ``known``: the parameter's name that a flat key begins with."""
        first, *rest = leaf.after(self.root)
        kind, _, tail = str(first).partition(".")
        if not rest:
            name = known(tail)
            rest = [name, *(tail[len(name) + 1 :].split("."))]
        where = tuple(rest[1:])
        if kind == "state":
            self.state.setdefault(str(rest[0]), {})[where] = leaf
        elif kind == "param_groups" and str(rest[0]).isdigit():
            self.groups.setdefault(int(rest[0]), {})[where] = leaf
        elif kind == "param_groups":
            self.settings.setdefault(str(rest[0]), {})[where] = leaf


def understood(
    store: Store, parts: list[Part], models: Mapping[str, nn.Module], optimizers: Mapping[str, Any], names: Any
) -> DcpCatalogue:
    """The tensors and records of ``parts``, as a checkpoint of ours has them.

    Raises:
        ValueError: the keys can be meant in several ways, or in none.
    """
    keys = _Keys(store, parts)
    given = names.get if isinstance(names, Mapping) else names
    for place, (prefix, model) in enumerate(models.items()):
        keys.add_model(prefix, place, model, given)
    keys.add_optimizers(optimizers, state.parameter_names(models), given)
    keys.add_others(bool(models))
    return keys.catalogue


class _Keys:
    """Fills a catalogue."""

    def __init__(self, store: Store, parts: list[Part]) -> None:
        self._manifest = Manifest()
        self.catalogue = DcpCatalogue(store, self._manifest.tensors, self._manifest, dcp=True)
        self._leaves = [_Leaf(part, key, path) for part in parts for key, path in part.paths.items()]
        self._taken: set[_Leaf] = set()
        self._values: dict[_Leaf, Any] = {}

    # Models

    def add_model(self, prefix: str, place: int, model: nn.Module, given: Any) -> None:
        """The tensors of a model, and what its modules save themselves.

        Args:
            prefix: of its keys.
            place: its number among the models.
            model: it.
            given: the user's mapping of names.
        """
        held, extra = state.model_tensors(model)
        wanted = {(given and given(name)) or name for each in held.values() for name in each.names}
        whole = {leaf.key: leaf for leaf in self._leaves if given and leaf.key in wanted}  # given as whole keys
        part, root, owned = self._chosen(prefix, place, wanted, whole)
        record: dict[str, Any] = {}
        for name in extra:
            tree = {
                leaf.after(root)[1:]: leaf
                for leaf in self._leaves
                if leaf.part is part and leaf.key.startswith(root + name) and leaf.after(root)[0] == name
            }
            if tree:
                record[name] = self._encoded(tree, f"extra/{prefix}/{name}")
        self._manifest.models[prefix] = {"class": None, "extra": record}
        for name, leaf in (owned | whole).items():
            if leaf.tensor is not None and name not in extra:
                self._add_tensor(f"{prefix}/{name}", leaf)
        self._taken.update(owned.values())

    def _chosen(
        self, prefix: str, place: int, wanted: set[str], whole: dict[str, _Leaf]
    ) -> tuple[Part, str, dict[str, _Leaf]]:
        """The part, the root in it, and by name all that lies under it; ``whole``: what is named by whole keys."""
        found: dict[tuple[Part, str], dict[str, _Leaf]] = {}
        for leaf in self._leaves:
            roots = {leaf.key[: len(leaf.key) - len(str(leaf.path[-1]))]}
            if leaf.path == (leaf.key,):  # perhaps one whose path was not kept
                roots |= {root for root in ("model.", "state_dict.") if leaf.key.startswith(root)}
            for root in roots:
                found.setdefault((leaf.part, root), {})[leaf.key[len(root) :]] = leaf
        scores = {where: len(wanted & owned.keys()) for where, owned in found.items()}
        best = max(scores.values(), default=0)
        if not best and whole:
            return next(iter(whole.values())).part, "", whole
        if not best:
            keys = [leaf.key for leaf in self._leaves]
            shown = ", ".join(keys[:5]) + (f", and {len(keys) - 5} more" if keys[5:] else "")
            raise ValueError(
                f"{self.catalogue.where} holds no tensor of {prefix!r}, but {shown}; say with names= what is"
            )
        key = prefix.partition("/")[2]
        roots_in_turn = [f"model.{key}.", f"models.{key}.", f"{key}.", "model.", ""] if key else ["model.", ""]
        candidates = [where for where, score in scores.items() if score == best]
        for root in roots_in_turn:
            same = [where for where in candidates if where[1] == root]
            numbered = [where for where in same if where[0].directory.name.endswith(f"_{place}")]
            if len(same) == 1 or len(numbered) == 1:
                where = (numbered or same)[0]
                return *where, found[where]
        if len(candidates) > 1:
            shown = ", ".join(repr(root + next(iter(wanted))) for _, root in candidates)
            raise ValueError(f"{self.catalogue.where} holds {prefix!r} more than once ({shown}); say with names= which")
        return *candidates[0], found[candidates[0]]

    def _add_tensor(self, key: str, leaf: _Leaf) -> None:
        saved = leaf.tensor
        assert saved is not None
        self.catalogue.entries[key] = Entry(
            [key.partition("/")[2]], list(saved.size), dtype_name(saved.properties.dtype)
        )
        self.catalogue.saved[key] = leaf.part, leaf.key

    # Optimizers

    def add_optimizers(self, wanted: Mapping[str, Any], name_of: Mapping[int, str], given: Any) -> None:
        """The records of optimizers.

        Args:
            wanted: key prefix → optimizer.
            name_of: ``id`` of a parameter → its name.
            given: the user's mapping of names.
        """
        saved = self._saved_optimizers({(given and given(name)) or name for name in name_of.values()})
        ours = {(given and given(name)) or name: name for name in name_of.values()}
        for place, (prefix, optimizer) in enumerate(wanted.items()):
            if (one := self._optimizer_for(prefix, place, saved)) is not None:
                own = [[name_of.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
                self._manifest.optimizers[prefix] = self._record(prefix, optimizer, one, own, ours, len(wanted) > 1)

    def _saved_optimizers(self, names: set[str]) -> list[_Optimizer]:
        found: dict[tuple[Part, str], _Optimizer] = {}
        for leaf in self._leaves:
            match = _OPTIMIZER.match(leaf.key)
            if match is not None and leaf not in self._taken:
                found.setdefault((leaf.part, match[1]), _Optimizer(leaf.part, match[1]))

        def known(tail: str) -> str:
            """The longest name that ``tail`` begins with, or else its first word."""
            at = len(tail)
            while (at := tail.rfind(".", 0, at)) > 0:
                if tail[:at] in names:
                    return tail[:at]
            return tail.partition(".")[0] if tail.partition(".")[0].isdigit() else tail.rpartition(".")[0]

        for leaf in self._leaves:
            for (part, root), one in found.items():
                if leaf.part is part and leaf.key.startswith((f"{root}state.", f"{root}param_groups.")):
                    one.add(leaf, known)
                    self._taken.add(leaf)
        return list(found.values())

    def _optimizer_for(self, prefix: str, place: int, saved: list[_Optimizer]) -> _Optimizer | None:
        key = prefix.partition("/")[2]
        roots = [f"optimizer.{key}.", f"optimizers.{key}.", f"{key}."] if key else []
        for root in [*roots, "optimizer.", "optim.", ""]:
            same = [one for one in saved if one.root == root]
            numbered = [one for one in same if one.part.directory.name.endswith(f"_{place}")]
            if len(same) == 1 or len(numbered) == 1:
                return (numbered or same)[0]
        if len(saved) > 1:
            shown = ", ".join(repr(one.root) for one in saved)
            raise ValueError(
                f"{self.catalogue.where} holds several optimizers, {shown}; name the one for {prefix!r} by "
                "optimizer={name: …}"
            )
        return saved[0] if saved else None

    def _record(
        self,
        prefix: str,
        optimizer: Any,
        saved: _Optimizer,
        own: list[list[str]],
        ours: Mapping[str, str],
        partly: bool,
    ) -> dict[str, Any]:
        """An optimizer's record, as the manifest has it. ``partly``: what it has is only a part of ``saved``."""
        self._unpickle(leaf for tree in (*saved.groups.values(), *saved.settings.values()) for leaf in tree.values())
        self._unpickle(leaf for tree in saved.state.values() for leaf in tree.values())
        groups, name_of = self._groups(prefix, saved, own, ours)
        mine = {name for group in own for name in group}
        if partly:
            groups = [group for group in groups if mine & set(group["params"])]
        states = {}
        for key, tree in saved.state.items():
            name = name_of.get(key, ours.get(key, key))
            if name in mine or not partly:
                states[name] = self._encoded(tree, f"{prefix}/{name}")
        if name_of:
            self._check_places(optimizer, own, states)
        # Neither torch nor those who build on it keep the class.
        return {"class": type(optimizer).__name__, "groups": groups, "state": states}

    def _groups(
        self, prefix: str, saved: _Optimizer, own: list[list[str]], ours: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The groups, by names; and number → name, where the state is by number."""
        groups: list[dict[str, Any]] = []
        name_of: dict[str, str] = {}
        for g, tree in sorted(saved.groups.items()):
            settings = self._encoded(tree, f"{prefix}/@groups/{g}")["__dict__"]
            given = dict(settings)
            members = list(given.get("params", []))
            if any(isinstance(member, int) for member in members):
                names = given.get("param_names") or (own[g] if g < len(own) else [])
                if len(names) != len(members):
                    raise ValueError(
                        f"{self.catalogue.where}: group {g} of {prefix!r} has {len(members)} parameters, by number, "
                        f"the optimizer's has {len(names)}; save what torch's get_optimizer_state_dict returns"
                    )
                name_of |= dict(zip(map(str, members), names, strict=True))
                members = names
            others = [[key, value] for key, value in settings if key != "params"]
            groups.append({"params": [ours.get(name, name) for name in members], "settings": {"__dict__": others}})
        if saved.settings:
            groups += self._regrouped(prefix, saved, own, ours)
        return groups, {number: ours.get(name, name) for number, name in name_of.items()}

    def _regrouped(
        self, prefix: str, saved: _Optimizer, own: list[list[str]], ours: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """Groups of settings that were saved by parameter: the groups that the optimizer has."""
        of = {
            ours.get(name, name): self._encoded(tree, f"{prefix}/@groups/{name}")
            for name, tree in saved.settings.items()
        }
        groups: list[dict[str, Any]] = []
        for members in own:
            begin = len(groups)  # what was saved with different settings cannot have been one group
            for name in (name for name in members if name in of):
                plain = _without_tensors(of[name])
                same = next((one for one in groups[begin:] if _without_tensors(one["settings"]) == plain), None)
                if same is None:
                    groups.append({"params": [name], "settings": of[name]})
                else:
                    same["params"].append(name)
        left = [name for name in of if not any(name in members for members in own)]
        return [*groups, {"params": left, "settings": of[left[0]]}] if left else groups

    def _check_places(self, optimizer: Any, own: list[list[str]], states: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where state by number cannot be that of the parameter at its place."""
        flat = zip((p for g in optimizer.param_groups for p in g["params"]), (n for g in own for n in g), strict=True)
        for parameter, name in flat:
            shapes = [self.catalogue.entries[key].shape for key in state.references(states.get(name))]
            alike = [shape for shape in shapes if len(shape) == parameter.ndim and parameter.ndim]
            try:
                fits = not alike or torch.broadcast_shapes(*alike) == parameter.shape
            except RuntimeError:
                fits = False
            if not fits:
                raise ValueError(
                    f"{self.catalogue.where} has state by number, and that of {name!r}, of shape {alike[0]}, is not of "
                    f"its shape {list(parameter.shape)}; give the optimizer its parameters in the order of then"
                )

    # And the rest

    def add_others(self, models_wanted: bool) -> None:
        """What is neither a model's nor an optimizer's. ``models_wanted``: whether these have been told apart."""
        trees: dict[str, _Tree] = {}
        for leaf in self._leaves:
            at_top = len(leaf.path) == 1 and leaf.tensor is not None and not models_wanted
            if leaf not in self._taken and str(leaf.path[0]) not in _USUAL and not at_top:
                trees.setdefault(str(leaf.path[0]), {})[leaf.path[1:]] = leaf
        for name, tree in trees.items():
            self._manifest.more[name] = self._encoded(tree, f"more/{name}")

    def _encoded(self, tree: _Tree, path: str) -> Any:
        """Leaves as one value, in the form of ``state.split``: tensors as references, the rest unpickled."""
        self._unpickle(tree.values())

        def build(below: Iterable[tuple[tuple[Any, ...], _Leaf]], path: str) -> Any:
            inside: dict[Any, list[tuple[tuple[Any, ...], _Leaf]]] = {}
            for where, leaf in below:
                if not where:
                    if leaf.tensor is None:
                        return self._values[leaf]
                    self._add_tensor(path, leaf)
                    return {"__tensor__": path}
                inside.setdefault(where[0], []).append((where[1:], leaf))
            made = {key: build(each, f"{path}/{key}") for key, each in inside.items()}
            if made and all(isinstance(key, int) for key in made):
                return [made[key] for key in sorted(made)]
            return {"__dict__": [[key, value] for key, value in made.items()]}

        return build(tree.items(), path)

    def _unpickle(self, leaves: Iterable[_Leaf]) -> None:
        """Read what is no tensor, all in one go."""
        left = [leaf for leaf in leaves if leaf.tensor is None and leaf not in self._values]
        for part in {leaf.part: None for leaf in left}:
            keys = {leaf.key: leaf for leaf in left if leaf.part is part}
            self._values |= {keys[key]: _plain(value) for key, value in part.values(keys).items()}


def _without_tensors(value: Any) -> Any:
    """A split value with all tensors alike, to compare the rest of two."""
    if isinstance(value, dict) and "__tensor__" in value:
        return "tensor"
    if isinstance(value, dict):
        return {key: _without_tensors(each) for key, each in value.items()}
    return [_without_tensors(each) for each in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """An unpickled value in the form of ``state.split``; what that has no form for stays what it is."""
    if isinstance(value, dict):
        return {"__dict__": [[key, _plain(each)] for key, each in value.items()]}
    if type(value) is tuple:
        return {"__tuple__": [_plain(each) for each in value]}
    return [_plain(each) for each in value] if isinstance(value, list) else value
