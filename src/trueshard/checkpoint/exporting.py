"""``export``: write a checkpoint in another form.

- ``hf``: the model as a Hugging Face directory, with its configuration and tokenizer files.
- ``safetensors``: the model as one file, under its own names.
- ``adapter``, ``merged``: of a PEFT model, the adapters alone, or merged into the base, by PEFT itself.
- ``dcp``: a directory of torch.distributed.checkpoint, with the names that torch's ``get_model_state_dict`` gives.

Tensors are copied from file to file in blocks, and their checksums compared on the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trueshard.checkpoint import layout, tensorfile
from trueshard.checkpoint.catalogue import Catalogue, LocalDirectory, is_url, open_catalogue, resolve_latest
from trueshard.checkpoint.ranks import as_bytes
from trueshard.checkpoint.tensorfile import TensorEntry
from trueshard.checkpoint.writing import move_into_place

KINDS = ("hf", "safetensors", "adapter", "merged", "dcp")
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of a Hugging Face directory's files other than weights."""


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str = "hf",
    dtype: torch.dtype | str | None = None,
    *,
    model: str | None = None,
    adapter: str | None = None,
) -> Path:
    """Write a checkpoint in another form, in one process; nothing is changed at ``path``.

    Args:
        path: a checkpoint, or a Hugging Face directory or .safetensors file, which has no optimizer and no adapters.
        out: the directory (for "safetensors", the file) to make; it must not exist, and appears when it is complete.
        to: "hf", "safetensors", "adapter", "merged" or "dcp". Only "dcp" includes optimizers; none includes ``save``'s
            ``more`` or random generators.
        dtype: convert floating-point tensors to it, such as ``torch.bfloat16`` or "bfloat16"; None: keep theirs.
        model: the key of the one to export, if the checkpoint has several.
        adapter: the one to merge, if the PEFT model has several.

    Returns:
        ``out``.

    Raises:
        FileExistsError: something is at ``out`` already.
        FileNotFoundError: no checkpoint is at ``path``.
        ValueError: it does not have what is asked for, or is damaged; the message names file and tensor.
    """
    if to not in KINDS:
        raise ValueError(f"to={to!r}: it is one of {', '.join(KINDS)}")
    if is_url(out):
        raise ValueError(f"{out}: export writes to local directories; export to one, and copy it")
    source = _source(resolve_latest(path), model)
    wanted = dtype if isinstance(dtype, torch.dtype) else tensorfile.find_dtype(dtype)
    if dtype is not None and not (wanted is not None and wanted.is_floating_point):
        raise ValueError(f"dtype={dtype!r}: it is a floating-point dtype, such as bfloat16, float16 or float32")
    if to in ("adapter", "merged") and not source.adapters:
        raise ValueError(f'{path} has no adapter, so to={to!r} has nothing to write; to="hf" writes the model')
    if to == "hf" and source.adapters:
        raise ValueError(
            f'{path} is of a PEFT model, whose base alone is not what was trained: to="merged" writes both as one '
            'model, to="adapter" the adapter alone'
        )
    with _appearing(Path(os.path.abspath(out)), str(out)) as partial:
        _write(source, partial, to, wanted, adapter)
    return Path(out)


def _write(source: ExportSource, path: Path, to: str, dtype: torch.dtype | None, adapter: str | None) -> None:
    if to == "hf":
        _write_hf(source, path, dtype)
    elif to == "safetensors":
        entries = source.converted(dtype)
        source.write(path, entries, {key: source.name(key) for key in entries})
    elif to == "dcp":
        from trueshard.checkpoint.dcp import write_dcp

        write_dcp(source, path, dtype)
    else:
        from trueshard.checkpoint import adapters

        write = adapters.write_adapters if to == "adapter" else adapters.write_merged
        write(source, path, dtype, adapter)


@contextlib.contextmanager
def _appearing(final: Path, shown: str) -> Iterator[Path]:
    """Yield a temporary path beside ``final``; rename it to ``final`` at the end, or remove it on an error."""
    if os.path.lexists(final):
        raise FileExistsError(f"{shown} exists already; export to another name, or remove it first")
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.exporting-{secrets.token_hex(4)}")
    try:
        yield partial
        move_into_place(partial, final, shown)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # of a single file
            partial.unlink()
        raise


@dataclass
class ExportSource:
    """The model that is exported."""

    catalogue: Catalogue
    prefix: str  # of its keys: "model/" or "model/<key>/"; "" in other programs' files
    folder: str  # of its files in the checkpoint: "" or "<key>/"
    alone: bool = False  # true for a single file, which has no companions

    @property
    def keys(self) -> list[str]:
        """Keys of its tensors."""
        return [key for key in self.catalogue.entries if key.startswith(self.prefix)]

    def name(self, key: str) -> str:
        """Return the model's name of a tensor."""
        return key.removeprefix(self.prefix)

    @property
    def adapters(self) -> dict[str, str]:
        """Name of each PEFT adapter ("adapter", if there is one) → its folder."""
        manifest = self.catalogue.manifest
        files = () if manifest is None else manifest.files
        start, end = f"{self.folder}adapter", "/adapter_config.json"
        folders = [file.removesuffix(end) for file in files if file.startswith(start) and file.endswith(end)]
        return {folder.rpartition("/")[2]: folder for folder in folders}

    def companions(self) -> dict[str, bytes]:
        """Return configurations and tokenizer files: name in the model's directory → content."""
        directory, manifest = self.catalogue.directory, self.catalogue.manifest
        if manifest is not None:
            names = [name for name, record in manifest.files.items() if record.header is None]
        elif self.alone or not isinstance(directory, LocalDirectory):
            names = []
        else:
            paths = sorted(directory.directory.iterdir())
            names = [path.name for path in paths if path.suffix in _COMPANIONS and path.is_file()]
        found = {}
        for name in names:
            own = name.removeprefix(self.folder)
            if name.startswith(self.folder) and not own.endswith(".index.json") and not own.startswith("adapter"):
                found[own] = bytes(directory.read(name))
                if manifest is not None and tensorfile.crc32(memoryview(found[own])) != manifest.files[name].crc32:
                    raise ValueError(f"{directory.where}/{name} is damaged; export an earlier checkpoint")
        return found

    def converted(self, dtype: torch.dtype | None) -> dict[str, TensorEntry]:
        """Return the entries to write, by key, with floating-point tensors in ``dtype`` unless None."""
        found = {}
        for key in self.keys:
            entry = self.catalogue.entries[key]
            found[key] = TensorEntry(entry.names, entry.shape, entry.dtype)
            if dtype is not None and tensorfile.dtype_of(entry.dtype).is_floating_point:
                found[key].dtype = tensorfile.dtype_name(dtype)
        return found

    def write(self, path: Path, entries: Mapping[str, TensorEntry], name_of: Mapping[str, str]) -> None:
        """Write one file, block by block; ``name_of``: key of each of ``entries`` → its key in the file."""
        header, ranges = tensorfile.make_header({name_of[key]: entry for key, entry in entries.items()}, marked=False)
        with open(path, "wb") as file:
            file.write(header)
            for key in sorted(entries, key=lambda key: ranges[name_of[key]]):
                self.check(key)
                stored = self.catalogue.entries[key]
                count, most = stored.nbytes // stored.itemsize, tensorfile.BLOCK // stored.itemsize
                for at in range(0, count, most):
                    block = torch.empty(min(most, count - at), dtype=tensorfile.dtype_of(entries[key].dtype))
                    self.catalogue.read_into(key, at * stored.itemsize, block)
                    file.write(as_bytes(block))

    def check(self, key: str) -> None:
        """Raise ``ValueError`` if a tensor is damaged."""
        if not self.catalogue.is_intact(key):
            raise self.catalogue.damaged(key, "export an earlier checkpoint")


def _source(path: Any, model: str | None) -> ExportSource:
    """Open the model at ``path``; ``model``: the key of one of several."""
    catalogue = open_catalogue(path)
    catalogue.refuse_dcp()
    prefixes = ["model"] if catalogue.manifest is None else sorted(catalogue.manifest.models)
    if not prefixes:
        raise ValueError(f"{path} was saved without a model; there is nothing to export")
    if prefixes == ["model"] and model is not None:
        raise ValueError(f"model={model!r}: {path} has one model; leave model out")
    if catalogue.manifest is None:
        return ExportSource(catalogue, "", "", alone=not is_url(path) and Path(path).is_file())
    if prefixes == ["model"]:
        return ExportSource(catalogue, "model/", "")
    if model is None or f"model/{model}" not in prefixes:
        held = ", ".join(prefix.removeprefix("model/") for prefix in prefixes)
        raise ValueError(f"{path} has several models, {held}; say model= which (it is {model!r})")
    return ExportSource(catalogue, f"model/{model}/", f"{model}/")


def _write_hf(source: ExportSource, directory: Path, dtype: torch.dtype | None) -> None:
    directory.mkdir()
    entries = source.converted(dtype)
    stem = "adapter_model" if source.catalogue.adapter else "model"
    keys = {key: layout.FileKey("", stem, source.name(key)) for key in entries}
    for name, data in layout.lay_out(entries, keys, marked=False).items():
        if held := {key: entry for key, entry in entries.items() if entry.files == [name]}:
            source.write(directory / name, held, {key: source.name(key) for key in held})
        else:  # the index
            (directory / name).write_bytes(data)
    for name, data in source.companions().items():
        if name == "config.json" and dtype is not None:
            data = json.dumps(_with_dtype(json.loads(data), tensorfile.dtype_name(dtype)), indent=2).encode()
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def _with_dtype(config: Any, dtype: str) -> Any:
    """Replace the dtypes in a model's configuration and in those of its parts."""
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else _with_dtype(value, dtype)
        for key, value in config.items()
    }
