"""``export``: write a checkpoint in another form.

- ``hf``: the model as a Hugging Face directory, with its configuration and tokenizer files.
- ``safetensors``: the model as one file, under its own names.
- ``adapter``, ``merged``: of a PEFT model, the adapters alone, or merged into the base, by PEFT itself.
- ``dcp``: a directory of torch.distributed.checkpoint, with the names that torch's ``get_model_state_dict`` gives.

Tensors are copied from file to file in blocks, and their checksums compared on the way.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from trueshard import _torch
from trueshard.checkpoint import layout, state
from trueshard.checkpoint.catalogue import Catalogue, LocalDirectory, is_url, open_catalogue, resolve_latest
from trueshard.checkpoint.format import (
    BLOCK,
    TensorEntry,
    crc32,
    dtype_name,
    dtype_of,
    floating_dtype,
    join,
    located,
    make_header,
    parse_json,
)
from trueshard.checkpoint.materialise import materialise, uncomputable
from trueshard.checkpoint.process_group import as_bytes
from trueshard.checkpoint.writing import move_into_place
from trueshard.errors import own_errors
from trueshard.model import names

Form = Literal["hf", "safetensors", "adapter", "merged", "dcp"]
KINDS = get_args(Form)
COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # suffixes of a model's files other than weights
ADAPTER_CONFIG = "adapter_config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of a model's configuration, and of those of its parts
_ADAPTER_IN_NAME = re.compile(
    r"\.(?:lora_\w+|modules_to_save|ia3_l|hada_\w+|lokr_\w+|vera_\w+|oft_\w+|boft_\w+)\.(\w+)"
)


@own_errors()
def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: Form = "hf",
    dtype: torch.dtype | str | None = None,
    *,
    model: str | None = None,
    adapter: str | None = None,
    average: bool = False,
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
        average: write the average of the weights that was saved with them, in their dtype, in place of them.

    Returns:
        ``out``.

    Raises:
        FileExistsError: something is at ``out`` already.
        FileNotFoundError: no checkpoint is at ``path``.
        ValueError: it does not have what ``to`` needs, or is damaged; the message names file and tensor.
    """
    if to not in KINDS:
        raise ValueError(f"to={to!r}: it is one of {', '.join(KINDS)}")
    if is_url(out):
        raise ValueError(f"{out}: export writes to local directories; export to one, and copy it")
    source = _source(resolve_latest(path), model)
    if average:
        source.take_averages()
    converted_to = floating_dtype(dtype)
    if to in ("adapter", "merged") and not source.adapters:
        raise ValueError(f'{path} has no adapter, so to={to!r} has nothing to write; to="hf" writes the model')
    if to == "hf" and source.adapters:
        raise ValueError(
            f'{path} is of a PEFT model, whose base alone is not what was trained: to="merged" writes both as one '
            'model, to="adapter" the adapter alone'
        )
    with _appearing(Path(os.path.abspath(out)), str(out)) as partial:
        if to == "hf":
            _write_hf(source, partial, converted_to)
        elif to == "safetensors":
            entries = source.converted(converted_to)
            source.write(partial, entries, {key: source.name(key) for key in entries})
        elif to == "dcp":
            _write_dcp(source, partial, converted_to)
        elif to == "adapter":
            _write_adapters(source, partial, converted_to, adapter)
        else:
            _write_merged(source, partial, converted_to, adapter)
    return Path(out)


@contextlib.contextmanager
def _appearing(final: Path, shown: str) -> Iterator[Path]:
    """Yield a temporary path beside ``final``; rename it to ``final`` at the end, or remove it on an error."""
    if os.path.lexists(final):
        raise FileExistsError(f"{shown} exists already; export to another name, or remove it first")
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.exporting-{secrets.token_hex(4)}")
    try:
        yield partial
        # safetensors makes its files readable by their owner alone; the umask says what is usual
        os.umask(mask := os.umask(0o077))
        for file in (path for path in [partial, *partial.rglob("*")] if path.is_file()):
            file.chmod(0o666 & ~mask)
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
    averages: dict[str, str] = field(default_factory=dict)  # key → that of its average, which is read in its place

    def take_averages(self) -> None:
        """Let the averages stand for the weights. Raises ValueError if there are none."""
        more = {} if self.catalogue.manifest is None else self.catalogue.manifest.more
        saved = {path[-1]: where for path, where in located(more.get("average", {}))}
        named = {key: next(filter(saved.__contains__, self.catalogue.entries[key].names), "") for key in self.keys}
        self.averages = {key: saved[name] for key, name in named.items() if name}
        if not self.averages:
            raise ValueError(f"{self.catalogue.where} has no average of the weights; a run keeps one with [average]")

    @property
    def keys(self) -> list[str]:
        return [key for key in self.catalogue.entries if key.startswith(self.prefix)]

    def name(self, key: str) -> str:
        return key.removeprefix(self.prefix)

    @property
    def adapters(self) -> dict[str, str]:
        """Name of each PEFT adapter ("default" for the one at the top) → its folder."""
        manifest = self.catalogue.manifest
        files = () if manifest is None else manifest.files
        configs = [file for file in files if file.startswith(self.folder) and file.endswith(ADAPTER_CONFIG)]
        folders = [file.removesuffix(ADAPTER_CONFIG) for file in configs]
        return {folder.removeprefix(self.folder).rstrip("/") or "default": folder for folder in folders}

    def adapter_config(self, adapter: str) -> bytes:
        return bytes(self.catalogue.directory.read(f"{self.adapters[adapter]}{ADAPTER_CONFIG}"))

    def companions(self) -> dict[str, bytes]:
        """Return configurations and tokenizer files: name in the model's directory → content."""
        directory, manifest = self.catalogue.directory, self.catalogue.manifest
        if manifest is not None:
            names = [name for name, record in manifest.files.items() if record.header is None]
        elif self.alone or not isinstance(directory, LocalDirectory):
            names = []
        else:
            paths = sorted(directory.directory.iterdir())
            names = [path.name for path in paths if path.suffix in COMPANIONS and path.is_file()]
        result = {}
        for name in names:
            inside = name.removeprefix(self.folder)
            if name.startswith(self.folder) and not inside.endswith((".index.json", ADAPTER_CONFIG)):
                data = bytes(directory.read(name))
                if manifest is not None and crc32(memoryview(data)) != manifest.files[name].crc32:
                    raise ValueError(f"{directory.where}/{name} is damaged; export an earlier checkpoint")
                result[inside.removeprefix(layout.BASE)] = data
        return result

    def write_companions(self, directory: Path, change: Callable[[str, bytes], bytes | None]) -> None:
        """Write configurations and tokenizer files as ``change`` (name, content) returns them; None leaves one out."""
        for name, data in self.companions().items():
            if (changed := change(name, data)) is not None:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(changed)

    def converted(self, dtype: torch.dtype | None) -> dict[str, TensorEntry]:
        """Return the entries to write, by key, with floating-point tensors in ``dtype`` unless None."""
        result = {}
        for key in self.keys:
            entry = self.catalogue.entries[key]
            changes = dtype is not None and dtype_of(entry.dtype).is_floating_point
            result[key] = replace(entry, dtype=dtype_name(dtype) if dtype and changes else entry.dtype, pieces=[])
        return result

    def write(self, path: Path, entries: Mapping[str, TensorEntry], name_of: Mapping[str, str]) -> None:
        """Write one file, block by block; ``name_of``: key of each of ``entries`` → its key in the file."""
        header, ranges = make_header({name_of[key]: entry for key, entry in entries.items()}, marked=False)
        with open(path, "wb") as file:
            file.write(header)
            for key in sorted(entries, key=lambda key: ranges[name_of[key]]):
                self.check(key)
                origin = self.averages.get(key, key)
                stored = self.catalogue.entries[origin]
                count, most = stored.nbytes // stored.itemsize, BLOCK // stored.itemsize
                for at in range(0, count, most):
                    block = torch.empty(min(most, count - at), dtype=dtype_of(entries[key].dtype))
                    self.catalogue.read_into(origin, at * stored.itemsize, block)
                    file.write(as_bytes(block))

    def check(self, key: str) -> None:
        origin = self.averages.get(key, key)
        if not self.catalogue.is_intact(origin):
            raise self.catalogue.damaged(origin, "export an earlier checkpoint")


def _source(path: Any, model: str | None) -> ExportSource:
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
    if any(layout.DIFFUSERS in file for key in entries for file in source.catalogue.entries[key].files):
        stem = layout.DIFFUSERS
    keys = {key: layout.FileKey("", stem, source.name(key)) for key in entries}
    for name, data in layout.lay_out(entries, keys, marked=False).items():
        if held := {key: entry for key, entry in entries.items() if entry.files == [name]}:
            source.write(directory / name, held, {key: source.name(key) for key in held})
        else:  # the index
            (directory / name).write_bytes(data)

    def in_dtype(table: dict[str, Any]) -> dict[str, Any]:
        return table | {key: dtype_name(dtype) for key in _DTYPE_KEYS if dtype and isinstance(table.get(key), str)}

    def changed(name: str, data: bytes) -> bytes:
        if converts := name == "config.json" and dtype is not None:
            parse_json(data, f"{source.catalogue.where}/{name}")
        return json.dumps(json.loads(data, object_hook=in_dtype), indent=2).encode() if converts else data

    source.write_companions(directory, changed)


def _write_dcp(source: ExportSource, directory: Path, dtype: torch.dtype | None) -> None:
    """Write the model as ``model.<name>`` and optimizers as ``optimizer.state.<name>.<key>``, as torch names them."""
    manifest, planner = source.catalogue.manifest, _FromFiles(source)
    content: dict[str, Any] = {"model": {}}
    for key, entry in source.converted(dtype).items():
        for name in entry.names if manifest is not None else [source.name(key)]:
            content["model"][name] = planner.stand_in(key, entry)
    for prefix, record in (manifest.optimizers if manifest is not None and not source.folder else {}).items():
        state = {name: value for name, value in record["state"].items() if not name.startswith("@")}
        groups = [{"params": group["params"], **planner.value(group["settings"])} for group in record["groups"]]
        saved = {"state": {name: planner.value(value) for name, value in state.items()}, "param_groups": groups}
        if "/" in prefix:
            content.setdefault("optimizer", {})[prefix.partition("/")[2]] = saved
        else:
            content["optimizer"] = saved
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no other process takes part
        try:
            # Nothing is copied ahead: a tensor's memory is freed when the next is read.
            writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
            dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)
        except dcp.CheckpointException as failed:  # a BaseException
            raise next(iter(failed.failures.values()))[0] from None


class _FromFiles(dcp.DefaultSavePlanner):
    """Reads a tensor when it is to be written, and frees it before the next, since torch's writer keeps them all."""

    def __init__(self, source: ExportSource) -> None:
        super().__init__()
        self._source = source
        self._key_of: dict[int, str] = {}
        """``id`` of a stand-in, which the content to save keeps alive → the key of its tensor."""
        self._before: torch.Tensor | None = None
        """The tensor that was written last."""

    def stand_in(self, key: str, entry: TensorEntry) -> torch.Tensor:
        """Return a meta tensor that is saved as the tensor of ``key`` in the dtype of ``entry``."""
        tensor = entry.empty("meta")
        self._key_of[id(tensor)] = key
        return tensor

    def value(self, saved: Any) -> Any:
        """Rebuild a value of the manifest, with stand-ins for its tensors."""
        return join(saved, lambda key: self.stand_in(key, self._source.catalogue.entries[key]))

    def lookup_object(self, index: Any) -> Any:
        saved = super().lookup_object(index)
        if (key := self._key_of.get(id(saved))) is None:
            return saved
        if self._before is not None:
            self._before.untyped_storage().resize_(0)
        self._source.check(key)
        self._before = self._source.catalogue.full_tensor(self._source.averages.get(key, key)).to(saved.dtype)
        return self._before


# PEFT models are built again from their configurations, on the meta device. Their tensors are maps of the checkpoint's
# files, so what PEFT does not use is not read.


class _OtherModel(ValueError):
    """The configuration describes another model than was saved."""


def _write_adapters(source: ExportSource, directory: Path, dtype: torch.dtype | None, adapter: str | None) -> None:
    """Write what ``PeftModel.save_pretrained`` does: one adapter at the top, several in a folder each but "default"."""
    alone = len(source.adapters) == 1
    chosen = [name for name in source.adapters if alone or adapter in (None, name)]
    if not chosen:
        raise ValueError(f"adapter={adapter!r}: {source.catalogue.where} has {', '.join(source.adapters)}")
    folders = {name: directory if alone or name == "default" else directory / name for name in chosen}
    try:
        model = _rebuilt(source, lambda name: _ADAPTER_IN_NAME.search(name) is not None)
    except _OtherModel:  # no class of transformers, or its layers were replaced, as by quantized ones
        _copy_adapters(source, folders, dtype)
    else:
        if dtype is not None:
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point() and _ADAPTER_IN_NAME.search(name):
                    parameter.data = parameter.data.to(dtype)
        for config in model.peft_config.values():
            if not os.path.isfile(os.path.join(config.base_model_name_or_path or "", "config.json")):
                config.base_model_name_or_path = None  # so that PEFT asks no server for its vocabulary's size
        selected = None if adapter is None else _named(model, adapter)
        model.save_pretrained(str(directory), selected_adapters=selected)
    for name, folder in folders.items():
        (folder / ADAPTER_CONFIG).write_bytes(source.adapter_config(name))


def _named(model: Any, adapter: str | None) -> list[str]:
    return [name for name in model.peft_config if name == adapter] or list(model.peft_config)[:1]


def _copy_adapters(source: ExportSource, folders: dict[str, Path], dtype: torch.dtype | None) -> None:
    """Copy the adapters' files from the checkpoint, for a model that only its own program can build."""
    catalogue = source.catalogue
    for name, folder in folders.items():
        file = f"{source.adapters[name]}adapter_model.safetensors"
        if not catalogue.directory.exists(file):
            raise ValueError(
                f"{catalogue.where} is in the layout of a remote store, and of a model that is none of "
                "transformers; load it into the model, and use PEFT's save_pretrained"
            )
        name_at = {tuple(entry.pieces): key for key, entry in catalogue.directory.tensors(file).items()}
        converted = source.converted(dtype)
        entries = {key: entry for key, entry in converted.items() if catalogue.entries[key].files[:1] == [file]}
        folder.mkdir(parents=True)
        name_of = {key: name_at[tuple(catalogue.entries[key].pieces)] for key in entries}
        source.write(folder / "adapter_model.safetensors", entries, name_of)


def _write_merged(source: ExportSource, directory: Path, dtype: torch.dtype | None, adapter: str | None) -> None:
    """Write a Hugging Face directory of the base with ``adapter``, one of several, or the only one merged into it."""
    where = source.catalogue.where
    if len(source.adapters) > 1 and adapter not in source.adapters:
        raise ValueError(
            f"{where} has the adapters {', '.join(source.adapters)}; say adapter= which is merged (it is {adapter!r})"
        )
    if packed := next((source.name(key) for key in source.keys if source.name(key).endswith(".packed")), None):
        raise ValueError(
            f"{where}: its base is quantized ({packed}), and merging would round the adapter away; "
            'to="adapter" writes the adapter alone'
        )
    model = _rebuilt(source, lambda name: True)
    chosen = _named(model, adapter)
    if not hasattr(model, "merge_and_unload") or not hasattr(model.base_model, "merge_and_unload"):
        kind = model.peft_config[chosen[0]].peft_type
        raise ValueError(f'PEFT cannot merge a {kind} adapter into its base; to="adapter" writes it alone')
    merged = model.merge_and_unload(safe_merge=True, adapter_names=chosen)
    if dtype is not None:
        merged = merged.to(dtype)
    merged.save_pretrained(str(directory))
    source.write_companions(directory, lambda name, data: None if name == "config.json" else data)


def _rebuilt(source: ExportSource, checked: Callable[[str], bool]) -> Any:
    """Build the PEFT model with its tensors; compare the checksums of those whose key is ``checked``."""
    described = source.companions().get("config.json", b"{}")
    named = (parse_json(described, f"{source.catalogue.where}/config.json").get("architectures") or [None])[0]
    transformers: Any = importlib.import_module("transformers")
    kind: Any = getattr(transformers, str(named), None) if named else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):  # nothing else is called
        raise _OtherModel(
            f"{source.catalogue.where} has no config.json that names a class of transformers, so the model cannot be "
            "built here; load the checkpoint into it, and use PEFT's own functions"
        )
    import peft
    from transformers import AutoConfig

    saved = {match[1] for key in source.keys if (match := _ADAPTER_IN_NAME.search(source.name(key)))}
    only = "default" if not saved or "default" in saved else min(saved)  # its name in the model's names of tensors
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Path(scratch, "config.json").write_bytes(described)
        config = AutoConfig.from_pretrained(scratch, trust_remote_code=False)
        with torch.device("meta"), torch.no_grad():
            model: Any = kind(config)
            for i, name in enumerate(source.adapters):
                Path(scratch, ADAPTER_CONFIG).write_bytes(source.adapter_config(name))
                settings = copy.deepcopy(peft.PeftConfig.from_pretrained(scratch))
                if hasattr(settings, "init_lora_weights"):
                    settings.init_lora_weights = False  # the base has been changed already, if this changes it
                model.name_or_path = settings.base_model_name_or_path
                called = name if len(source.adapters) > 1 else only
                if i:
                    model.add_adapter(called, settings)
                else:
                    model = peft.get_peft_model(model, settings, called, autocast_adapter_dtype=False)
        _renew_parameters(model)
    _fill(model, source, checked)
    return model.eval()


def _renew_parameters(model: nn.Module) -> None:
    """Replace each parameter by a new object, since PEFT keeps some that it ties by memory; ties of objects stay."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for attribute, old in _torch.own_parameters(module).items():
            if old is not None:
                new = nn.Parameter(torch.empty_like(old), requires_grad=False)
                _torch.own_parameters(module)[attribute] = made.setdefault(id(old), (old, new))[1]


def _fill(model: Any, source: ExportSource, checked: Callable[[str], bool]) -> None:
    catalogue = source.catalogue
    key_of = {name: key for key in source.keys for name in catalogue.entries[key].names}
    held, _ = state.model_tensors(model)
    targets: dict[int, str] = {}
    for name, part in held.items():
        key = next((key_of[alias] for alias in part.names if alias in key_of), None)
        if key is None or catalogue.entries[key].shape != list(part.tensor.shape):
            raise _OtherModel(
                f"{catalogue.where} has no {name!r} of shape {list(part.tensor.shape)}, which a model of its "
                f"configuration has.{names.nearest(name, key_of)} Load it into the model that was saved, and use "
                "PEFT's own functions"
            )
        part.tensor.data = part.tensor.data.to(dtype_of(catalogue.entries[key].dtype))
        targets[id(part.tensor)] = key
    if left := uncomputable(model, set(targets)):
        raise ValueError(f"{catalogue.where}: nothing computes {left[0]!r}, which no checkpoint has")
    with torch.no_grad():
        origins = {tensor: source.averages.get(key, key) for tensor, key in targets.items()}
        filled = materialise(model, origins, mapping=catalogue)
        for part in held.values():
            if id(part.tensor) not in filled:
                catalogue.fill(origins[id(part.tensor)], part.tensor)
    for key in filter(checked, targets.values()):
        source.check(key)
