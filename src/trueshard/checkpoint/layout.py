"""Which file of a checkpoint each tensor goes to, and under which key.

- The model part is a Hugging Face model directory: ``model.safetensors``, or numbered files and their index, with the
  model's own names, beside its ``config.json``. Several models have a folder each.
- A PEFT model is two things there: its base, under the names the base has without PEFT, and its adapters in
  ``adapter/`` as PEFT itself writes them.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard import _torch, names
from trueshard.checkpoint import tensorfile
from trueshard.checkpoint.manifest import Entry, Piece

LARGEST = 5_000_000_000
"""bytes of a file's tensors, if one tensor alone is not more"""


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs."""

    folder: str
    """"" or "name/"."""
    stem: str
    """Of the file: "model", "adapter_model", "optimizer", "extra"."""
    key: str
    """In the file."""


def places_of(models: Mapping[str, nn.Module], entries: Mapping[str, Entry]) -> dict[str, Place]:
    """For each key of ``entries`` its place."""
    found: dict[str, Place] = {}
    for prefix, module in models.items():
        folder = f"{prefix.partition('/')[2]}/" if "/" in prefix else ""
        own = {key.removeprefix(f"{prefix}/"): key for key in entries if key.startswith(f"{prefix}/")}
        adapted = adapted_places(module, folder) or {}
        for name, key in own.items():
            found[key] = adapted.get(name, Place(folder, "model", name))
    for key in entries:
        if key not in found:
            kind, _, rest = key.partition("/")
            found[key] = Place("", kind, rest) if kind == "optimizer" else Place("", "extra", key)
    return found


def adapted_places(module: nn.Module, folder: str) -> dict[str, Place] | None:
    """The places of a PEFT model's tensors, by name; None if it is none, or has names that cannot be told apart."""
    peft: Any = names.unwrap(module)
    if not hasattr(peft, "peft_config") or not hasattr(peft, "get_base_model"):
        return None
    from peft.utils import get_peft_model_state_dict

    tensors = dict(peft.state_dict(keep_vars=True))
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    found: dict[str, Place] = {}
    for adapter in peft.peft_config:
        own = get_peft_model_state_dict(
            peft, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=False
        )
        for key, tensor in own.items():
            name = name_of.get(id(tensor))
            if key == "prompt_embeddings" and name is None:  # a copy of this one, unless it is computed
                name = f"prompt_encoder.{adapter}.embedding.weight"
                if name not in tensors or peft.peft_config[adapter].peft_type != "PROMPT_TUNING":
                    continue
            if name is not None:
                found[name] = Place(f"{folder}{adapter_folder(peft, adapter)}", "adapter_model", key)
    prompted = any(config.is_prompt_learning for config in peft.peft_config.values())
    for name in tensors:
        if name not in found:
            base = name.removeprefix("base_model." if prompted else "base_model.model.")
            base = base.replace(".base_layer.", ".").replace(".original_module.", ".")
            found[name] = Place(folder, "model", base)
    distinct = {(place.folder, place.stem, place.key) for place in found.values()}
    return found if len(distinct) == len(found) else None


def adapter_folder(module: Any, adapter: str) -> str:
    """The folder of one adapter of a PEFT model."""
    return "adapter/" if len(module.peft_config) == 1 else f"adapters/{adapter}/"


def files_of(entries: Mapping[str, Entry], places: Mapping[str, Place], *, marked: bool) -> dict[str, bytes]:
    """The header of each tensor file; ``entries`` are told their piece. And the indices, whole."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key in entries:
        groups.setdefault((places[key].folder, places[key].stem), []).append(key)
    found: dict[str, bytes] = {}
    for (folder, stem), keys in groups.items():
        parts = _divided(keys, entries)
        weight_map = {}
        for number, part in enumerate(parts, start=1):
            numbered = f"{stem}-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else stem
            file = f"{folder}{numbered}.safetensors"
            header, slots = tensorfile.layout(
                ((places[key].key, entries[key].dtype, tuple(entries[key].shape)) for key in part), marked=marked
            )
            found[file] = header
            for key in part:
                slot = slots[places[key].key]
                entries[key].pieces = [Piece(file, slot.begin, slot.end)]
                weight_map[places[key].key] = f"{numbered}.safetensors"
        if len(parts) > 1:
            total = sum(entries[key].nbytes for key in keys)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            found[f"{folder}{stem}.safetensors.index.json"] = json.dumps(index, indent=1).encode()
    return found


def _divided(keys: list[str], entries: Mapping[str, Entry]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for key in keys:
        if parts[-1] and size + entries[key].nbytes > LARGEST:
            parts.append([])
            size = 0
        parts[-1].append(key)
        size += entries[key].nbytes
    return parts


def companions(models: Mapping[str, nn.Module], tokenizer: Any) -> Callable[[], dict[str, bytes]]:
    """What writes the other files of a Hugging Face directory, by name: configurations, as they are now, and what a
    tokenizer saves. It takes a while, so it is for whoever has the time.
    """
    parts = [(prefix.partition("/")[2], _configurations(names.unwrap(module))) for prefix, module in models.items()]

    def write() -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as scratch:
            for folder, configurations in parts:
                for below, save in configurations:
                    Path(scratch, folder, below).mkdir(parents=True, exist_ok=True)
                    save(str(Path(scratch, folder, below)))
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(Path(scratch, folder)))
            files = [path for path in sorted(Path(scratch).rglob("*")) if path.is_file()]
            return {path.relative_to(scratch).as_posix(): path.read_bytes() for path in files}

    return write


def _configurations(module: Any) -> list[tuple[str, Callable[[str], Any]]]:
    """What saves copies of a model's configurations, of transformers or PEFT, each with the folder it belongs to."""
    found: list[tuple[str, Callable[[str], Any]]] = []
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        base = module.get_base_model()
        for adapter, own in module.peft_config.items():
            copied = copy.deepcopy(own)
            copied.inference_mode = True  # as PEFT itself saves it, with this and what comes next
            kind = _torch.own_class(base)
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
            save = functools.partial(copied.save_pretrained, auto_mapping_dict=None if copied.task_type else mapping)
            found.append((adapter_folder(module, adapter), save))
        module = base
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return found
    copied = copy.deepcopy(config)
    copied.architectures = [_torch.own_class(module).__name__]
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) == 1 and hasattr(copied, "dtype"):
        copied.dtype = dtypes.pop()
    found.append(("", copied.save_pretrained))
    generation = getattr(module, "generation_config", None)
    if generation is not None and getattr(module, "can_generate", bool)():
        found.append(("", copy.deepcopy(generation).save_pretrained))
    return found


def entry_of(tensor: torch.Tensor, tensor_names: list[str], trainable: bool | None = None) -> Entry:
    """The entry of a tensor that has no place yet."""
    return Entry(tensor_names, list(tensor.shape), tensorfile.dtype_name(tensor.dtype), trainable)
