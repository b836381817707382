"""The model that an export reads, and the files it writes, block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trueshard.checkpoint import tensorfile
from trueshard.checkpoint.catalogue import Catalogue, open_catalogue
from trueshard.checkpoint.checksum import BLOCK, crc32
from trueshard.checkpoint.manifest import Entry
from trueshard.checkpoint.pieces import as_bytes
from trueshard.checkpoint.store import LocalStore, is_url

_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""What else than weights is in a Hugging Face directory."""


@dataclass
class Source:
    """The model that is exported."""

    catalogue: Catalogue
    prefix: str
    """Of its keys: "model/", "model/<key>/", or nothing in another's files."""
    folder: str
    """Where its files are in the checkpoint: "" or "<key>/"."""
    alone: bool = False
    """Whether it is one file, to which what lies beside it does not belong."""

    @property
    def keys(self) -> list[str]:
        """Of its tensors."""
        return [key for key in self.catalogue.entries if key.startswith(self.prefix)]

    def name(self, key: str) -> str:
        """What the model calls a tensor."""
        return key.removeprefix(self.prefix)

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of PEFT adapters, by what they are called; of one alone, "adapter"."""
        manifest = self.catalogue.manifest
        names = () if manifest is None else manifest.files
        found = {}
        for name in names:
            if name.startswith(f"{self.folder}adapter") and name.endswith("/adapter_config.json"):
                folder = name.rpartition("/")[0]
                found[folder.rpartition("/")[2]] = folder
        return found

    def companions(self) -> dict[str, bytes]:
        """Configurations and tokenizer files, by name in the model's directory."""
        store, manifest = self.catalogue.store, self.catalogue.manifest
        found = {}
        if manifest is None:
            listed = [] if self.alone or not isinstance(store, LocalStore) else sorted(store.directory.iterdir())
            names = [path.name for path in listed if path.suffix in _BESIDE and path.is_file()]
        else:
            names = [name for name, record in manifest.files.items() if record.header is None]
        for name in names:
            own = name.removeprefix(self.folder)
            if not name.startswith(self.folder) or own.endswith(".index.json") or own.startswith("adapter"):
                continue
            found[own] = bytes(store.read(name))
            if manifest is not None and crc32(memoryview(found[own])) != manifest.files[name].crc32:
                raise ValueError(f"{store.where}/{name} is damaged; export an earlier checkpoint")
        return found


def source_of(path: Any, model: str | None) -> Source:
    """The model at ``path``; ``model``: which, of several.

    Raises:
        ValueError: it has none, or it is not said which.
    """
    catalogue = open_catalogue(path)
    if catalogue.dcp:
        raise ValueError(
            f"{path} is a directory of torch.distributed.checkpoint; load it into its model with "
            "trueshard.load(…, allow_pickle=True), save that, and export what was saved"
        )
    if catalogue.manifest is None:
        if model is not None:
            raise ValueError(f"model={model!r}: {path} has one model; leave model out")
        return Source(catalogue, "", "", alone=not is_url(path) and Path(path).is_file())
    held = sorted({prefix.partition("/")[2] for prefix in catalogue.manifest.models})
    if not held:
        raise ValueError(f"{path} was saved without a model; there is nothing to export")
    if held == [""]:
        if model is not None:
            raise ValueError(f"model={model!r}: {path} has one model; leave model out")
        return Source(catalogue, "model/", "")
    if model not in held:
        raise ValueError(f"{path} has several models, {', '.join(held)}; say model= which (it is {model!r})")
    return Source(catalogue, f"model/{model}/", f"{model}/")


def converted(source: Source, dtype: torch.dtype | None) -> dict[str, Entry]:
    """The entries of what is written, by the source's keys."""
    found = {}
    for key in source.keys:
        entry = source.catalogue.entries[key]
        known = entry.dtype
        if dtype is not None and getattr(torch, entry.dtype).is_floating_point:
            known = tensorfile.dtype_name(dtype)
        found[key] = Entry(entry.names, entry.shape, known)
    return found


def write_file(
    path: Path, header: bytes, begins: Mapping[str, int], catalogue: Catalogue, entries: Mapping[str, Entry]
) -> None:
    """A file that begins with ``header``, and holds tensors (key → first byte) one after the other."""
    with open(path, "wb") as file:
        file.write(header)
        for key in sorted(begins, key=lambda key: (begins[key], entries[key].nbytes)):
            check_bytes(catalogue, key)
            assert file.tell() == begins[key]
            for block in _blocks(catalogue, key, getattr(torch, entries[key].dtype)):
                file.write(block)
        file.flush()
        os.fsync(file.fileno())


def check_bytes(catalogue: Catalogue, key: str) -> None:
    """Raise ``ValueError`` if a tensor does not have the bytes that were saved, where that is known."""
    entry = catalogue.entries[key]
    if entry.crc32 is not None and catalogue.checksum(key, 0, entry.nbytes) != entry.crc32:
        files = ", ".join(dict.fromkeys(piece.file for piece in entry.pieces))
        raise ValueError(
            f"{catalogue.where}/{files} is damaged: {key!r} does not have the bytes that were saved; export an earlier "
            "checkpoint"
        )


def _blocks(catalogue: Catalogue, key: str, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of a tensor in ``dtype``, a few at a time."""
    entry = catalogue.entries[key]
    width = tensorfile.size_of(entry.dtype)
    count, most = entry.nbytes // width, BLOCK // width
    for at in range(0, count, most):
        block = torch.empty(min(most, count - at), dtype=dtype)
        catalogue.read_into(key, at * width, block)
        yield as_bytes(block)
