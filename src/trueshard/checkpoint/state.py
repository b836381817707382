"""The content of a checkpoint, by name: tensors and JSON values of models, optimizers and the user's entries.

- A tensor's key is its path: ``model/<name>``, ``optimizer/<parameter>/<state>``, ``more/<path>``; with several models
  or optimizers, ``model/<key>/<name>``. Collecting has no side effect: no optimizer steps, no tensor moves.
- Ranks tell each other what they collected. Without a pipeline all have the same tensors, but for state of parameters
  that one rank updates. With one, the first rank of each stage tells what its stage has, under names of the whole
  model; the first stage that has a tied parameter writes it. The stages' optimizers have the same groups in order.
- Also the state of this rank's random generators (torch's on CPU and accelerator, Python's, numpy's) as bytes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint.format import Manifest, TensorEntry, split, with_wrapped
from trueshard.checkpoint.process_group import RankGroup
from trueshard.model import names, registry
from trueshard.optim.rebind import family
from trueshard.optim.ties import tie_of
from trueshard.parallel.random_streams import random_states, set_random_states
from trueshard.sharding.hooks import runtime_of

Tensors = dict[str, torch.Tensor]
Renaming: TypeAlias = Callable[[str], str | None] | None
"""``names`` of ``save`` and ``load`` as a function: the model's name → the name in files; None: the same."""


@dataclass
class ModelTensor:
    tensor: torch.Tensor
    names: list[str]  # the first is the one it is stored under
    trainable: bool | None  # None for a buffer


def collect(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Any], more: Mapping[str, Any], renaming: Renaming
) -> tuple[Tensors, Manifest]:
    """Return this rank's tensors of models and optimizers, by key prefix, and of the user's entries; and all values."""
    for model in registry.models():
        for function in model.before_reading:
            function()
    tensors: Tensors = {}
    manifest = Manifest()
    for prefix, module in models.items():
        held, extra = model_tensors(module)
        for part in held.values():
            aliases = names_in_files(part.tensor, part.names, renaming)
            key = f"{prefix}/{aliases[0]}"
            if key in tensors:
                raise ValueError(
                    f"names gives two tensors of the model the name {aliases[0]!r}, one is {part.names[0]!r}"
                )
            tensors[key] = part.tensor
            manifest.tensors[key] = TensorEntry.of(part.tensor, aliases, part.trainable)
        values = {}
        for model_name, value in extra.items():
            name = (renaming and renaming(model_name)) or model_name
            values[name] = split(value, f"{prefix}/{name}", tensors)
        manifest.models[prefix] = {"class": torch.typename(_torch.own_class(names.unwrap(module))), "extra": values}
    name_of = parameter_names(models, renaming)
    for prefix, optimizer in optimizers.items():
        manifest.optimizers[prefix] = _optimizer_record(prefix, optimizer, name_of, tensors)
    for key, value in more.items():
        manifest.more[key] = split(value, f"more/{key}", tensors)
    for key, tensor in tensors.items():
        if key not in manifest.tensors:
            manifest.tensors[key] = TensorEntry.of(tensor, [key.partition("/")[2]])
    return tensors, manifest


def group_of(model: Any) -> RankGroup:
    """Return the ranks that save or load ``save``'s ``model`` together, whatever else is in it. Collective."""
    modules = [m for m in (model.values() if isinstance(model, Mapping) else [model]) if isinstance(m, nn.Module)]
    runtimes = [runtime_of(names.unwrap(module)) for module in modules]
    staged = any(runtime is not None and runtime.plan.pipeline for runtime in runtimes)
    return RankGroup([parameter for module in modules for parameter in module.parameters()], staged=staged)


def by_prefix(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``save``'s ``model`` and ``optimizer`` as dicts: key prefix → module, or optimizer."""
    result: list[dict[str, Any]] = []
    for kind, value, expected in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        many = isinstance(value, Mapping)
        held = {f"{kind}/{key}": member for key, member in value.items()} if many else {kind: value}
        result.append({} if value is None else held)
        for prefix, member in result[-1].items():
            if not isinstance(member, expected):
                raise TypeError(f"{prefix.replace('/', '=')} is a {type(member).__name__}, not a {expected.__name__}")
            key = prefix.partition("/")[2]
            if many and re.fullmatch(r"[\w.-]*\w[\w.-]*", key) is None:
                raise ValueError(f"{kind}={{{key!r}: …}}: name it by letters, digits, '-', '_' and '.'")
    return result[0], result[1]


def model_tensors(model: nn.Module) -> tuple[dict[str, ModelTensor], dict[str, Any]]:
    """Return the tensors of ``model.state_dict()`` by first name, and what modules return from ``get_extra_state``."""
    by_id: dict[int, ModelTensor] = {}
    extra: dict[str, Any] = {}
    for name, value in names.unwrap(model).state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":
            extra[name] = value
        elif id(value) in by_id:
            by_id[id(value)].names.append(name)
        else:
            trainable = value.requires_grad if isinstance(value, nn.Parameter) else None
            by_id[id(value)] = ModelTensor(value, [name], trainable)
    return {part.names[0]: part for part in by_id.values()}, extra


def parameter_names(models: Mapping[str, nn.Module], renaming: Renaming = None) -> dict[int, str]:
    """Map ``id`` of each parameter → its first name in files, after the model's key if there are several."""
    result: dict[int, str] = {}
    for prefix, model in models.items():
        inside = prefix.partition("/")[2]
        for model_name, _, _, parameter in names.named_tensors(model, "parameters"):
            if id(parameter) not in result:
                name = names_in_files(parameter, [model_name], renaming)[0]
                result[id(parameter)] = f"{inside}/{name}" if inside else name
    return result


def names_in_files(tensor: torch.Tensor, model_names: list[str], renaming: Renaming) -> list[str]:
    """Return the names in files of a tensor that its model calls ``model_names``; that of ``tie_over`` is the first."""
    result = model_names if renaming is None else [renaming(name) or name for name in model_names]
    tied = tie_of(tensor)
    return result if tied is None else list(dict.fromkeys([tied.name, *result]))


def _optimizer_record(
    prefix: str, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], tensors: Tensors
) -> dict[str, Any]:
    """Return class, groups and state as JSON values; tensors go to ``tensors``, wrapped optimizers to ``"wrapped"``."""
    result: dict[str, Any] = {}
    for place, member in enumerate(family(optimizer)):
        path = f"{prefix}/@{place}" if place else prefix
        if place and member.state is optimizer.state:
            continue
        record: dict[str, Any] = {
            "class": torch.typename(type(member)),
            "groups": [],
            "state": {
                name: split(entries, f"{path}/{name}", tensors)
                for key, entries in member.state.items()
                # None: a parameter that was taken out of its groups
                if (name := name_of.get(id(key)) if isinstance(key, torch.Tensor) else f"@{key}") is not None
            },
        }
        for g, group in enumerate(member.param_groups):
            for shape in (tuple(p.shape) for p in group["params"] if id(p) not in name_of):
                raise ValueError(
                    f"{type(member).__name__}: a parameter of group {g}, of shape {shape}, is in none of the models "
                    "given; pass the model that owns it as model="
                )
            settings = {key: value for key, value in group.items() if key != "params"}
            members = [name_of[id(parameter)] for parameter in group["params"]]
            record["groups"].append({"params": members, "settings": split(settings, f"{path}/@groups/{g}", tensors)})
        if place:
            result.setdefault("wrapped", {})[str(place)] = record
        else:
            result = record
    return result


# What ranks tell each other before a save


@dataclass
class RankContent:
    """Message of a rank to the others before a save."""

    token: str
    first: int  # rank of its stage
    common: dict[str, Any]  # the same on all ranks
    in_stage: dict[str, Any]  # the same on the ranks of its stage
    entries: dict[str, TensorEntry] = field(default_factory=dict)  # tensors that other ranks may not have
    tied: list[str] = field(default_factory=list)  # keys of those of which other stages have copies
    models: dict[str, Any] = field(default_factory=dict)  # records of the manifest that other ranks may not have
    optimizers: dict[str, Any] = field(default_factory=dict)  # by ``with_wrapped``: their groups and state


def rank_content(
    token: str, group: RankGroup, common: dict[str, Any], manifest: Manifest, tensors: Tensors
) -> RankContent:
    """Describe what this rank has."""
    records, first, staged = with_wrapped(manifest.optimizers), group.stage[0], group.staged

    def of_groups(part: str) -> dict[str, Any]:
        return {key: [record["class"], [group[part] for group in record["groups"]]] for key, record in records.items()}

    result = RankContent(token, first, common, of_groups("params"))
    tells_all = staged and group.rank == first
    for key, tensor in tensors.items():
        owned = key.startswith("optimizer") and not isinstance(tensor, DTensor)
        if not owned:
            placements = str(getattr(tensor, "placements", "plain"))
            result.in_stage[key] = [placements, list(tensor.shape), str(tensor.dtype)]
        if staged and key.startswith("more/") and isinstance(tensor, DTensor):
            raise ValueError(f"{key!r} is sharded over the ranks of one stage; give it as a model, or whole")
        if owned or tells_all:
            result.entries[key] = manifest.tensors[key]
        if tells_all and tie_of(tensor) is not None:
            result.tied.append(key)
    if staged:
        for record in records.values():
            for settings in (group["settings"] for group in record["groups"]):
                settings.pop("param_names", None)  # of this stage alone
        for key, settings in of_groups("settings").items():
            result.common = result.common | {f"{key} (class and settings of groups)": settings}
    if tells_all:
        result.models = manifest.models
    for key, record in records.items():
        result.optimizers[key] = {"groups": record["groups"] if tells_all else [], "state": record["state"]}
    return result


def merge(manifest: Manifest, everyone: list[RankContent], staged: bool) -> dict[str, int]:
    """Add what all ranks have to ``manifest``; return key of what some may not have → the first rank that has it."""
    first_with: dict[str, int] = {}
    records = with_wrapped(manifest.optimizers)
    entries = manifest.tensors
    kept = {key: entries[key] for key in entries if not staged or key == "rng"}
    entries.clear()
    if not staged:
        entries.update(kept)
    for rank, content in enumerate(everyone):
        for key, entry in content.entries.items():
            merged, first = entries.setdefault(key, entry), first_with.setdefault(key, rank)
            merged.names = list(dict.fromkeys([*merged.names, *entry.names]))
            if everyone[first].first != content.first and key.startswith("model") and key not in content.tied:
                name = key.partition("/")[2]
                raise ValueError(
                    f"{name!r} is on two stages of the pipeline (ranks {first} and {rank}): say by names=… what "
                    "each is called in the whole model, or tie them by trueshard.tie_over()"
                )
        for prefix, model in content.models.items():
            manifest.models[prefix]["extra"] = model["extra"] | manifest.models[prefix]["extra"]
        for key, other in content.optimizers.items():
            for group, theirs in zip(records[key]["groups"], other["groups"], strict=False):
                group["params"] = list(dict.fromkeys([*group["params"], *theirs["params"]]))
            records[key]["state"] = other["state"] | records[key]["state"]
    entries.update(kept)
    for record in records.values():
        order = {name: i for i, name in enumerate(name for group in record["groups"] for name in group["params"])}
        record["state"] = dict(sorted(record["state"].items(), key=lambda item: order.get(item[0], len(order))))
    for key in sorted(key for key in entries if key.startswith("optimizer")):
        entries[key] = entries.pop(key)
    return first_with


def part_of(record: Mapping[str, Any], here: Collection[str]) -> dict[str, Any]:
    """Return an optimizer's saved record without the parameters that are not in ``here``, on this stage."""
    groups = []
    for group in record["groups"]:
        members = [name for name in group["params"] if name in here]
        groups.append({**group, "params": members, "elsewhere": bool(group["params"]) and not members})
    return {**record, "groups": groups}


# Random generators


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002 - what user code draws from


def random_state() -> tuple[list[list[Any]], torch.Tensor]:
    """Return [generator, bytes] in turn, and their states, concatenated: uint8 ``(bytes,)``. Draws no number."""
    states = random_states(torch.accelerator.current_accelerator(check_available=True))
    table = [[kind, len(data)] for kind, data in states.items()]
    return table, torch.frombuffer(bytearray(b"".join(states.values())), dtype=torch.uint8)


def set_random_state(table: list[list[Any]], states: torch.Tensor) -> None:
    """Set the generators to what ``random_state`` returned."""
    parts = states.split([length for _, length in table])
    set_random_states({kind: bytes(part.numpy()) for (kind, _), part in zip(table, parts, strict=True)})
