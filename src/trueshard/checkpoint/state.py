"""The content of a checkpoint, by name: the tensors and JSON values of models, optimizers, the user's entries.

A tensor's key is its path: ``model/<name>``, ``optimizer/<parameter>/<state>``, ``more/<path>``; with several models or
optimizers, ``model/<key>/<name>``. Collecting has no side effect: no optimizer steps, no tensor moves.

Also the state of this rank's random generators (torch's on CPU and accelerator, Python's, numpy's) as bytes, and back.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn

from trueshard import _torch
from trueshard.checkpoint.format import Manifest, TensorEntry, split
from trueshard.model import names
from trueshard.optim.rebind import family
from trueshard.optim.ties import tied_name
from trueshard.sharding.hooks import runtime_of

Tensors = dict[str, torch.Tensor]
GivenNames: TypeAlias = Callable[[str], str | None] | None
"""``names`` of ``save`` and ``load`` as a function: the model's own name → the name in files; None: the same."""


@dataclass
class ModelTensor:
    tensor: torch.Tensor
    names: list[str]  # the first is the one it is stored under
    trainable: bool | None  # None for a buffer


def collect(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Any], more: Mapping[str, Any], given: GivenNames
) -> tuple[Tensors, Manifest]:
    """Return this rank's tensors of models and optimizers, by key prefix, and of the user's entries; and all values."""
    tensors: Tensors = {}
    manifest = Manifest()
    for prefix, module in models.items():
        held, extra = model_tensors(module)
        for each in held.values():
            aliases = names_in_files(each.tensor, each.names, given)
            key = f"{prefix}/{aliases[0]}"
            if key in tensors:
                raise ValueError(
                    f"names gives two tensors of the model the name {aliases[0]!r}, one is {each.names[0]!r}"
                )
            tensors[key] = each.tensor
            manifest.tensors[key] = TensorEntry.of(each.tensor, aliases, each.trainable)
        values = {
            (name := (given and given(own)) or own): split(value, f"{prefix}/{name}", tensors)
            for own, value in extra.items()
        }
        manifest.models[prefix] = {"class": torch.typename(_torch.own_class(names.unwrap(module))), "extra": values}
    name_of = parameter_names(models, given)
    for prefix, optimizer in optimizers.items():
        manifest.optimizers[prefix] = _optimizer_record(prefix, optimizer, name_of, tensors)
    for key, value in more.items():
        manifest.more[key] = split(value, f"more/{key}", tensors)
    for key, tensor in tensors.items():
        if key not in manifest.tensors:
            manifest.tensors[key] = TensorEntry.of(tensor, [key.partition("/")[2]])
    return tensors, manifest


def parameters_of(model: Any) -> list[torch.Tensor]:
    """Return the parameters of ``save``'s ``model``, whatever else is in it."""
    models = model.values() if isinstance(model, Mapping) else [model]
    return [p for each in models if isinstance(each, nn.Module) for p in each.parameters()]


def by_prefix(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    """Return ``save``'s ``model`` and ``optimizer`` as dicts: key prefix → module, or optimizer."""
    result: list[dict[str, Any]] = []
    for kind, given, expected in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        many = isinstance(given, Mapping)
        held = {f"{kind}/{key}": value for key, value in given.items()} if many else {kind: given}
        result.append({} if given is None else held)
        for prefix, each in result[-1].items():
            if not isinstance(each, expected):
                raise TypeError(f"{prefix.replace('/', '=')} is a {type(each).__name__}, not a {expected.__name__}")
            key = prefix.partition("/")[2]
            if many and re.fullmatch(r"[\w.-]*\w[\w.-]*", key) is None:
                raise ValueError(f"{kind}={{{key!r}: …}}: name it by letters, digits, '-', '_' and '.'")
    return result


def model_tensors(model: nn.Module) -> tuple[dict[str, ModelTensor], dict[str, Any]]:
    """Return the tensors of ``model.state_dict()`` by first name, and what modules return from ``get_extra_state``."""
    found: dict[int, ModelTensor] = {}
    extra: dict[str, Any] = {}
    for name, value in names.unwrap(model).state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":
            extra[name] = value
        elif id(value) in found:
            found[id(value)].names.append(name)
        else:
            trainable = value.requires_grad if isinstance(value, nn.Parameter) else None
            found[id(value)] = ModelTensor(value, [name], trainable)
    return {each.names[0]: each for each in found.values()}, extra


def parameter_names(models: Mapping[str, nn.Module], given: GivenNames = None) -> dict[int, str]:
    """Map ``id`` of each parameter → its first name in files, after the model's key if there are several."""
    result: dict[int, str] = {}
    for prefix, model in models.items():
        inside = prefix.partition("/")[2]
        for own, _, _, parameter in names.named_tensors(model, "parameters"):
            if id(parameter) not in result:
                name = names_in_files(parameter, [own], given)[0]
                result[id(parameter)] = f"{inside}/{name}" if inside else name
    return result


def names_in_files(tensor: torch.Tensor, own: list[str], given: GivenNames) -> list[str]:
    """Return the names in files of a tensor that its model calls ``own``; that of ``tie_over`` is the first."""
    found = own if given is None else [given(name) or name for name in own]
    tied = tied_name(tensor)
    return found if tied is None else list(dict.fromkeys([tied.name, *found]))


def is_stage(model: Any) -> bool:
    """True if ``save``'s ``model`` was sharded as one stage of a pipeline."""
    models = model.values() if isinstance(model, Mapping) else [model]
    runtimes = [runtime_of(names.unwrap(each)) for each in models if isinstance(each, nn.Module)]
    return any(runtime is not None and runtime.plan.pipeline for runtime in runtimes)


def _optimizer_record(
    prefix: str, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], tensors: Tensors
) -> dict[str, Any]:
    """Return class, groups and state as JSON values; tensors go to ``tensors``, wrapped optimizers to ``"wrapped"``."""
    record: dict[str, Any] = {}
    for place, member in enumerate(family(optimizer)):
        path = f"{prefix}/@{place}" if place else prefix
        if place and member.state is optimizer.state:
            continue
        one: dict[str, Any] = {
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
            one["groups"].append({"params": members, "settings": split(settings, f"{path}/@groups/{g}", tensors)})
        if place:
            record.setdefault("wrapped", {})[str(place)] = one
        else:
            record = one
    return record


def groups_of(records: Mapping[str, Any], part: str = "params") -> dict[str, Any]:
    """Return what must be the same on several ranks of optimizer records: class, and a ``part`` of each group."""
    result: dict[str, Any] = {}
    for prefix, record in records.items():
        result[prefix] = [record["class"], [group[part] for group in record["groups"]]]
        result |= groups_of({f"{prefix}/@{place}": each for place, each in record.get("wrapped", {}).items()}, part)
    return result


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002 - what user code draws from


_WORDS = 625  # words of Python's Mersenne Twister: 624 of state and a position


def random_state() -> tuple[list[list[Any]], torch.Tensor]:
    """Return [generator, bytes] in turn, and their states, concatenated: uint8 ``(bytes,)``. Draws no number."""
    parts = {"torch": bytes(torch.get_rng_state().numpy())}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and hasattr(module := torch.get_device_module(device), "get_rng_state"):
        parts[device.type] = bytes(module.get_rng_state().cpu().numpy())
    version, words, gauss = random.getstate()
    parts["python"] = struct.pack(f"<i{_WORDS}I?d", version, *words, gauss is not None, gauss or 0.0)
    legacy: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, place, has_gauss, cached = legacy
    if name == "MT19937":
        parts["numpy"] = struct.pack("<624Iii d", *keys.tolist(), place, has_gauss, cached)
    table = [[kind, len(data)] for kind, data in parts.items()]
    return table, torch.frombuffer(bytearray(b"".join(parts.values())), dtype=torch.uint8)


def set_random_state(table: list[list[Any]], states: torch.Tensor) -> None:
    """Set the generators to what ``random_state`` returned; one that this machine lacks is skipped."""
    for (kind, _), part in zip(table, states.split([length for _, length in table]), strict=True):
        tensor, data = part.clone(), bytes(part.numpy())
        if kind == "torch":
            torch.set_rng_state(tensor)
        elif kind == "python":
            version, *words, has_gauss, gauss = struct.unpack(f"<i{_WORDS}I?d", data)
            random.setstate((version, tuple(words), gauss if has_gauss else None))
        elif kind == "numpy":
            *keys, place, has_gauss, cached = struct.unpack("<624Iii d", data)
            generator = ("MT19937", numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached)
            numpy.random.set_state(generator)  # noqa: NPY002
        elif kind == str(torch.accelerator.current_accelerator(check_available=True)):
            torch.get_device_module(kind).set_rng_state(tensor)
