"""Exports of PEFT models: the adapters alone, or merged into their base. PEFT itself does both.

The model is built again from its configurations, without memory, and gets its tensors from the checkpoint in the dtypes
they have there, as views of its files: what PEFT does not look at is not read.
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
from typing import Any

import torch
from torch import nn

from trueshard import names
from trueshard.checkpoint import state, tensorfile
from trueshard.checkpoint.filling import fill
from trueshard.checkpoint.header import read_header
from trueshard.checkpoint.materialise import materialise, uncomputable
from trueshard.checkpoint.source import Source, check_bytes, converted, write_file

_ADAPTER_IN_NAME = re.compile(
    r"\.(?:lora_\w+|modules_to_save|ia3_l|hada_\w+|lokr_\w+|vera_\w+|oft_\w+|boft_\w+)\.(\w+)"
)


class OtherModel(ValueError):
    """The model that a configuration describes is not the one that was saved."""


def write_adapters(source: Source, directory: Path, dtype: torch.dtype | None, adapter: str | None) -> None:
    """What ``PeftModel.save_pretrained`` writes: one adapter at the top, several in a folder each but "default".

    Args:
        source: of a PEFT model.
        directory: to be made.
        dtype: of floating-point tensors; None: kept.
        adapter: one of several; None: all.
    """
    if adapter is not None and adapter not in source.adapters and len(source.adapters) > 1:
        raise ValueError(f"adapter={adapter!r}: {source.catalogue.where} has {', '.join(source.adapters)}")
    if _model_class(source) is None:
        _copy_adapters(source, directory, dtype, adapter)
        return
    try:
        model = rebuilt(source, lambda name: _ADAPTER_IN_NAME.search(name) is not None)
    except OtherModel:  # a base whose layers were replaced, as by quantized ones: the adapter is what it is
        _copy_adapters(source, directory, dtype, adapter)
        return
    if dtype is not None:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and _ADAPTER_IN_NAME.search(name):
                parameter.data = parameter.data.to(dtype)
    for config in model.peft_config.values():
        if not os.path.isfile(os.path.join(config.base_model_name_or_path or "", "config.json")):
            config.base_model_name_or_path = None  # so that PEFT asks no server how large its vocabulary is
    model.save_pretrained(str(directory), selected_adapters=None if adapter is None else [_name_in(model, adapter)])
    for name, folder in source.adapters.items():
        place = directory if len(source.adapters) == 1 or name == "default" else directory / name
        if place.is_dir():
            (place / "adapter_config.json").write_bytes(_read(source, f"{folder}/adapter_config.json"))


def _name_in(model: Any, adapter: str) -> str:
    return adapter if adapter in model.peft_config else next(iter(model.peft_config))


def _copy_adapters(source: Source, directory: Path, dtype: torch.dtype | None, adapter: str | None) -> None:
    """The adapter's folders as they are in the checkpoint: of a model that only its own program can build."""
    for name, folder in source.adapters.items():
        if adapter not in (None, name) and len(source.adapters) > 1:
            continue
        place = directory if len(source.adapters) == 1 or name == "default" else directory / name
        place.mkdir(parents=True)
        file = f"{folder}/adapter_model.safetensors"
        if not source.catalogue.store.exists(file):
            raise ValueError(
                f"{source.catalogue.where} is in the layout of a remote store, and of a model that is none of "
                "transformers; load it into the model, and use PEFT's save_pretrained"
            )
        key_at = {(slot.begin, slot.end): key for key, slot in read_header(source.catalogue.store, file).items()}
        entries = converted(source, dtype)
        own = {key: source.catalogue.entries[key].pieces[0] for key in entries}
        inside = {key: key_at[piece.begin, piece.end] for key, piece in own.items() if piece.file == file}
        header, slots = tensorfile.layout(
            ((inside[key], entries[key].dtype, tuple(entries[key].shape)) for key in inside), marked=False
        )
        begins = {key: slots[name].begin for key, name in inside.items()}
        write_file(place / "adapter_model.safetensors", header, begins, source.catalogue, entries)
        (place / "adapter_config.json").write_bytes(_read(source, f"{folder}/adapter_config.json"))


def write_merged(source: Source, directory: Path, dtype: torch.dtype | None, adapter: str | None) -> None:
    """A Hugging Face directory of the base with an adapter merged into it.

    Args:
        source: of a PEFT model.
        directory: to be made.
        dtype: of floating-point tensors; None: kept.
        adapter: which of several.

    Raises:
        ValueError: the model cannot be built from its configuration, or which adapter is meant cannot be told.
    """
    if len(source.adapters) > 1 and adapter not in source.adapters:
        raise ValueError(
            f"{source.catalogue.where} has the adapters {', '.join(source.adapters)}; say adapter= which is merged "
            f"(it is {adapter!r})"
        )
    if _model_class(source) is None:
        raise ValueError(
            f"{source.catalogue.where} has no config.json that names a class of transformers, so the model cannot be "
            "built here; load the checkpoint into it, and call PEFT's merge_and_unload()"
        )
    if packed := next((source.name(key) for key in source.keys if source.name(key).endswith(".packed")), None):
        raise ValueError(
            f"{source.catalogue.where}: its base is quantized ({packed}), and merging would round the adapter away; "
            'to="adapter" writes the adapter alone'
        )
    model = rebuilt(source, lambda name: True)
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


def _read(source: Source, name: str) -> bytes:
    return bytes(source.catalogue.store.read(name))


def _model_class(source: Source) -> Any:
    """The class of transformers that the configuration names, or None."""
    config = source.companions().get("config.json")
    if config is None:
        return None
    import transformers

    named = (json.loads(config).get("architectures") or [""])[0]
    return getattr(transformers, str(named), None)


def rebuilt(source: Source, checked: Callable[[str], bool]) -> Any:
    """The PEFT model, with its tensors.

    Args:
        source: where they are.
        checked: whether the checksum of a tensor is compared, by its name.

    Raises:
        OtherModel: what its configurations say is not what was saved; the message names a tensor.
    """
    import peft
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Path(scratch, "config.json").write_bytes(source.companions()["config.json"])
        config = AutoConfig.from_pretrained(scratch)
        with torch.device("meta"), torch.no_grad():
            model: Any = _model_class(source)(config)
            adapters = list(source.adapters)
            for place, (name, folder) in enumerate(source.adapters.items()):
                Path(scratch, "adapter_config.json").write_bytes(_read(source, f"{folder}/adapter_config.json"))
                settings = copy.deepcopy(peft.PeftConfig.from_pretrained(scratch))
                if hasattr(settings, "init_lora_weights"):
                    settings.init_lora_weights = False  # the base has been changed already, if this changes it
                model.name_or_path = settings.base_model_name_or_path
                called = name if len(adapters) > 1 else _called(source)
                if place:
                    model.add_adapter(called, settings)
                else:
                    model = peft.get_peft_model(model, settings, called, autocast_adapter_dtype=False)
        _let_go(model)
    _fill(model, source, checked)
    return model.eval()


def _called(source: Source) -> str:
    """What the only adapter is called in the model's names."""
    found = {match[1] for key in source.keys if (match := _ADAPTER_IN_NAME.search(source.name(key)))}
    return "default" if not found or "default" in found else sorted(found)[0]


def _let_go(model: nn.Module) -> None:
    """Make each parameter a new object, as PEFT keeps some that it ties by their memory; ties of objects stay."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for attribute, old in module._parameters.items():
            if old is not None:
                new = nn.Parameter(torch.empty_like(old), requires_grad=False)
                module._parameters[attribute] = made.setdefault(id(old), (old, new))[1]


def _fill(model: Any, source: Source, checked: Callable[[str], bool]) -> None:
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
        each.tensor.data = each.tensor.data.to(getattr(torch, catalogue.entries[key].dtype))
        targets[id(each.tensor)] = key
    if left := uncomputable(model, set(targets)):
        raise ValueError(f"{catalogue.where}: nothing computes {left[0]!r}, which no checkpoint has")
    with torch.no_grad():
        filled = materialise(model, catalogue, targets)
        for each in held.values():
            if id(each.tensor) not in filled:
                fill(catalogue, targets[id(each.tensor)], each.tensor)
    for key in filter(checked, targets.values()):
        check_bytes(catalogue, key)
