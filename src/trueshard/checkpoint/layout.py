"""Assign each tensor of a checkpoint its file and its key in it.

The model part is a Hugging Face model directory; several models have a folder each. Of a PEFT model it is what PEFT
writes and ``from_pretrained`` reads: the adapter, whose configuration names its base. The base is in ``base/``, under
the names that it has without PEFT.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trueshard import _torch
from trueshard.checkpoint.format import Piece, TensorEntry, make_header
from trueshard.model import names

BASE = "base/"  # folder of a PEFT model's base
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # initialisations of LoRA (how names begin) that change the base
LARGEST = 2_000_000_000  # bytes of tensors in one file, unless a single tensor has more


@dataclass(frozen=True)
class FileKey:
    folder: str  # "" or "name/"
    stem: str  # of the file's name: "model", "adapter_model", "optimizer" or "extra"
    key: str  # in the file


def file_keys(models: Mapping[str, nn.Module], entries: Mapping[str, TensorEntry]) -> dict[str, FileKey]:
    found: dict[str, FileKey] = {}
    for key in entries:
        kind, _, rest = key.partition("/")
        found[key] = FileKey("", kind, rest) if kind == "optimizer" else FileKey("", "extra", key)
    for prefix, module in models.items():
        folder = f"{prefix.partition('/')[2]}/" if "/" in prefix else ""
        adapted = adapted_keys(module, folder) or {}
        for key in entries:
            if key.startswith(f"{prefix}/"):
                name = key.removeprefix(f"{prefix}/")
                found[key] = adapted.get(name, FileKey(folder, "model", name))
    return found


def adapted_keys(module: nn.Module, folder: str) -> dict[str, FileKey] | None:
    """Return the file and key of each tensor of a PEFT model; None for another model, or if two would share a key."""
    peft: Any = names.unwrap(module)
    if not hasattr(peft, "peft_config") or not hasattr(peft, "get_base_model"):
        return None
    from peft.utils import get_peft_model_state_dict

    tensors = dict(peft.state_dict(keep_vars=True))
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    found: dict[str, FileKey] = {}
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
                found[name] = FileKey(f"{folder}{_adapter_folder(peft, adapter)}", "adapter_model", key)
    prompted = any(config.is_prompt_learning for config in peft.peft_config.values())
    for name in tensors:
        if name not in found:
            base = name.removeprefix("base_model." if prompted else "base_model.model.")
            base = base.replace(".base_layer.", ".").replace(".original_module.", ".")
            found[name] = FileKey(f"{folder}{BASE}", "model", base)
    return found if len(set(found.values())) == len(found) else None


def _adapter_folder(module: Any, adapter: str) -> str:
    return "" if len(module.peft_config) == 1 or adapter == "default" else f"{adapter}/"


def lay_out(
    entries: Mapping[str, TensorEntry], file_key_of: Mapping[str, FileKey], *, marked: bool
) -> dict[str, bytes]:
    """Assign each of ``entries`` its piece; return the header of each tensor file, and the index files."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key in entries:
        groups.setdefault((file_key_of[key].folder, file_key_of[key].stem), []).append(key)
    files: dict[str, bytes] = {}
    for (folder, stem), keys in groups.items():
        parts: list[list[str]] = [[]]
        size = 0
        for key in keys:
            size += entries[key].nbytes
            if parts[-1] and size > LARGEST:
                parts.append([])
                size = entries[key].nbytes
            parts[-1].append(key)
        weight_map = {}
        for number, part in enumerate(parts, start=1):
            name = f"{stem}-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else stem
            file = f"{folder}{name}.safetensors"
            files[file], ranges = make_header({file_key_of[key].key: entries[key] for key in part}, marked=marked)
            for key in part:
                entries[key].pieces = [Piece(file, *ranges[file_key_of[key].key])]
                weight_map[file_key_of[key].key] = f"{name}.safetensors"
        if len(parts) > 1 or (marked and stem == "model"):  # readers without an index take every file for weights
            total = sum(entries[key].nbytes for key in keys)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            files[f"{folder}{stem}.safetensors.index.json"] = json.dumps(index, indent=1).encode()
    return files


def companions(models: Mapping[str, nn.Module], tokenizer: Any, where: str) -> Callable[[], dict[str, bytes]]:
    """Copy the models' configurations; return a function that writes them and the tokenizer, as name → content.

    ``where``: the checkpoint's place, which adapters name as their base's if no other has it.
    """
    folders = {prefix: prefix.partition("/")[2] for prefix in models}
    parts = [
        (folders[prefix], _configurations(names.unwrap(module), os.path.join(where, folders[prefix], BASE[:-1])))
        for prefix, module in models.items()
    ]

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


def _configurations(module: Any, base_path: str) -> list[tuple[str, Callable[[str], Any]]]:
    """Return (folder, function that saves to it) for copies of a transformers or PEFT model's configurations."""
    found: list[tuple[str, Callable[[str], Any]]] = []
    folder = ""
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        base = module.get_base_model()
        for adapter, own in module.peft_config.items():
            copied = copy.deepcopy(own)
            copied.inference_mode = True  # as PEFT itself saves it, like the mapping below
            started = str(getattr(copied, "init_lora_weights", "")).lower()
            if not copied.base_model_name_or_path or started.startswith(_CHANGES_BASE):
                copied.base_model_name_or_path = base_path
            kind = _torch.own_class(base)
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
            save = functools.partial(copied.save_pretrained, auto_mapping_dict=None if copied.task_type else mapping)
            found.append((_adapter_folder(module, adapter), save))
        module, folder = base, BASE
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return found
    copied = copy.deepcopy(config)
    copied.architectures = [_torch.own_class(module).__name__]
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) == 1 and hasattr(copied, "dtype"):
        copied.dtype = dtypes.pop()
    found.append((folder, copied.save_pretrained))
    generation = getattr(module, "generation_config", None)
    if generation is not None and getattr(module, "can_generate", bool)():
        found.append((folder, copy.deepcopy(generation).save_pretrained))
    return found
