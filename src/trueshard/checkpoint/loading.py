"""A load from tensors in files: what is checked before anything is changed, and then the changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import names as model_names
from trueshard.checkpoint import optimizers, pieces, randomness, state
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.checksum import crc32, joined
from trueshard.checkpoint.filling import fill
from trueshard.checkpoint.found import Found, Misfits
from trueshard.checkpoint.materialise import materialise, uncomputable
from trueshard.checkpoint.naming import Naming, naming_of
from trueshard.checkpoint.tensorfile import dtype_name
from trueshard.checkpoint.together import Together


class Loading:
    """One load from tensors in files."""

    def __init__(
        self,
        catalogue: Catalogue,
        models: Mapping[str, nn.Module],
        wanted: Mapping[str, Any],
        more: Mapping[str, Any],
        strict: bool,
        convert: bool,
        names: Any,
        rng: bool,
    ) -> None:
        self._catalogue, self._models, self._optimizers, self._more = catalogue, models, wanted, more
        self._convert, self._names, self._rng = convert, names, rng
        self._targets: list[tuple[str, torch.Tensor]] = []
        """Keys in the catalogue, and the tensors of models that they fill."""
        self._misfits = Misfits(catalogue.where, strict)
        self._plans: list[optimizers.Plan] = []

    # Before anything is changed

    def check(self) -> None:
        """Raise ``ValueError`` if something does not fit; collect what is to be done."""
        for prefix, module in self._models.items():
            self._check_model(prefix, module, naming_of(self._catalogue, prefix, module, self._names))
        name_of = state.parameter_names(self._models)
        saved = {} if self._catalogue.manifest is None else self._catalogue.manifest.optimizers
        for prefix, each in self._optimizers.items():
            if prefix in saved:
                self._plans += optimizers.plan(prefix, each, saved[prefix], name_of, self._catalogue, self._misfits)
            else:
                self._misfits.missing(prefix, f"has no {prefix!r}.{model_names.nearest(prefix, saved)}")
        entries = {} if self._catalogue.manifest is None else self._catalogue.manifest.more
        for key, value in self._more.items():
            if key not in entries:
                self._misfits.missing(key, f"has no entry {key!r}.{model_names.nearest(key, entries)}")
            elif not hasattr(value, "load_state_dict"):
                kind = type(value).__name__
                raise TypeError(f"{key}: a {kind} has no load_state_dict(); take the entry from what load() returns")
        self._misfits.settle()

    def _check_model(self, prefix: str, module: nn.Module, naming: Naming) -> None:
        held, extra = state.model_tensors(module)
        used: set[str] = set()
        for name, each in held.items():
            candidates = [naming.key(known) for known in each.names]
            key = next((key for key in candidates if key in self._catalogue.entries), None)
            used.update(candidates)
            if key is None:
                if not naming.may_lack(name):
                    known = [naming.name(key) for key in self._catalogue.entries if naming.owns(key)]
                    self._misfits.missing(name, f"has no {name!r}.{model_names.nearest(name, known)}")
                continue
            if self._check_tensor(name, key, each.tensor):
                self._targets.append((key, each.tensor))
        for key in self._catalogue.entries:
            if naming.owns(key) and key not in used:
                self._misfits.unexpected(naming.name(key))
        for name in uncomputable(module, {id(tensor) for _, tensor in self._targets}):
            self._misfits.missing(
                name,
                f"has no {name!r}, which is on the meta device and which nothing computes: give its module "
                "reset_parameters(), or build the model off the meta device",
            )
        saved = {} if self._catalogue.manifest is None else self._catalogue.manifest.models.get(prefix, {})
        for name in extra:
            if name not in saved.get("extra", {}) and not naming.partial:
                self._misfits.missing(name, f"has no {name!r}, which {type(module).__name__} saves itself")

    def _check_tensor(self, name: str, key: str, tensor: torch.Tensor) -> bool:
        entry = self._catalogue.entries[key]
        if entry.shape != list(tensor.shape):
            self._misfits.mismatched(name, f"{name!r} has shape {entry.shape}, the model's has {list(tensor.shape)}")
        elif entry.dtype != dtype_name(tensor.dtype) and not self._convert:
            here = dtype_name(tensor.dtype)
            text = f"{name!r} is {entry.dtype}, the model's is {here}; convert=True converts it"
            self._misfits.mismatched(name, text)
        else:
            return True
        return False

    def identity(self) -> str:
        """The same on every rank that reads the same."""
        entries = sorted(
            (key, entry.crc32, entry.dtype, *entry.shape, *map(str, entry.pieces))
            for key, entry in self._catalogue.entries.items()
        )
        return f"{self._catalogue.where} ({crc32(memoryview(repr(entries).encode())):08x})"

    def wanted(self) -> dict[str, list[Any]]:
        """What is to be filled, by key: shape and placement."""
        return {key: [list(tensor.shape), pieces.placement(tensor)] for key, tensor in self._targets}

    @property
    def has_checksums(self) -> bool:
        """Whether there is anything to verify; the same on every rank that reads the same."""
        return any(entry.crc32 is not None for entry in self._catalogue.entries.values())

    @property
    def has_entries(self) -> bool:
        """Whether ``begin`` has anything to do; the same on every rank, too."""
        return bool(self._more) or self._catalogue.manifest is not None

    def verify(self, together: Together) -> None:
        """Compare checksums of all that will be read. Collective."""
        mine: dict[str, tuple[int, int, int]] = {}
        error: BaseException | None = None
        try:
            for key, begin, end in self._ranges(together):
                if self._catalogue.entries[key].crc32 is not None:
                    mine[key] = begin, end, self._catalogue.checksum(key, begin, end)
        except Exception as caught:
            error = caught
        everyone = together.settle(error, f"{self._catalogue.where} was not loaded", mine)
        parts: dict[str, list[tuple[int, int, int]]] = {}
        for theirs in everyone:
            for key, part in theirs.items():
                parts.setdefault(key, []).append(part)
        for key, each in parts.items():
            entry = self._catalogue.entries[key]
            each.sort()
            if joined((checksum, end - begin) for begin, end, checksum in each) != entry.crc32:
                files = ", ".join(dict.fromkeys(piece.file for piece in entry.pieces))
                raise ValueError(
                    f"{self._catalogue.where}/{files} is damaged: {key!r} does not have the bytes that were saved; "
                    "load an earlier checkpoint"
                )

    def _ranges(self, together: Together) -> Iterator[tuple[str, int, int]]:
        """This rank's part in the checking: (key, begin, end) so that ranks cover each tensor once."""
        for number, (key, tensor) in enumerate([*self._targets, *(t for plan in self._plans for t in plan.templates)]):
            full = self._catalogue.entries[key].nbytes
            if isinstance(tensor, DTensor):
                if pieces.is_writer(tensor, number):
                    begin, end = pieces.bytes_here(tensor, full)
                    if end > begin:
                        yield key, begin, end
            elif together.rank == number % together.world:
                yield key, 0, full
        manifest = self._catalogue.manifest
        for number, key in enumerate(sorted(set(self._entry_keys()))):
            if manifest is not None and together.rank == number % together.world:
                yield key, 0, manifest.tensors[key].nbytes

    def _entry_keys(self) -> list[str]:
        manifest = self._catalogue.manifest
        if manifest is None:
            return []
        values: list[Any] = [*manifest.more.values()]
        for prefix in self._models:
            values += manifest.models.get(prefix, {}).get("extra", {}).values()
        keys = [key for value in values for key in state.references(value)]
        keys += [key for plan in self._plans for key in plan.settings_keys()]
        return [*keys, "rng"] if self._rng and manifest.rng else keys

    # And then

    def begin(self) -> Found:
        """Load what runs the user's code: if that raises, on any rank, models and optimizers are as they were."""
        manifest = self._catalogue.manifest
        found = Found({key: self._value(value) for key, value in (manifest.more if manifest else {}).items()})
        for key, value in self._more.items():
            if key in found:
                value.load_state_dict(found.pop(key))
        for prefix, module in self._models.items():
            self._load_extra(prefix, module)
        return self._misfits.into(found)

    def apply(self, together: Together) -> None:
        """Change the models and optimizers."""
        manifest, catalogue = self._catalogue.manifest, self._catalogue
        key_of = {id(tensor): key for key, tensor in self._targets}
        filled: set[int] = set()
        for module in self._models.values():
            filled |= materialise(module, catalogue, key_of)
        for key, tensor in self._targets:
            if id(tensor) not in filled:
                fill(catalogue, key, tensor)
        for plan in self._plans:
            plan.apply()
        if self._rng and manifest is not None and together.rank < len(manifest.rng):
            table = manifest.rng[together.rank]
            length = sum(size for _, size in table)
            row = torch.empty(length, dtype=torch.uint8)
            catalogue.read_into("rng", together.rank * length, row)
            randomness.restore(table, bytes(row.numpy()))

    def _value(self, value: Any) -> Any:
        return state.join(value, {key: self._catalogue.whole(key) for key in state.references(value)})

    def _load_extra(self, prefix: str, module: nn.Module) -> None:
        manifest = self._catalogue.manifest
        saved = {} if manifest is None else manifest.models.get(prefix, {}).get("extra", {})
        _, extra = state.model_tensors(module)
        for name in extra:
            if name in saved:
                owner = model_names.unwrap(module).get_submodule(name.rpartition(".")[0])
                owner.set_extra_state(self._value(saved[name]))
