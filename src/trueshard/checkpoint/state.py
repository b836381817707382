"""What a checkpoint holds, by name: the tensors and the JSON values of models, optimizers and the user's own entries.

- A tensor's key is its path: ``model/<name>``, ``optimizer/<parameter>/<state>``, ``more/<path>``. Several models or
  optimizers add their key: ``model/<key>/<name>``.
- A tie is one tensor. State that an optimizer does not have is simply not there.
- Taking the state has no side effect: no optimizer steps, nothing is gathered, nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trueshard import names

Tensors = dict[str, torch.Tensor]


def models_of(model: Any) -> dict[str, nn.Module]:
    """``model`` as a dict: key prefix → module."""
    if model is None:
        return {}
    if isinstance(model, Mapping):
        return {f"model/{key}": value for key, value in model.items()}
    return {"model": model}


def optimizers_of(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """``optimizer`` as a dict: key prefix → optimizer."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        return {f"optimizer/{key}": value for key, value in optimizer.items()}
    return {"optimizer": optimizer}


def model_tensors(model: nn.Module) -> tuple[Tensors, dict[str, str]]:
    """The tensors of ``model.state_dict()``, each once, and for every further name of a tie the name it is under."""
    first: dict[int, str] = {}
    tensors: Tensors = {}
    ties: dict[str, str] = {}
    for name, value in names.unwrap(model).state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) in first:
            ties[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors[name] = value.detach()
    return tensors, ties


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """``id`` of each parameter → its first name (after the model's key, when there are several)."""
    found: dict[int, str] = {}
    for prefix, model in models.items():
        inside = prefix.partition("/")[2]
        for name, _, _, parameter in names.named_tensors(model, "parameters"):
            found.setdefault(id(parameter), f"{inside}/{name}" if inside else name)
    return found


def optimizer_state(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> tuple[Tensors, dict[str, Any]]:
    """An optimizer's state tensors by ``<parameter>/<key>``, and the rest as JSON values.

    Raises:
        ValueError: it holds a parameter that is in none of the models saved with it.
    """
    groups = []
    for g, group in enumerate(optimizer.param_groups):
        members = []
        for parameter in group["params"]:
            if id(parameter) not in name_of:
                raise ValueError(
                    f"{type(optimizer).__name__}: a parameter of group {g}, of shape {tuple(parameter.shape)}, is in "
                    "none of the models given; pass the model that owns it as model="
                )
            members.append(name_of[id(parameter)])
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": members, "settings": settings})
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            where = f"{name_of[id(parameter)]}/{key}"
            if isinstance(value, torch.Tensor):
                tensors[where] = value
            else:
                values[where] = value
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values}


def split(value: Any, path: str, tensors: Tensors) -> Any:
    """The user's entry with its tensors taken out into ``tensors`` and a reference left in their place.

    Raises:
        TypeError: something that is neither a tensor nor a JSON value; the message names its path.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"__tensor__": path}
    if hasattr(value, "state_dict"):
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
    if isinstance(value, list):
        return [split(each, f"{path}/{i}", tensors) for i, each in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{path}: a {type(value).__name__} is neither a tensor nor a JSON value; give it a state_dict()")


def join(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of ``split``."""
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__tuple__" in value:
            return tuple(join(each, tensors) for each in value["__tuple__"])
        return {key: join(each, tensors) for key, each in value["__dict__"]}
    if isinstance(value, list):
        return [join(each, tensors) for each in value]
    return value


def references(value: Any) -> Iterator[str]:
    """The keys of the tensors that a split entry refers to."""
    if isinstance(value, dict):
        if "__tensor__" in value:
            yield value["__tensor__"]
        for each in value.get("__tuple__", []):
            yield from references(each)
        for _, each in value.get("__dict__", []):
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)
