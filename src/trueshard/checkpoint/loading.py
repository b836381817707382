"""Load in place, at any world size: each rank reads the bytes it holds, and nothing else; of replicas one reads.

Everything is checked on every rank before anything is changed: names, shapes, dtypes and groups, and then checksums.
Each rank takes the checksum of its own bytes, and together they must give the tensor's. Groups of an optimizer are
matched by the names of their parameters, and its state goes where it keeps it.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import hashing, process_group, state
from trueshard.checkpoint.catalogue import Catalogue, open_catalogue
from trueshard.checkpoint.format import (
    Manifest,
    TensorEntry,
    crc32,
    crc32_joined,
    dtype_name,
    join,
    located,
    references,
    with_wrapped,
)
from trueshard.checkpoint.layout import Naming, naming_of
from trueshard.checkpoint.materialise import materialise, uncomputable
from trueshard.checkpoint.process_group import RankGroup, check_equal
from trueshard.checkpoint.saving import background
from trueshard.errors import own_errors
from trueshard.model import names as model_names
from trueshard.optim.rebind import family
from trueshard.optim.stepping import Role, roles_of
from trueshard.optim.ties import tie_of
from trueshard.text import timed


@own_errors()
@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    strict: bool = True,
    verify: bool = True,
    rng: bool = True,
    convert: bool = False,
    names: Mapping[str, str] | Callable[[str], str | None] | None = None,
    allow_pickle: bool = False,
    **more: Any,
) -> Found:
    """Load into ``model`` and ``optimizer``, in place. Collective where there are several ranks.

    Nothing is changed unless everything fits. A model on the meta device gets memory; its buffers that are in no
    checkpoint are computed as the model itself does, or an error names them. On the CPU its parameters are, where
    possible, private maps of the files: read when used, copied when written to. Until then the files may be deleted,
    but not overwritten in place.

    Args:
        path: a checkpoint; ``…/latest`` is the newest one beside it. Or a Hugging Face directory, a .safetensors file,
            a PEFT adapter's directory, a directory of torch.distributed.checkpoint.
        model: as given to ``save``: the same names and shapes, any sharding.
        optimizer: as given to ``save``. Its groups are matched by the names of their parameters, in any order; a group
            of parameters that were not in the saved optimizer keeps its settings.
        strict: False: load what fits, and report the rest in the result.
        verify: compare checksums, where the checkpoint has them.
        rng: restore this rank's random generators, where the checkpoint has their state.
        convert: convert a dtype that differs; otherwise it is an error.
        names: the model's name of a tensor → its name in the files (None, or left out of a dict: the same). The stages
            of a pipeline (``Plan(pipeline=True)``) load together, each its part.
        allow_pickle: needed for torch.distributed.checkpoint, whose metadata is a pickle: only from whom you trust.
        more: entries to load in place, by the name they were saved under: objects with ``load_state_dict()``, or
            dicts, which are then what was saved. Other entries each rank reads whole, an `Average` too.

    Returns:
        The saved entries that are not in ``more``, by name, and what did not fit.

    Raises:
        FileNotFoundError: nothing is at ``path``.
        ValueError: it is damaged, or of another model; the message names tensors and files.
        RuntimeError: another rank failed, or did not call ``load``.
    """
    background.wait()
    options = {"strict": strict, "verify": verify, "rng": rng, "convert": convert, "allow_pickle": allow_pickle}
    with timed(f"load of {path}"):
        renaming = names.get if isinstance(names, Mapping) else names
        with torch.device("cpu"):  # the user's default, where it is another, is not meant for tables and buffers
            return LoadJob(state.group_of(model), options, renaming, more).run(path, model, optimizer)


class Found(dict[str, Any]):
    """The saved entries that were not loaded in place, by name; and what did not fit, with ``strict=False``."""

    missing: list[str]
    """Names in the model or optimizer that are not in the checkpoint."""
    unexpected: list[str]
    """Names in the checkpoint that are not in the model or optimizer."""
    mismatched: list[str]
    """Names whose shape, dtype or group differs."""

    def __init__(self) -> None:
        super().__init__()
        self.missing, self.unexpected, self.mismatched = [], [], []


class LoadJob:
    """One load; ``options``, ``renaming``, ``more``: arguments of ``load``."""

    def __init__(
        self, group: RankGroup, options: dict[str, bool], renaming: state.Renaming, more: Mapping[str, Any]
    ) -> None:
        self._group, self._options, self._renaming, self._more = group, options, renaming, more
        # What ``_open`` has matched: nothing is changed before every rank has matched its own.
        self._targets: list[tuple[str, torch.Tensor]] = []  # (key in the catalogue, the model's tensor that it fills)
        self._loads: list[OptimizerLoad] = []
        self._misfits: dict[str, dict[str, str]] = {"mismatched": {}, "missing": {}, "unexpected": {}, "new": {}}
        """Kind of misfit → name → text; "new" is no error."""
        self._result = Found()

    def run(self, path: str | os.PathLike[str] | Catalogue, model: Any, optimizer: Any) -> Found:
        """Check and verify, which changes nothing, then load. Collective. ``path`` may be open already."""
        shown = path.where if isinstance(path, Catalogue) else path
        attempt = functools.partial(self._group.attempt, f"{shown} was not loaded")
        everyone = attempt(lambda: self._open(path, model, optimizer))
        check_equal("load()", [arguments[:3] for arguments in everyone])
        if self._group.staged:  # unexpected is what no stage uses
            unused = [names for *_, names in everyone]
            in_all = {name: text for name, text in unused[0].items() if all(name in names for names in unused)}
            self._misfits["unexpected"] = in_all
            self._report()
        if self._options["verify"]:
            self._verify(attempt(self._checksums))
        # In this order: what runs the user's code may raise, and then models and optimizers are as they were. A rank
        # without memory for its tensors must fail before others wait for it in the collectives of ``_apply``.
        attempt(self._load_entries)
        attempt(self._materialise)
        attempt(self._apply)
        if self._options["verify"] and (saved := self._manifest.about.get("hashes")):
            self._compare(shown, saved)
        return self._result

    def _compare(self, path: str | os.PathLike[str], saved: Mapping[str, str]) -> None:
        """Raise ``ValueError`` if what is in memory now is not what was in memory when it was saved. Collective."""
        entries = self._catalogue.entries
        tensors = state.collect(self._models, self._optimizers, {}, self._renaming)[0]
        same = {
            key: tensor
            for key, tensor in tensors.items()
            if key in entries and entries[key].dtype == dtype_name(tensor.dtype)
        }
        hashes = hashing.hash_together(same, self._group, f"{path} was not compared")
        if wrong := [key for key, value in hashes.items() if saved.get(key, value) != value]:
            raise ValueError(
                f"{self._catalogue.where}: {wrong[0]!r} has other bits in memory than when it was saved "
                f"({len(wrong)} such); its checksums fit, so this machine's memory is at fault: load on another"
            )

    def _open(
        self, path: str | os.PathLike[str] | Catalogue, model: Any, optimizer: Any
    ) -> tuple[int, dict[str, Any], dict[str, Any], dict[str, str]]:
        """Check that everything fits.

        Returns:
            The arguments of ``check_equal``; and what this rank's stage of a pipeline does not use: name → text.
        """
        self._models, self._optimizers = state.by_prefix(model, optimizer)
        self._catalogue: Catalogue = path if isinstance(path, Catalogue) else open_catalogue(path)
        if self._catalogue.dcp:
            from trueshard.checkpoint.dcp import open_dcp

            pickled = self._options["allow_pickle"]
            self._catalogue = open_dcp(self._catalogue, self._models, self._optimizers, self._renaming, pickled)
        self._manifest = self._catalogue.manifest or Manifest()
        self._check()
        unused: dict[str, str] = {}
        if self._group.staged:
            unused, self._misfits["unexpected"] = self._misfits["unexpected"], {}
        self._report()
        identity = repr(sorted(self._catalogue.entries.items()))
        common = {
            **self._options,
            "models": sorted(self._models),
            "optimizers": sorted(self._optimizers),
            "entries": sorted(self._more),
            "path": f"{self._catalogue.where} ({crc32(memoryview(identity.encode())):08x})",
        }
        tensors = {
            key: [list(tensor.shape), str(getattr(tensor, "placements", "plain"))] for key, tensor in self._targets
        }
        return self._group.stage[0], common, tensors, unused

    def _check(self) -> None:
        for prefix, module in self._models.items():
            self._check_model(prefix, module, naming_of(self._catalogue, prefix, module, self._renaming))
        renaming = None if self._catalogue.dcp else self._renaming  # whose states have the model's own names already
        name_of, saved = state.parameter_names(self._models, renaming), with_wrapped(self._manifest.optimizers)
        for prefix, optimizer in self._optimizers.items():
            if prefix not in saved:
                nearest = model_names.nearest(prefix, self._manifest.optimizers)
                self._misfit("missing", prefix, f"has no {prefix!r}.{nearest}")
                continue
            roles = roles_of(optimizer)
            for place, member in enumerate(family(optimizer)):  # the optimizer, and those that it wraps
                record = saved.get(f"{prefix}/@{place}" if place else prefix)
                if record is not None:
                    if self._group.staged:
                        record = state.part_of(record, {*name_of.values()})
                    self._loads.append(OptimizerLoad(member, self._catalogue, roles))
                    for misfit in self._loads[-1].match(prefix, record, name_of):
                        self._misfit(*misfit)
        entries = self._manifest.more
        for key, value in self._more.items():
            is_dict = isinstance(value, dict) and not hasattr(value, "load_state_dict")
            if hasattr(value, "shards"):
                self._check_shards(key, value.shards())
            elif key not in entries:
                self._misfit("missing", key, f"has no entry {key!r}.{model_names.nearest(key, entries)}")
            elif is_dict and not (isinstance(entries[key], dict) and "__dict__" in entries[key]):
                raise TypeError(f"{key}: a dict was given, and none was saved; take the entry from what load() returns")
            elif not is_dict and not hasattr(value, "load_state_dict"):
                kind = type(value).__name__
                raise TypeError(f"{key}: a {kind} has no load_state_dict(); take the entry from what load() returns")

    def _check_shards(self, key: str, shards: Mapping[str, torch.Tensor]) -> None:
        """Match an entry of tensors that are sharded like parameters; either side may have none of them."""
        saved = {path[-1]: where for path, where in located(self._manifest.more.get(key, {}))}
        for name in {*shards, *saved} if shards and saved else ():
            if name not in shards or name not in saved:
                self._misfit("mismatched", f"{key}: {name}", f"the entry {key!r} has {name!r} on one side only")
            elif self._catalogue.entries[saved[name]].shape != list(shards[name].shape):
                self._misfit("mismatched", f"{key}: {name}", f"{name!r} of the entry {key!r} has another shape")
            else:
                self._targets.append((saved[name], shards[name]))

    def _misfit(self, kind: str, name: str, text: str) -> None:
        self._misfits[kind].setdefault(name, text)

    def _report(self) -> None:
        """Raise ``ValueError`` with all that does not fit, if strict; fill in the names."""
        texts = self._misfits
        errors = [text for kind in ("mismatched", "missing", "unexpected") for text in texts[kind].values()]
        if errors and self._options["strict"]:
            shown = "; ".join(errors[:6]) + (f"; and {len(errors) - 6} more" if errors[6:] else "")
            where = self._catalogue.where
            raise ValueError(f"{where} does not fit: {shown}. strict=False loads what fits and reports the rest")
        self._result.missing = [*texts["missing"], *texts["new"]]
        self._result.unexpected, self._result.mismatched = list(texts["unexpected"]), list(texts["mismatched"])

    def _check_model(self, prefix: str, module: nn.Module, naming: Naming) -> None:
        held, extra = state.model_tensors(module)
        entries = self._catalogue.entries
        used: set[str] = set()
        for name, part in held.items():
            tied, here = tie_of(part.tensor), dtype_name(part.tensor.dtype)
            candidates = [naming.key(alias, None if tied is None else tied.name) for alias in part.names]
            key = next((key for key in candidates if key in entries), None)
            used.update(candidates)
            if key is None:
                if not naming.may_lack(name):
                    saved = [naming.name(key) for key in entries if key.startswith(naming.prefix)]
                    self._misfit("missing", name, f"has no {name!r}.{model_names.nearest(name, saved)}")
            elif entries[key].shape != list(part.tensor.shape):
                text = f"{name!r} has shape {entries[key].shape}, the model's has {list(part.tensor.shape)}"
                self._misfit("mismatched", name, text)
            elif entries[key].dtype != here and not self._options["convert"]:
                text = f"{name!r} is {entries[key].dtype}, the model's is {here}; convert=True converts it"
                self._misfit("mismatched", name, text)
            else:
                self._targets.append((key, part.tensor))
        for key in entries:
            if key.startswith(naming.prefix) and key not in used:
                name = naming.name(key)
                self._misfit("unexpected", name, f"holds {name!r}, which the model does not have")
        for name in uncomputable(module, {id(tensor) for _, tensor in self._targets}):
            text = (
                f"has no {name!r}, which is on the meta device and which nothing computes: give its module "
                "reset_parameters(), or build the model off the meta device"
            )
            self._misfit("missing", name, text)
        for name in extra:
            if name not in self._saved_extra(prefix) and not naming.may_lack(name):
                self._misfit("missing", name, f"has no {name!r}, which {type(module).__name__} saves itself")

    def _saved_extra(self, prefix: str) -> dict[str, Any]:
        return dict(self._manifest.models.get(prefix, {}).get("extra", {}))

    def _checksums(self) -> dict[str, tuple[int, int, int]]:
        """Return key → (begin, end, checksum) of this rank's part of the checking."""
        catalogue = self._catalogue
        return {
            key: (begin, end, catalogue.checksum(key, begin, end))
            for key, begin, end in self._ranges()
            if end > begin and (catalogue.entries[key].crc32 is not None or catalogue.dcp)
        }

    def _verify(self, everyone: list[dict[str, tuple[int, int, int]]]) -> None:
        """Raise ``ValueError`` if a tensor that will be read is damaged; ``everyone``: all ranks' ``_checksums``."""
        for key in dict.fromkeys(key for checksums in everyone for key in checksums):
            # Stages that hold copies of one parameter read the same.
            parts = sorted({checksums[key] for checksums in everyone if key in checksums})
            checksum = crc32_joined((checksum, end - begin) for begin, end, checksum in parts)
            if self._catalogue.entries[key].crc32 not in (None, checksum):
                raise self._catalogue.damaged(key, "load an earlier checkpoint")

    def _ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield (key, begin, end) of what this rank checks; together the ranks check every tensor once."""
        rank, world = self._group.stage.index(self._group.rank), len(self._group.stage)
        templates = [template for load in self._loads for template in load.templates]
        for number, (key, tensor) in enumerate([*self._targets, *templates]):
            full = self._catalogue.entries[key].nbytes
            if isinstance(tensor, DTensor):
                yield key, *process_group.own_part(tensor, number, full)
            elif rank == number % world:
                yield key, 0, full
        values = [self._manifest.more, *(self._saved_extra(prefix) for prefix in self._models)]
        keys = {*references([*values, *(value for load in self._loads for _, value in load.settings)])}
        keys -= {key for key, _ in self._targets}
        keys |= {"rng"} if self._options["rng"] and self._manifest.rng else set()
        for number, key in enumerate(sorted(keys)):
            if rank == number % world:
                yield key, 0, self._catalogue.entries[key].nbytes

    def _load_entries(self) -> None:
        """Load what runs the user's code: if that raises on any rank, models and optimizers are not changed."""
        for key, value in self._manifest.more.items():
            in_place = hasattr(self._more.get(key), "shards")  # ``_apply`` reads the tensors
            self._result[key] = join(value, str) if in_place else self._catalogue.value(value)
        for key, value in self._more.items():
            if key not in self._result:
                continue
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(self._result.pop(key))
            else:
                value.clear()
                value.update(self._result.pop(key))
        for prefix, module in self._models.items():
            saved = self._saved_extra(prefix)
            for name in state.model_tensors(module)[1]:
                if name in saved:
                    owner = model_names.unwrap(module).get_submodule(name.rpartition(".")[0])
                    owner.set_extra_state(self._catalogue.value(saved[name]))

    def _materialise(self) -> None:
        key_of = {id(tensor): key for key, tensor in self._targets}
        for module in self._models.values():
            materialise(module, key_of)

    def _apply(self) -> None:
        failures: list[Exception] = []
        for key, tensor in self._targets:
            self._catalogue.fill_together(key, tensor, failures)
        for load in self._loads:
            load.apply(failures)
        if failures:
            raise failures[0]
        if self._options["rng"] and self._group.rank < len(self._manifest.rng):
            table = self._manifest.rng[self._group.rank]
            row = torch.empty(sum(size for _, size in table), dtype=torch.uint8)
            self._catalogue.read_into("rng", self._group.rank * len(row), row)
            state.set_random_state(table, row)


# Optimizers


@dataclass
class OptimizerLoad:
    """The changes to one optimizer, or to one that it wraps."""

    optimizer: Any
    catalogue: Catalogue
    roles: dict[int, Role]  # ``id`` of a sharded parameter → how the optimizer keeps its state
    settings: list[tuple[dict[str, Any], Any]] = field(default_factory=list)  # (group, its saved settings)
    parts: list[tuple[Any, Any]] = field(default_factory=list)  # (parameter or other key of the state, its saved state)
    templates: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # (key, meta tensor cut like it): checksums

    def apply(self, failures: list[Exception]) -> None:
        """Change the optimizer; its state dict remains the same object. What it held is freed first. Collective.

        ``failures``: what ``fill_together`` could not read.
        """
        self.optimizer.state.clear()
        for group, value in self.settings:
            group.update(copy.deepcopy(self.catalogue.value(value)))
        loaded = {}
        settings = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for key, value in self.parts:
            tensors = {}
            group = settings.get(id(key), {})
            counts = "cpu" if not (group.get("fused") or group.get("capturable")) else None
            for path, where in located(value):
                entry = self.catalogue.entries[where]
                is_parameter = isinstance(key, torch.Tensor)
                role = self.roles.get(id(key))
                tensors[where] = _like(entry, path, key, role, counts) if is_parameter else entry.empty()
                self.catalogue.fill_together(where, tensors[where], failures)
            loaded[key] = join(value, tensors.__getitem__)
        self.optimizer.state.update(loaded)

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
                    like = _like(self.catalogue.entries[key], path, parameter, role, None, meta=True)
                    self.templates.append((key, like))

    def _match_groups(self, prefix: str, saved: Any, name_of: Mapping[int, str]) -> Iterator[tuple[str, str, str]]:
        left = list(saved)
        saved_names = {name for group in saved for name in group["params"]}
        for g, group in enumerate(self.optimizer.param_groups):
            members = {
                name_of.get(id(p), f"<a parameter of no model given, shape {tuple(p.shape)}>") for p in group["params"]
            }
            same = next((record for record in left if set(record["params"]) == members), None)
            if same is not None:
                left.remove(same)
                self.settings.append((group, same["settings"]))
            elif members and not saved_names & members:
                yield "new", f"{prefix}: group {g}", ""
            else:
                near = max(saved, key=lambda record: len(set(record["params"]) & members))
                left = [record for record in left if record is not near]
                lost, added = sorted({*near["params"]} - members), sorted(members - {*near["params"]})
                text = f"group {g} of {prefix!r} is not what was saved: missing here {lost[:3]}, new here {added[:3]}"
                yield "mismatched", f"{prefix}: group {g}", text
        for record in (record for record in left if not record.get("elsewhere")):
            shown = f"{record['params'][:3]}{'…' if record['params'][3:] else ''}"
            text = f"{prefix!r} was saved with a group of {shown}, which it has not here"
            yield "unexpected", f"{prefix}: saved group {saved.index(record)}", text


def _like(
    entry: TensorEntry,
    path: tuple[Any, ...],
    parameter: torch.Tensor,
    role: Role | None,
    counts: str | None,
    meta: bool = False,
) -> torch.Tensor:
    """Make a tensor for ``entry``, sharded and placed as the optimizer itself would hold it, or on the meta device.

    ``counts``: the device of a count of steps; None: the parameter's, where the kernels of fused and capturable
    optimizers read it, without a check.
    """
    local = _torch.local(parameter)
    device: Any = "meta" if meta else local.device
    if role is not None and role.is_mine is None and isinstance(parameter, DTensor):
        full = entry.empty("meta")
        if role.is_rows(path, full, parameter):
            shape = local.shape if full.shape == parameter.shape else (*local.shape[:1], *full.shape[1:])
            memory = full.new_empty(shape, device=device)
            return _torch.dtensor_over(memory, parameter, full.shape, full.stride())
    if not meta and not entry.shape and path[-1:] == ("step",):
        device = counts or device
    return entry.empty(device)
