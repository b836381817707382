"""Places of tensors: the file and key in it that a checkpoint gives each, and those that another program gave.

- What ``save`` writes of a model is a Hugging Face model directory; several models have a folder each. Of a PEFT model
  it is what PEFT writes and ``from_pretrained`` reads: the adapter, whose configuration names its base. The base is in
  ``base/``, under the names that it has without PEFT.
- Transformers stores some architectures under other names than they have in memory, and has a table for each: what is
  renamed, and which tensors are merged (the weights of experts, queries, keys and values) or split. A merged tensor
  becomes an entry of several pieces, in row order, so a rank still reads what it holds and nothing else. What moves
  bytes inside rows (a transposition) is refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import math
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.format import Piece, TensorEntry, make_header
from trueshard.model import names

BASE = "base/"  # folder of a PEFT model's base
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # initialisations of LoRA (how names begin) that change the base
LARGEST = 2_000_000_000  # bytes of tensors in one file, unless a single tensor has more
DIFFUSERS = "diffusion_pytorch_model"  # stem of the files that models of diffusers read
_MOST_PIECES = 100_000  # of a tensor that is merged or split


@dataclass(frozen=True)
class FileKey:
    folder: str  # "" or "name/"
    stem: str  # of the file's name: "model", `DIFFUSERS`, "adapter_model", "optimizer" or "extra"
    key: str  # in the file


def file_keys(models: Mapping[str, nn.Module], entries: Mapping[str, TensorEntry]) -> dict[str, FileKey]:
    result: dict[str, FileKey] = {}
    for key in entries:
        kind, _, rest = key.partition("/")
        result[key] = FileKey("", kind, rest) if kind == "optimizer" else FileKey("", "extra", key)
    for prefix, module in models.items():
        folder = f"{prefix.partition('/')[2]}/" if "/" in prefix else ""
        adapted = adapted_keys(module, folder) or {}
        stem = DIFFUSERS if _is_of_diffusers(names.unwrap(module)) else "model"
        for key in entries:
            if key.startswith(f"{prefix}/"):
                name = key.removeprefix(f"{prefix}/")
                result[key] = adapted.get(name, FileKey(folder, stem, name))
    return result


def _is_of_diffusers(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("register_to_config", "save_config", "to_json_string"))


def adapted_keys(module: nn.Module, folder: str) -> dict[str, FileKey] | None:
    """Return the file and key of each tensor of a PEFT model; None for another model, or if two would share a key."""
    peft: Any = names.unwrap(module)
    if not hasattr(peft, "peft_config") or not hasattr(peft, "get_base_model"):
        return None
    from peft.utils import get_peft_model_state_dict

    tensors = dict(peft.state_dict(keep_vars=True))
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    result: dict[str, FileKey] = {}
    for adapter in peft.peft_config:
        saved = get_peft_model_state_dict(
            peft, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=False
        )
        for key, tensor in saved.items():
            name = name_of.get(id(tensor))
            if key == "prompt_embeddings" and name is None:  # a copy of this one, unless it is computed
                name = f"prompt_encoder.{adapter}.embedding.weight"
                if name not in tensors or peft.peft_config[adapter].peft_type != "PROMPT_TUNING":
                    continue
            if name is not None:
                result[name] = FileKey(f"{folder}{adapter_folder(peft, adapter)}", "adapter_model", key)
    prompted = any(config.is_prompt_learning for config in peft.peft_config.values())
    for name in tensors:
        if name not in result:
            base = name.removeprefix("base_model." if prompted else "base_model.model.")
            base = base.replace(".base_layer.", ".").replace(".original_module.", ".")
            result[name] = FileKey(f"{folder}{BASE}", "model", base)
    return result if len(set(result.values())) == len(result) else None


def refuse_adapters(models: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a PEFT model: its files go by its own names."""
    for prefix, module in models.items():
        if hasattr(names.unwrap(module), "peft_config"):
            raise ValueError(
                f"{prefix!r} is a PEFT model, which is saved under its own names and in one piece, not with names=… or "
                "as the stage of a pipeline; merge the adapter first, or save without names"
            )


def _base_names(module: nn.Module) -> list[str]:
    """Return the names of what a PEFT model has of its base; nothing for another model."""
    return [name for name, key in (adapted_keys(module, "") or {}).items() if key.folder == BASE]


def leave_base_out(models: Mapping[str, nn.Module], *tables: dict[str, Any]) -> tuple[str, ...]:
    """Remove from ``tables``, by key, the base of each PEFT model that is where adapters say; return its folders."""
    folders = []
    for prefix, module in models.items():
        keys = [f"{prefix}/{name}" for name in _base_names(module)]
        is_trained = any(getattr(tables[0].get(key), "requires_grad", False) for key in keys)
        configs = getattr(names.unwrap(module), "peft_config", {}).values()
        if keys and not is_trained and not any(map(_needs_own_base, configs)):
            folders.append(f"{prefix}/{BASE}".partition("/")[2])
            for table, key in itertools.product(tables, keys):
                table.pop(key, None)
    return tuple(folders)


def _needs_own_base(config: Any) -> bool:
    """True for an adapter whose base is not, or not as it was trained, where ``config`` says."""
    started = str(getattr(config, "init_lora_weights", "")).lower()
    return not config.base_model_name_or_path or started.startswith(_CHANGES_BASE)


def adapter_folder(module: Any, adapter: str) -> str:
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
    """Return (folder, function that saves to it) for copies of a model's configurations, if its library has any."""
    result: list[tuple[str, Callable[[str], Any]]] = []
    folder = ""
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        base = module.get_base_model()
        for adapter, saved in module.peft_config.items():
            config = copy.deepcopy(saved)
            config.inference_mode = True  # as PEFT itself saves it, like the mapping below
            if _needs_own_base(config):
                config.base_model_name_or_path = base_path
            kind = _torch.own_class(base)
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
            save = functools.partial(config.save_pretrained, auto_mapping_dict=None if config.task_type else mapping)
            result.append((adapter_folder(module, adapter), save))
        module, folder = base, BASE
    if _is_of_diffusers(module):  # its own words, but of the class that it had before it was sharded
        described = json.loads(module.to_json_string()) | {"_class_name": _torch.own_class(module).__name__}
        text = json.dumps(described, indent=2) + "\n"
        return [*result, (folder, lambda place: Path(place, "config.json").write_text(text, encoding="utf-8"))]
    if not hasattr(getattr(module, "config", None), "save_pretrained"):
        return result
    copied = copy.deepcopy(module.config)
    if hasattr(module, "save_pretrained"):  # not a stage of a pipeline, say
        copied.architectures = [_torch.own_class(module).__name__]
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) == 1 and hasattr(copied, "dtype"):
        copied.dtype = dtypes.pop()
    result.append((folder, copied.save_pretrained))
    generation = getattr(module, "generation_config", None)
    if generation is not None and getattr(module, "can_generate", bool)():
        result.append((folder, copy.deepcopy(generation).save_pretrained))
    return result


# The names of a model that is loaded


@dataclass
class Naming:
    """The names of one model's tensors in a catalogue."""

    prefix: str  # of the model's keys
    renaming: state.Renaming = None  # the user's mapping
    table: dict[str, str] = field(default_factory=dict)  # name → key, where they differ
    may_lack: Callable[[str], bool] = lambda name: False  # true for the name of a tensor that the files need not have
    _name_of: dict[str, str] = field(default_factory=dict)

    def key(self, name: str, tied: str | None = None) -> str:
        """Return the key of the model's tensor ``name``; ``tied``: what ``tie_over`` calls it."""
        renamed = tied or (self.renaming(name) if self.renaming is not None else None)
        key = self.prefix + (renamed or self.table.get(name, name))
        self._name_of[key] = name
        return key

    def name(self, key: str) -> str:
        return self._name_of.get(key, key.removeprefix(self.prefix))


def naming_of(catalogue: Catalogue, prefix: str, module: nn.Module, renaming: state.Renaming) -> Naming:
    """Return the naming of ``module``; the entries of a Hugging Face directory get the names that it has."""
    if catalogue.manifest is not None:
        base = set(_base_names(module))
        has_base = any(f"{prefix}/{name}" in catalogue.entries for name in base)
        return Naming(f"{prefix}/", renaming, may_lack=lambda name: not has_base and name in base)
    unwrapped = names.unwrap(module)
    if not catalogue.adapter:
        return Naming("", renaming, _hub_names(module, catalogue), may_lack=_ignored(unwrapped, "missing"))
    adapters = getattr(unwrapped, "peft_config", {})
    if len(adapters) != 1:
        raise ValueError(f"an adapter is loaded into a PEFT model with one adapter, not with {len(adapters)}")
    # PEFT stores changed embeddings of the base under the names that they have.
    keys = adapted_keys(module, "") or {}
    table = {name: key.key if key.stem == "adapter_model" else name for name, key in keys.items()}
    return Naming("", renaming, table, may_lack=lambda name: True)


def _hub_names(module: nn.Module, catalogue: Catalogue) -> dict[str, str]:
    """Translate ``catalogue`` for a model of transformers; return name → key for the base of a PEFT model."""
    model: Any = names.unwrap(module)
    held, _ = state.model_tensors(module)
    tensors = {name: part.tensor for part in held.values() for name in part.names}
    keys = adapted_keys(module, "")
    if keys is not None:
        tensors = {keys[name].key: tensor for name, tensor in tensors.items() if keys[name].stem == "model"}
        model = model.get_base_model()
    if hasattr(model, "config") and isinstance(getattr(model, "base_model_prefix", None), str):  # of transformers
        in_files = {id(tensor) for name, tensor in tensors.items() if name in catalogue.entries}
        if any(id(tensor) not in in_files for tensor in tensors.values()):
            _translate(model, tensors, catalogue)
        ignored = _ignored(model, "unexpected")
        for key in [key for key in catalogue.entries if key not in tensors and ignored(key)]:
            del catalogue.entries[key]
    return {name: place.key for name, place in (keys or {}).items() if place.key in catalogue.entries}


def _ignored(module: Any, kind: str) -> Callable[[str], bool]:
    """Return whether transformers ignores a name that is ``kind``: "missing" or "unexpected"."""
    patterns = getattr(module, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _translate(module: Any, tensors: Mapping[str, torch.Tensor], catalogue: Catalogue) -> None:
    """Rename and merge the entries of ``catalogue``, in place, as transformers' table for ``module`` says.

    ``tensors``: those of ``module``, by all their names.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # this version has no tables
        return
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    with own_classes(module):
        table = list(get_model_conversion_mapping(module))
    renamings = [rule for rule in table if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in table if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state_dict = str(module.base_model_prefix), dict(tensors)
    result: dict[str, TensorEntry] = {}
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for key in sorted(catalogue.entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state_dict)
        if name not in tensors and key in tensors:
            name, pattern = key, None
        if pattern is None or name not in tensors:
            result[name if name in tensors else key] = catalogue.entries[key]
        else:
            groups.setdefault(name, (of_pattern[pattern], {}))[1].setdefault(pattern, []).append(key)
    for name, (converter, sources) in groups.items():
        try:
            result |= _converted(converter, name, sources, tensors, module.config, catalogue)
        except Exception as error:  # whatever the table's operations raise on what they are not made for
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            raise ValueError(
                f"{catalogue.where}: {name!r} is stored in another form, and {operations} is more than reading bytes "
                f"({error}); load it with from_pretrained() once, and save it with trueshard.save()"
            ) from error
    catalogue.entries.clear()
    catalogue.entries.update(result)


@contextlib.contextmanager
def own_classes(module: Any) -> Iterator[None]:
    """Inside, give modules the classes from before sharding, by whose names transformers' tables go."""
    changed = [(part, type(part)) for part in module.modules() if _torch.own_class(part) is not type(part)]
    try:
        for part, _ in changed:
            part.__class__ = _torch.own_class(part)
        yield
    finally:
        for part, kind in changed:
            part.__class__ = kind


def as_published(module: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename, merge and split whole ``tensors`` of a model as transformers does where it saves it."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # this version has no tables
        return tensors
    if not isinstance(module, PreTrainedModel):
        return tensors
    with own_classes(module), torch.no_grad():
        return dict(revert_weight_conversion(module, tensors))


def _halved(shape: Sequence[int]) -> list[int]:
    """Replace the last of several dimensions by 2."""
    return [*shape[:-1], 2] if len(shape) > 1 else list(shape)


def _converted(
    converter: Any,
    name: str,  # of the first target
    sources: Mapping[str, list[str]],  # pattern → keys
    tensors: Mapping[str, torch.Tensor],  # the model's
    config: Any,
    catalogue: Catalogue,
) -> dict[str, TensorEntry]:
    """Apply transformers' own operations to numbers in the place of half rows, and see where each number ends up."""
    keys = [key for several in sources.values() for key in several]
    if len({(catalogue.entries[key].dtype, len(catalogue.entries[key].shape)) for key in keys}) > 1:
        raise ValueError("joining several dtypes")
    values: dict[str, Any] = {}
    starts = [0]
    for pattern, key in ((pattern, key) for pattern, several in sources.items() for key in several):
        shape = _halved(catalogue.entries[key].shape)
        values.setdefault(pattern, []).append(torch.arange(starts[-1], starts[-1] + math.prod(shape)).view(shape))
        starts.append(starts[-1] + math.prod(shape) + 1)  # a gap, so that no run spans two sources
    # All that operations read of the model is the shapes of parameters.
    shapes = SimpleNamespace(get_parameter=lambda name: torch.empty(_halved(tensors[name].shape), device="meta"))
    numbers = torch.cat([value.flatten() for several in values.values() for value in several])
    for operation in converter.operations:
        values = operation.convert(
            values,
            source_patterns=list(converter.source_patterns),
            target_patterns=list(converter.target_patterns),
            full_layer_name=name,
            model=shapes,
            config=config,
            missing_keys=None,
        )
    made: dict[str, torch.Tensor] = {
        key: value[0] if isinstance(value, list) else value for key, value in values.items()
    }
    if not torch.equal(torch.cat([value.flatten() for value in made.values()]).sort().values, numbers):
        raise ValueError("values change")
    target = name.replace("*.", "0.")
    before, _, after = next((target.partition(key) for key in made if key in target), ("", "", ""))
    return {before + key + after: _entry_of(value, starts, keys, catalogue) for key, value in made.items()}


def _entry_of(numbers: torch.Tensor, starts: list[int], keys: list[str], catalogue: Catalogue) -> TensorEntry:
    """Return the tensor made of ``numbers``, of which the source ``keys[i]`` has those from ``starts[i]`` on."""
    flat, shape = numbers.flatten(), list(numbers.shape)
    edges = [0, *(flat.diff() != 1).nonzero().flatten().add(1).tolist(), len(flat)]
    if len(edges) > _MOST_PIECES:
        raise ValueError(f"{len(edges)} pieces")
    pieces: list[Piece] = []
    for first, count in zip(flat[edges[:-1]].tolist(), torch.tensor(edges).diff().tolist(), strict=True):
        i = bisect_right(starts, first) - 1
        entry, begin, total = catalogue.entries[keys[i]], first - starts[i], starts[i + 1] - starts[i] - 1
        if len(entry.shape) > 1 and (begin % 2 or count % 2):
            raise ValueError("rows are split")
        ends = begin * entry.nbytes // total, (begin + count) * entry.nbytes // total
        pieces += (piece for piece, _ in catalogue.ranges(keys[i], *ends))
    if len(entry.shape) > 1:
        shape[-1] = sum(piece.end - piece.begin for piece in pieces) // entry.itemsize // math.prod(shape[:-1])
    return TensorEntry(list(keys), shape, entry.dtype, pieces=pieces)
