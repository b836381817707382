"""What a checkpoint holds, by name: the tensors and the JSON values of models, optimizers and the user's own entries.

- A tensor's key is its path: ``model/<name>``, ``optimizer/<parameter>/<state>``, ``more/<path>``. Several models or
  optimizers add their key: ``model/<key>/<name>``.
- A tie is one tensor with several names. State that an optimizer does not have is simply not there.
- Taking the state has no side effect: no optimizer steps, nothing is gathered, nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trueshard import names
from trueshard.optim.rebind import family

Tensors = dict[str, torch.Tensor]


@dataclass
class Held:
    """A tensor of a model."""

    tensor: torch.Tensor
    names: list[str]
    """All that it has; the first is the one it is kept under."""
    trainable: bool | None
    """None for a buffer."""


@dataclass
class Content:
    """What is to be saved, as far as this rank has it."""

    tensors: Tensors = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    """By key: those tensors that are a model's."""
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def collect(models: Mapping[str, nn.Module], optimizers: Mapping[str, Any], more: Mapping[str, Any]) -> Content:
    """Everything, by key.

    Raises:
        ValueError, TypeError: something that cannot be saved; the message names it.
    """
    content = Content()
    for prefix, module in models.items():
        held, extra = model_tensors(module)
        for name, each in held.items():
            content.held[f"{prefix}/{name}"] = each
            content.tensors[f"{prefix}/{name}"] = each.tensor
        content.models[prefix] = {
            "class": _class_name(module),
            "extra": {name: split(value, f"{prefix}/{name}", content.tensors) for name, value in extra.items()},
        }
    name_of = parameter_names(models)
    for prefix, optimizer in optimizers.items():
        content.optimizers[prefix] = optimizer_record(prefix, optimizer, name_of, content.tensors)
    for key, value in more.items():
        content.more[key] = split(value, f"more/{key}", content.tensors)
    return content


def models_of(model: Any) -> dict[str, nn.Module]:
    """``model`` as a dict: key prefix → module."""
    return _by_prefix("model", model, nn.Module)


def parameters_of(model: Any) -> list[torch.Tensor]:
    """The parameters of whatever modules are in ``model``, which may be anything."""
    models = model.values() if isinstance(model, Mapping) else [model]
    return [p for each in models if isinstance(each, nn.Module) for p in each.parameters()]


def optimizers_of(optimizer: Any) -> dict[str, Any]:
    """``optimizer`` as a dict: key prefix → optimizer."""
    return _by_prefix("optimizer", optimizer, torch.optim.Optimizer)


def _by_prefix(kind: str, given: Any, expected: type) -> dict[str, Any]:
    if given is None:
        return {}
    many = isinstance(given, Mapping)
    found = {f"{kind}/{key}": value for key, value in given.items()} if many else {kind: given}
    for prefix, each in found.items():
        if not isinstance(each, expected):
            raise TypeError(f"{prefix.replace('/', '=')} is a {type(each).__name__}, not a {expected.__name__}")
        key = prefix.partition("/")[2]
        if many and (not key or not key.replace("-", "").replace("_", "").replace(".", "").isalnum()):
            raise ValueError(f"{kind}={{{key!r}: …}}: name it by letters, digits, '-', '_' and '.'")
    return found


def _class_name(value: Any) -> str:
    cls = _own_class(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def _own_class(value: Any) -> type:
    from trueshard import _torch

    return _torch.own_class(names.unwrap(value)) if isinstance(value, nn.Module) else type(value)


def model_tensors(model: nn.Module) -> tuple[dict[str, Held], dict[str, Any]]:
    """The tensors of ``model.state_dict()`` by first name, and what modules return from ``get_extra_state``."""
    found: dict[int, Held] = {}
    extra: dict[str, Any] = {}
    for name, value in names.unwrap(model).state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":
            extra[name] = value
        elif id(value) in found:
            found[id(value)].names.append(name)
        else:
            trainable = value.requires_grad if isinstance(value, nn.Parameter) else None
            found[id(value)] = Held(value, [name], trainable)
    return {each.names[0]: each for each in found.values()}, extra


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """``id`` of each parameter → its first name (after the model's key, when there are several)."""
    found: dict[int, str] = {}
    for prefix, model in models.items():
        inside = prefix.partition("/")[2]
        for name, _, _, parameter in names.named_tensors(model, "parameters"):
            found.setdefault(id(parameter), f"{inside}/{name}" if inside else name)
    return found


def optimizer_record(
    prefix: str, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], tensors: Tensors
) -> dict[str, Any]:
    """An optimizer's class, groups and state as JSON values; its tensors go to ``tensors``.

    An optimizer that wraps another has the other's record in its own.

    Raises:
        ValueError: it holds a parameter that is in none of the models saved with it.
    """
    record: dict[str, Any] = {}
    for place, member in enumerate(family(optimizer)):
        path = f"{prefix}/@{place}" if place else prefix
        if place and member.state is optimizer.state:
            continue
        one = {
            "class": _class_name(member),
            "groups": [_group(path, g, group, member, name_of, tensors) for g, group in enumerate(member.param_groups)],
            "state": _state(path, member, name_of, tensors),
        }
        if place:
            record.setdefault("wrapped", {})[str(place)] = one
        else:
            record = one
    return record


def groups_of(records: Mapping[str, Any]) -> dict[str, Any]:
    """Of optimizers' records, what is the same on every rank: classes, and the names in each group."""
    found: dict[str, Any] = {}
    for prefix, record in records.items():
        found[prefix] = [record["class"], [group["params"] for group in record["groups"]]]
        found |= groups_of({f"{prefix}/@{place}": each for place, each in record.get("wrapped", {}).items()})
    return found


def _group(
    path: str, g: int, group: Mapping[str, Any], optimizer: Any, name_of: Mapping[int, str], tensors: Tensors
) -> dict[str, Any]:
    for parameter in group["params"]:
        if id(parameter) not in name_of:
            raise ValueError(
                f"{type(optimizer).__name__}: a parameter of group {g}, of shape {tuple(parameter.shape)}, is in "
                "none of the models given; pass the model that owns it as model="
            )
    settings = {key: value for key, value in group.items() if key != "params"}
    return {
        "params": [name_of[id(parameter)] for parameter in group["params"]],
        "settings": split(settings, f"{path}/@groups/{g}", tensors),
    }


def _state(path: str, optimizer: Any, name_of: Mapping[int, str], tensors: Tensors) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, entries in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            if id(key) not in name_of:
                continue  # of a parameter that was taken out of its groups
            name = name_of[id(key)]
        else:
            name = f"@{key}"
        found[name] = split(entries, f"{path}/{name}", tensors)
    return found


def split(value: Any, path: str, tensors: Tensors) -> Any:
    """A value with its tensors taken out into ``tensors`` and references left in their place, as JSON.

    Raises:
        TypeError: something that is neither a tensor nor a JSON value; the message names its path.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"__tensor__": path}
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if hasattr(value, "state_dict") and callable(value.state_dict):
        return split(value.state_dict(), path, tensors)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"{path}: the key {key!r} is neither a string nor an integer")
        return {
            "__dict__": [
                [key, split(each, f"{path}/{str(key).replace('/', '|')}", tensors)] for key, each in value.items()
            ]
        }
    if isinstance(value, tuple):
        return {"__tuple__": [split(each, f"{path}/{i}", tensors) for i, each in enumerate(value)]}
    if isinstance(value, list) or type(value).__name__ == "deque":
        return [split(each, f"{path}/{i}", tensors) for i, each in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bool, int, float, str)):  # an enumeration's member, numpy's float64
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    raise TypeError(
        f"{path}: a {type(value).__name__} is neither a tensor nor a JSON value; give it a state_dict() or leave it out"
    )


def join(value: Any, tensors: Mapping[str, Any]) -> Any:
    """The inverse of ``split``."""
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__dtype__" in value:
            return getattr(torch, value["__dtype__"])
        if "__tuple__" in value:
            return tuple(join(each, tensors) for each in value["__tuple__"])
        return {key: join(each, tensors) for key, each in value["__dict__"]}
    if isinstance(value, list):
        return [join(each, tensors) for each in value]
    return value


def located(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """(keys and places that lead to it, key of the tensor) of all that a split value refers to."""
    if isinstance(value, dict):
        if "__tensor__" in value:
            yield path, value["__tensor__"]
        for i, each in enumerate(value.get("__tuple__", [])):
            yield from located(each, (*path, i))
        for key, each in value.get("__dict__", []):
            yield from located(each, (*path, key))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from located(each, (*path, i))


def references(value: Any) -> list[str]:
    """The keys of the tensors that a split value refers to."""
    return [key for _, key in located(value)]
