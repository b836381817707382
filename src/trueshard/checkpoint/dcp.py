"""Read directories of torch.distributed.checkpoint (DCP), by torch's own reader; each rank reads only what it holds.

Torch's planner is left out: it wants the ranks to communicate, and if one failed, the others would wait. Whoever saves
chooses the keys, so they are recognised by what they lead to:

- Models: the nested dict (or the top level, as in TorchTitan) that holds most of the model's names.
- Optimizers: whatever has ``param_groups``. By name and nested, as torch's ``get_optimizer_state_dict`` makes it; by
  name and flat (``state.<name>.exp_avg``), as TorchTitan saves it; or by number, as ``Optimizer.state_dict()`` does.
- All else are entries of the user.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trueshard.checkpoint import state
from trueshard.checkpoint.catalogue import Catalogue, LocalDirectory
from trueshard.checkpoint.format import Manifest, TensorEntry, check_name, dtype_name, join, references

_ACCELERATE = ("pytorch_model_fsdp_*", "optimizer_*")  # folders of Accelerate's ``save_state``: each is a DCP directory
_OPTIMIZER = re.compile(r"(|.*?\.)param_groups\.")
# Top-level names that are never entries of the user:
_NO_ENTRIES = ("model", "models", "state_dict", "optimizer", "optimizers", "optim")


class DcpDirectory:
    """A directory with a ``.metadata``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = dcp.FileSystemReader(directory)
        try:
            self.metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self.metadata, True)
            self.saved = dict(self.metadata.state_dict_metadata)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(
                f"{directory}/.metadata is damaged ({type(error).__name__}: {error}); load an earlier checkpoint"
            ) from error
        sizes: dict[str, int] = {}
        for index, info in self.metadata.storage_data.items():
            name = info.relative_path
            if name not in sizes:
                check_name(name, f"{directory}/.metadata")
                if not (directory / name).is_file():
                    raise FileNotFoundError(f"{directory} has no file {name!r}; it is incomplete")
                sizes[name] = (directory / name).stat().st_size
            if info.offset + info.length > sizes[name]:
                raise ValueError(f"{directory}/{name} is cut short: {index.fqn!r} ends after byte {sizes[name]}")
        for key, saved in self.saved.items():
            chunks = [c.offsets for c in saved.chunks] if isinstance(saved, TensorStorageMetadata) else [None]
            if any(MetadataIndex(key, offset) not in self.metadata.storage_data for offset in chunks):
                raise ValueError(f"{directory}/.metadata is damaged: it does not say where {key!r} is")

    def leaves(self) -> list[_Leaf]:
        paths = self.metadata.planner_data or {}
        return [_Leaf(self, key, tuple(paths.get(key, (key,)))) for key in self.saved]

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Unpickle values that are not tensors."""
        nothing, where = torch.Size((0,)), map(MetadataIndex, keys)
        receiver = _Receiver()
        self._read([ReadItem(LoadItemType.BYTE_IO, at, nothing, at, nothing, nothing) for at in where], receiver)
        return receiver.values

    def fill(self, key: str, offsets: tuple[int, ...], local: torch.Tensor) -> None:
        """Fill ``local``, whose first element is at ``offsets`` of the saved tensor, converted to its dtype."""
        self._read(self._items(key, offsets, tuple(local.shape)), _Receiver(local))

    def _items(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[ReadItem]:
        here = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        saved = self.saved[key]
        assert isinstance(saved, TensorStorageMetadata)
        items: list[ReadItem] = create_read_items_for_chunk_list(key, saved, [here])
        if sum(math.prod(item.lengths) for item in items) != math.prod(sizes):
            raise ValueError(f"{self.directory}/.metadata is damaged: the parts of {key!r} do not make it up")
        return items

    def _read(self, items: list[ReadItem], receiver: dcp.DefaultLoadPlanner) -> None:
        try:
            self._reader.read_data(LoadPlan(items), receiver).wait()
        except Exception as error:  # whatever pickle and zip raise on damaged bytes
            file = min(self.metadata.storage_data[item.storage_index].relative_path for item in items)
            names = [item.storage_index.fqn for item in items]
            raise ValueError(
                f"{self.directory}/{file} does not read at {names[0]!r}"
                f"{f' or {len(names) - 1} more' if names[1:] else ''} ({type(error).__name__}: {error})"
            ) from error

    def verify(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Raise ``ValueError`` if a zip archive that holds this part of a tensor is damaged."""
        for item in self._items(key, offsets, sizes):
            info: Any = self.metadata.storage_data[item.storage_index]
            if getattr(info, "transform_descriptors", None):
                continue  # compressed or encrypted, which has checks of its own
            with open(self.directory / info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            try:
                damaged = zipfile.ZipFile(data).testzip()
            except Exception as error:  # whatever zip raises on damaged bytes
                damaged = str(error)
            if damaged is not None:
                raise ValueError(
                    f"{self.directory}/{info.relative_path} is damaged: {key!r} does not have the bytes that were "
                    f"saved ({damaged}); load an earlier checkpoint"
                )


class _Receiver(dcp.DefaultLoadPlanner):
    """Receives the parts of one tensor, ``local``, or values that are not tensors."""

    def __init__(self, local: torch.Tensor | None = None) -> None:
        super().__init__()
        self._local = local
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert self._local is not None
        return self._local


@dataclass
class DcpCatalogue(Catalogue):
    """The tensors of DCP directories, under the keys that ``save`` would give them."""

    saved: dict[str, tuple[DcpDirectory, str]] = field(default_factory=dict)  # key → (directory, key in it)

    def read_into(self, key: str, begin: int, local: torch.Tensor) -> None:
        if local.numel():
            directory, name = self.saved[key]
            directory.fill(name, self._offsets(key, begin), local.detach())

    def checksum(self, key: str, begin: int, end: int) -> int:
        """Raise ``ValueError`` if these bytes of a tensor are damaged; there is no checksum to return but 0."""
        directory, name = self.saved[key]
        shape = tuple(self.entries[key].shape)
        rows = (end - begin) * shape[0] // self.entries[key].nbytes if shape else 0
        directory.verify(name, self._offsets(key, begin), (rows, *shape[1:]) if shape else ())
        return 0

    def _offsets(self, key: str, begin: int) -> tuple[int, ...]:
        entry = self.entries[key]
        if not entry.shape:
            return ()
        return (begin * entry.shape[0] // entry.nbytes, *[0] * (len(entry.shape) - 1))


def open_dcp(
    catalogue: Catalogue,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Any],
    renaming: state.Renaming,
    allow_pickle: bool,
) -> DcpCatalogue:
    """Open the directory of ``catalogue``, to load ``models`` and ``optimizers`` (by key prefix)."""
    if not allow_pickle:
        raise ValueError(
            f"{catalogue.where} is a directory of torch.distributed.checkpoint, whose metadata is a pickle, which "
            "can run any code; nothing was opened. Pass allow_pickle=True if you trust whoever wrote it"
        )
    if not isinstance(catalogue.directory, LocalDirectory):
        raise ValueError(f"{catalogue.where}: torch reads its checkpoints from local directories; copy it to one")
    interpreter = _Interpreter(catalogue.directory, renaming)
    for i, (prefix, model) in enumerate(models.items()):
        interpreter.add_model(prefix, i, model)
    interpreter.add_optimizers(optimizers, state.parameter_names(models))
    interpreter.add_others(bool(models))
    return interpreter.catalogue


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A tensor or a value that a directory holds."""

    source: DcpDirectory
    key: str
    path: tuple[Any, ...]  # in the nested dicts that were saved, or (key,) if not recorded

    @property
    def tensor(self) -> TensorStorageMetadata | None:
        saved = self.source.saved[self.key]
        return saved if isinstance(saved, TensorStorageMetadata) else None

    def after(self, root: str) -> tuple[Any, ...]:
        """Return the path below ``root``, with which the key begins."""
        path, length = self.path, len(root)
        while length > 0:
            first = str(path[0])
            if len(first) >= length:
                return (first[length:], *path[1:])
            length -= len(first) + 1
            path = path[1:]
        return path


_Tree = dict[tuple[Any, ...], _Leaf]  # leaves by their path below some root
_Place = tuple[DcpDirectory, str]  # a directory, and the root: what keys in it begin with
_Optimizer = dict[str, dict[str, _Tree]]  # "state" and "param_groups" → a parameter's name, or a number → leaves


def _match(
    kinds: Sequence[str],  # what it may be called: "model", …
    prefix: str,  # its key prefix
    number: int,  # at the end of the name of the one that is meant, if several of Accelerate's have the root
    places: Sequence[_Place],
) -> _Place | None:
    """Return the only place with the likeliest root, or else the next one, and so on; or the only one there is."""
    key = prefix.partition("/")[2]
    roots = [f"{kinds[0]}.{key}.", f"{kinds[0]}s.{key}.", f"{key}."] if key else []
    for root in (*roots, *(f"{kind}." for kind in kinds), ""):
        same = [place for place in places if place[1] == root]
        numbered = [place for place in same if place[0].directory.name.endswith(f"_{number}")]
        if len(same) == 1 or len(numbered) == 1:
            return (numbered or same)[0]
    return places[0] if len(places) == 1 else None


class _Interpreter:
    """Fills a catalogue; ``renaming``: a parameter's name in the model → its name, or full key, in the directory."""

    def __init__(self, directory: LocalDirectory, renaming: state.Renaming) -> None:
        self._manifest = Manifest()
        self._renaming = renaming
        self.catalogue = DcpCatalogue(directory, self._manifest.tensors, self._manifest, dcp=True)
        folders = [directory.directory]
        if not directory.exists(".metadata"):
            paths = [path for pattern in _ACCELERATE for path in folders[0].glob(pattern)]
            in_order = sorted(paths, key=lambda path: (path.name.rpartition("_")[0], len(path.name), path.name))
            folders = [path for path in in_order if (path / ".metadata").is_file()]
        self._leaves = [leaf for folder in folders for leaf in DcpDirectory(folder).leaves()]
        self._taken: set[_Leaf] = set()  # what belongs to models and optimizers, and so to no entry
        self._model_name: dict[str, str] = {}  # a parameter's name in the directory → in the model
        self._values: dict[_Leaf, Any] = {}  # what was unpickled

    def _saved_name(self, name: str) -> str:
        return (self._renaming and self._renaming(name)) or name

    def add_model(self, prefix: str, number: int, model: nn.Module) -> None:
        """Add the tensors and extra state of model ``number``."""
        held, extra = state.model_tensors(model)
        names = {self._saved_name(name) for part in held.values() for name in part.names}
        by_full_key = {leaf.key: leaf for leaf in self._leaves if self._renaming and leaf.key in names}
        source, root, leaves = self._model_root(prefix, number, names, by_full_key)
        record: dict[str, Any] = {}
        for name in extra:
            tree = {
                leaf.after(root)[1:]: leaf
                for leaf in self._leaves
                if leaf.source is source and leaf.key.startswith(root + name) and leaf.after(root)[0] == name
            }
            if tree:
                record[name] = self._value(tree, f"extra/{prefix}/{name}")
        self._manifest.models[prefix] = {"class": None, "extra": record}
        for name, leaf in (leaves | by_full_key).items():
            if leaf.tensor is not None and name not in extra:
                self._add_tensor(f"{prefix}/{name}", leaf)
        self._taken.update(leaves.values())

    def _model_root(
        self, prefix: str, number: int, names: set[str], by_full_key: dict[str, _Leaf]
    ) -> tuple[DcpDirectory, str, dict[str, _Leaf]]:
        """Return the directory, the root in it, and by name all below it: where most of the model's ``names`` are."""
        below: dict[_Place, dict[str, _Leaf]] = {}
        for leaf in self._leaves:
            roots = {leaf.key[: len(leaf.key) - len(str(leaf.path[-1]))]}
            if leaf.path == (leaf.key,):  # its path may not have been recorded
                roots |= {root for root in ("model.", "state_dict.") if leaf.key.startswith(root)}
            for root in roots:
                below.setdefault((leaf.source, root), {})[leaf.key[len(root) :]] = leaf
        scores = {place: len(names & leaves.keys()) for place, leaves in below.items()}
        best = max(scores.values(), default=0)
        if not best and by_full_key:
            return next(iter(by_full_key.values())).source, "", by_full_key
        if not best:
            keys = [leaf.key for leaf in self._leaves]
            shown = ", ".join(keys[:5]) + (f", and {len(keys) - 5} more" if keys[5:] else "")
            raise ValueError(
                f"{self.catalogue.where} holds no tensor of {prefix!r}, but {shown}; say with names= what is"
            )
        candidates = [place for place, score in scores.items() if score == best]
        place = _match(["model"], prefix, number, candidates)
        if place is None:
            shown = ", ".join(repr(root + next(iter(names))) for _, root in candidates)
            raise ValueError(f"{self.catalogue.where} holds {prefix!r} more than once ({shown}); say with names= which")
        return (*place, below[place])

    def _add_tensor(self, key: str, leaf: _Leaf) -> None:
        saved = leaf.tensor
        assert saved is not None
        dtype = dtype_name(saved.properties.dtype)
        self.catalogue.entries[key] = TensorEntry([key.partition("/")[2]], list(saved.size), dtype)
        self.catalogue.saved[key] = leaf.source, leaf.key

    def add_optimizers(self, optimizers: Mapping[str, Any], name_of: Mapping[int, str]) -> None:
        """Add the records of ``optimizers`` (by key prefix); ``name_of``: ``id`` of a parameter → its name."""
        self._model_name = {self._saved_name(name): name for name in name_of.values()}
        saved = self._saved_optimizers()
        for i, (prefix, optimizer) in enumerate(optimizers.items() if saved else ()):
            place = _match(["optimizer", "optim"], prefix, i, list(saved))
            if place is None:
                shown = ", ".join(repr(root) for _, root in saved)
                raise ValueError(
                    f"{self.catalogue.where} holds several optimizers, {shown}; name the one for {prefix!r} by "
                    "optimizer={name: …}"
                )
            members = [[name_of.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
            record = self._record(prefix, optimizer, saved[place], members, partly=len(optimizers) > 1)
            self._manifest.optimizers[prefix] = record

    def _saved_optimizers(self) -> dict[_Place, _Optimizer]:
        result: dict[_Place, _Optimizer] = {}
        for leaf in self._leaves:
            match = _OPTIMIZER.match(leaf.key)
            if match is not None and leaf not in self._taken:
                result.setdefault((leaf.source, match[1]), {"state": {}, "param_groups": {}})
        for leaf in self._leaves:
            for (source, root), parts in result.items():
                if leaf.source is source and leaf.key.startswith((f"{root}state.", f"{root}param_groups.")):
                    first, *rest = leaf.after(root)
                    kind, _, tail = str(first).partition(".")
                    if not rest:
                        name = self._parameter_in(tail)
                        rest = [name, *tail[len(name) + 1 :].split(".")]
                    parts[kind].setdefault(str(rest[0]), {})[tuple(rest[1:])] = leaf
                    self._taken.add(leaf)
        return result

    def _parameter_in(self, tail: str) -> str:
        """Return the longest name of a parameter that a flat key begins with, or a number, or all but the last word."""
        at = len(tail)
        while (at := tail.rfind(".", 0, at)) > 0:
            if tail[:at] in self._model_name:
                return tail[:at]
        return tail.partition(".")[0] if tail.partition(".")[0].isdigit() else tail.rpartition(".")[0]

    def _record(
        self,
        prefix: str,
        optimizer: Any,
        saved: _Optimizer,
        members: list[list[str]],  # names in each of its groups
        partly: bool,  # true if ``saved`` also has parameters of other optimizers
    ) -> dict[str, Any]:
        self._unpickle([leaf for trees in saved.values() for tree in trees.values() for leaf in tree.values()])
        groups, name_of = self._groups(prefix, saved["param_groups"], members)
        names = {name for group in members for name in group}
        if partly:
            groups = [group for group in groups if names & set(group["params"])]
        states = {}
        for key, tree in saved["state"].items():
            name = name_of.get(key, self._model_name.get(key, key))
            if name in names or not partly:
                states[name] = self._value(tree, f"{prefix}/{name}")
        if name_of:
            self._check_shapes(optimizer, members, states)
        # Neither torch nor those who build on it keep the class.
        return {"class": type(optimizer).__name__, "groups": groups, "state": states}

    def _groups(
        self, prefix: str, trees: Mapping[str, _Tree], members: list[list[str]]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the groups, by names, and number → name, where the state is by number."""
        groups: list[dict[str, Any]] = []
        name_of: dict[str, str] = {}
        values = {key: self._value(tree, f"{prefix}/@groups/{key}") for key, tree in trees.items()}
        for g in sorted(int(key) for key in values if key.isdigit()):
            settings = dict(values[str(g)]["__dict__"])
            saved = list(settings.pop("params", []))
            if any(isinstance(parameter, int) for parameter in saved):
                names = settings.get("param_names") or (members[g] if g < len(members) else [])
                if len(names) != len(saved):
                    raise ValueError(
                        f"{self.catalogue.where}: group {g} of {prefix!r} has {len(saved)} parameters, by number, "
                        f"the optimizer's has {len(names)}; save what torch's get_optimizer_state_dict returns"
                    )
                name_of |= dict(zip(map(str, saved), names, strict=True))
                saved = names
            others = [[key, value] for key, value in settings.items()]
            groups.append({"params": [self._model_name.get(n, n) for n in saved], "settings": {"__dict__": others}})
        by_parameter = {self._model_name.get(key, key): value for key, value in values.items() if not key.isdigit()}
        groups += _regrouped(by_parameter, members)
        return groups, {number: self._model_name.get(name, name) for number, name in name_of.items()}

    def _check_shapes(self, optimizer: Any, members: list[list[str]], states: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where state by number cannot belong to the parameter at its place."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, name in zip(parameters, (name for names in members for name in names), strict=True):
            shapes = [self.catalogue.entries[key].shape for key in references(states.get(name))]
            similar = [shape for shape in shapes if len(shape) == parameter.ndim and parameter.ndim]
            try:
                fits = not similar or torch.broadcast_shapes(*similar) == parameter.shape
            except RuntimeError:
                fits = False
            if not fits:
                raise ValueError(
                    f"{self.catalogue.where} has state by number, and that of {name!r}, of shape {similar[0]}, is not "
                    f"of its shape {list(parameter.shape)}; give the optimizer its parameters in the order of the save"
                )

    def add_others(self, has_models: bool) -> None:
        """Add the user's entries: all that is left, but tensors at the top level if no model was given."""
        trees: dict[str, _Tree] = {}
        for leaf in self._leaves:
            at_top = len(leaf.path) == 1 and leaf.tensor is not None and not has_models
            if leaf not in self._taken and str(leaf.path[0]) not in _NO_ENTRIES and not at_top:
                trees.setdefault(str(leaf.path[0]), {})[leaf.path[1:]] = leaf
        for name, tree in trees.items():
            self._manifest.more[name] = self._value(tree, f"more/{name}")

    def _value(self, tree: _Tree, path: str) -> Any:
        """Return leaves as one value in the form of ``split``: tensors as references, the rest unpickled."""
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
            made = {key: build(inner, f"{path}/{key}") for key, inner in inside.items()}
            if made and all(isinstance(key, int) for key in made):
                return [made[key] for key in sorted(made)]
            return {"__dict__": [[key, value] for key, value in made.items()]}

        return build(tree.items(), path)

    def _unpickle(self, leaves: Iterable[_Leaf]) -> None:
        left = [leaf for leaf in leaves if leaf.tensor is None and leaf not in self._values]
        for source in {leaf.source: None for leaf in left}:
            keys = {leaf.key: leaf for leaf in left if leaf.source is source}
            self._values |= {keys[key]: value for key, value in source.values(keys).items()}


def _regrouped(settings_of: Mapping[str, Any], members: list[list[str]]) -> list[dict[str, Any]]:
    """Return the optimizer's groups, of ``members``, with settings that were saved by parameter."""
    groups: list[dict[str, Any]] = []
    for names in members:
        begin = len(groups)  # parameters saved with different settings cannot have been one group
        for name in (name for name in names if name in settings_of):
            plain = join(settings_of[name], type)  # without the tensors, to compare the rest
            same = next((group for group in groups[begin:] if join(group["settings"], type) == plain), None)
            if same is None:
                groups.append({"params": [name], "settings": settings_of[name]})
            else:
                same["params"].append(name)
    left = [name for name in settings_of if not any(name in names for names in members)]
    return [*groups, {"params": left, "settings": settings_of[left[0]]}] if left else groups
