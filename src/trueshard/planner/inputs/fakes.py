"""Tensors in lists, tuples and dicts.

Fake stand-ins of a model's tensors: the same shapes, dtypes, ties and settings, and no memory.

Called inside ``fake_tensors``, where every stand-in lies on the CPU. Outside, stand-ins are real, on torch's default
device, and their values are whatever the memory held.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trueshard import _torch
from trueshard.errors import with_kind
from trueshard.model import intent, names


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` called on all that is no list, tuple or mapping, in containers of the same kinds."""
    if isinstance(value, Mapping):
        made = {key: mapped(function, each) for key, each in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        items = [mapped(function, each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def twin(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """A copy of ``model`` on fake tensors; ``model`` itself stays as it is, and none of its data is copied.

    Args:
        model: any module, on any device.
        dtype: what floating-point parameters and buffers become; None: what they are.

    Returns:
        The copy, and the stand-in of each tensor by the tensor's ``id``.

    Raises:
        ValueError: the model is sharded, has parameters without a shape, or cannot be copied.
    """
    if any(isinstance(module, _torch.ShardedModule) for module in model.modules()):
        raise ValueError("the model is sharded already; give the unsharded model, or a function that makes it")
    stand_ins = _stand_ins(model, dtype)
    kept = {id(each): each for module in model.modules() for each in _torch.tensors_in(plain_attributes(module))}
    memo: dict[int, Any] = {**kept, **stand_ins}
    try:
        copied: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # whatever an attribute raises that cannot be copied
        raise ValueError(
            f"the {type(model).__name__} cannot be copied ({with_kind(error)}); give a function that makes it instead"
        ) from error
    _replace_plain(copied, {})
    return copied, stand_ins


def make_fake(model: nn.Module, dtype: torch.dtype | None = None) -> dict[int, torch.Tensor]:
    """Put stand-ins in the place of all tensors of ``model``, which nobody else holds.

    Args:
        model: any module, also on the meta device.
        dtype: what floating-point parameters and buffers become; None: what they are.

    Returns:
        The stand-in of each tensor by the tensor's ``id``, for optimizers that hold it. They are valid as long as the
        caller keeps the originals.

    Raises:
        ValueError: a parameter without a shape.
    """
    stand_ins = _stand_ins(model, dtype)
    for kind, registry in (("parameters", _torch.own_parameters), ("buffers", _torch.own_buffers)):
        for _, module, attribute, tensor in list(names.named_tensors(model, kind)):
            registry(module)[attribute] = stand_ins[id(tensor)]
    _replace_plain(model, stand_ins)
    return stand_ins


def _stand_ins(model: nn.Module, dtype: torch.dtype | None) -> dict[int, Any]:
    made: dict[int, Any] = {}
    for kind in ("parameters", "buffers"):
        for name, _, _, tensor in names.named_tensors(model, kind):
            if is_lazy(tensor):
                raise ValueError(
                    f"{name!r} has no shape yet (its module initialises itself at the first forward): give the sizes "
                    "when the module is made, or run the model once before planning"
                )
            if id(tensor) not in made:
                made[id(tensor)] = _stand_in(tensor, dtype)
    return made


def _stand_in(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype)
    if not isinstance(tensor, nn.Parameter):
        return fake.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    for key, value in intent.attributes_of(tensor).items():
        setattr(parameter, key, value)
    for hook in (_torch.gradient_hooks(tensor)[0] or {}).values():
        parameter.register_hook(hook)
    return parameter


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides parameters, buffers and modules."""
    return {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}


def _replace_plain(model: nn.Module, stand_ins: dict[int, Any]) -> None:
    def replaced(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or _torch.is_fake(value):
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = _stand_in(value, None)
        return stand_ins[id(value)]

    for module in model.modules():
        for key, value in plain_attributes(module).items():
            if any(not _torch.is_fake(each) for each in _torch.tensors_in(value)):
                vars(module)[key] = mapped(replaced, value)
