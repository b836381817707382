"""Export PEFT models: the adapters alone, or merged into their base. PEFT itself does both.

The model is built again from its configurations, on the meta device. Its tensors are maps of the checkpoint's files, so
what PEFT does not use is not read.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.materialise import materialise, uncomputable
from trueshard.checkpoint.tensorfile import dtype_of
from trueshard.model import names

if TYPE_CHECKING:
    from trueshard.checkpoint.exporting import ExportSource

_ADAPTER_IN_NAME = re.compile(
    r"\.(?:lora_\w+|modules_to_save|ia3_l|hada_\w+|lokr_\w+|vera_\w+|oft_\w+|boft_\w+)\.(\w+)"
)


class OtherModel(ValueError):
    """The configuration describes another model than was saved."""


def write_adapters(source: ExportSource, directory: Path, dtype: torch.dtype | None, adapter: str | None) -> None:
    """Write what ``PeftModel.save_pretrained`` does: one adapter at the top, several in a folder each but "default"."""
    alone = len(source.adapters) == 1
    chosen = [name for name in source.adapters if alone or adapter in (None, name)]
    if not chosen:
        raise ValueError(f"adapter={adapter!r}: {source.catalogue.where} has {', '.join(source.adapters)}")
    folders = {name: directory if alone or name == "default" else directory / name for name in chosen}
    try:
        model = _rebuilt(source, lambda name: _ADAPTER_IN_NAME.search(name) is not None)
    except OtherModel:  # no class of transformers, or its layers were replaced, as by quantized ones
        _copy_adapters(source, folders, dtype)
    else:
        if dtype is not None:
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point() and _ADAPTER_IN_NAME.search(name):
                    parameter.data = parameter.data.to(dtype)
        for config in model.peft_config.values():
            if not os.path.isfile(os.path.join(config.base_model_name_or_path or "", "config.json")):
                config.base_model_name_or_path = None  # so that PEFT asks no server for its vocabulary's size
        model.save_pretrained(str(directory), selected_adapters=None if adapter is None else [_name_in(model, adapter)])
    for name, folder in folders.items():
        (folder / "adapter_config.json").write_bytes(_config(source, name))


def _name_in(model: Any, adapter: str) -> str:
    return adapter if adapter in model.peft_config else next(iter(model.peft_config))


def _config(source: ExportSource, adapter: str) -> bytes:
    return bytes(source.catalogue.directory.read(f"{source.adapters[adapter]}/adapter_config.json"))


def _copy_adapters(source: ExportSource, folders: dict[str, Path], dtype: torch.dtype | None) -> None:
    """Copy the adapters' files from the checkpoint, for a model that only its own program can build."""
    catalogue = source.catalogue
    for name, folder in folders.items():
        file = f"{source.adapters[name]}/adapter_model.safetensors"
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


def write_merged(source: ExportSource, directory: Path, dtype: torch.dtype | None, adapter: str | None) -> None:
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
    chosen = [_name_in(model, adapter)] if adapter is not None else list(model.peft_config)
    if not hasattr(model, "merge_and_unload") or not hasattr(model.base_model, "merge_and_unload"):
        kind = model.peft_config[chosen[0]].peft_type
        raise ValueError(f'PEFT cannot merge a {kind} adapter into its base; to="adapter" writes it alone')
    merged = model.merge_and_unload(safe_merge=True, adapter_names=chosen)
    if dtype is not None:
        merged = merged.to(dtype)
    merged.save_pretrained(str(directory))
    for name, data in source.companions().items():
        if name != "config.json":
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)


def _model_class(source: ExportSource) -> Any:
    """Return the class of transformers that the configuration names, or None."""
    import transformers

    config = json.loads(source.companions().get("config.json", b"{}"))
    return getattr(transformers, str((config.get("architectures") or [""])[0]), None)


def _rebuilt(source: ExportSource, checked: Callable[[str], bool]) -> Any:
    """Build the PEFT model with its tensors; compare the checksums of those whose key is ``checked``."""
    kind = _model_class(source)
    if kind is None:
        raise OtherModel(
            f"{source.catalogue.where} has no config.json that names a class of transformers, so the model cannot be "
            "built here; load the checkpoint into it, and use PEFT's own functions"
        )
    import peft
    from transformers import AutoConfig

    known = {match[1] for key in source.keys if (match := _ADAPTER_IN_NAME.search(source.name(key)))}
    only = "default" if not known or "default" in known else min(known)  # its name in the model's names of tensors
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Path(scratch, "config.json").write_bytes(source.companions()["config.json"])
        config = AutoConfig.from_pretrained(scratch)
        with torch.device("meta"), torch.no_grad():
            model: Any = kind(config)
            for i, name in enumerate(source.adapters):
                Path(scratch, "adapter_config.json").write_bytes(_config(source, name))
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
    for name, each in held.items():
        key = next((key_of[known] for known in each.names if known in key_of), None)
        if key is None or catalogue.entries[key].shape != list(each.tensor.shape):
            raise OtherModel(
                f"{catalogue.where} has no {name!r} of shape {list(each.tensor.shape)}, which a model of its "
                f"configuration has.{names.nearest(name, key_of)} Load it into the model that was saved, and use "
                "PEFT's own functions"
            )
        each.tensor.data = each.tensor.data.to(dtype_of(catalogue.entries[key].dtype))
        targets[id(each.tensor)] = key
    if left := uncomputable(model, set(targets)):
        raise ValueError(f"{catalogue.where}: nothing computes {left[0]!r}, which no checkpoint has")
    with torch.no_grad():
        filled = materialise(model, catalogue, targets)
        for each in held.values():
            if id(each.tensor) not in filled:
                catalogue.fill(targets[id(each.tensor)], each.tensor)
    for key in filter(checked, targets.values()):
        source.check(key)
