"""Copies of modules with other parameters, on which trials compute; the modules stay as they are."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from trueshard import _torch
from trueshard.model import names
from trueshard.parallel.forward_trial import copy_without_hooks

_KERNELS = {"_experts_implementation": ("eager",), "_attn_implementation": ("sdpa", "eager")}
"""Settings of transformers → kernels that compute on the CPU, in float64."""
LARGE = 1 << 20
"""Elements from which on random values have less memory than elements."""


def copy_tree(
    module: nn.Module,
    parameter: Callable[[torch.Tensor], nn.Parameter],
    buffer: Callable[[torch.Tensor], torch.Tensor],
    *,
    replaced: Mapping[int, Any] | None = None,
    finish: Callable[[nn.Module, nn.Module], None] = lambda original, copied: None,
    _memo: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Return a copy of a module and all below it, in evaluation mode, without hooks and wrappers.

    Args:
        module: the module.
        parameter: returns what stands for a parameter; a tie stays one.
        buffer: returns what stands for a buffer.
        replaced: ``id`` of a module below, or of an attribute such as a configuration → what copies have instead.
        finish: called with each module and its copy.
    """
    memo = {} if _memo is None else _memo
    original, replaced = names.unwrap(module), replaced or {}
    if id(original) in memo:
        return memo[id(original)]
    if id(original) in replaced:
        return memo.setdefault(id(original), replaced[id(original)])
    copied = memo[id(original)] = copy_without_hooks(original)
    state = copied.__dict__
    state["training"] = False
    state["_parameters"] = {
        key: None if p is None else memo.setdefault(id(p), parameter(p))  # type: ignore[arg-type]
        for key, p in _torch.own_parameters(original).items()
    }
    state["_buffers"] = {key: None if b is None else buffer(b) for key, b in _torch.own_buffers(original).items()}
    state["_modules"] = {
        key: None
        if child is None
        else copy_tree(child, parameter, buffer, replaced=replaced, finish=finish, _memo=memo)
        for key, child in _torch.own_modules(original).items()
    }
    for key, value in list(state.items()):
        if id(value) in replaced:
            state[key] = replaced[id(value)]
        elif isinstance(value, types.MethodType) and value.__self__ is original:
            state[key] = types.MethodType(value.__func__, copied)
    finish(original, copied)
    return copied


def copy_without_memory(module: nn.Module, replaced: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a copy with its own buffers, and parameters on the meta device; ``replaced``: as of ``copy_tree``."""
    return copy_tree(
        module,
        lambda original: nn.Parameter(torch.empty_like(original, device="meta"), requires_grad=False),
        lambda buffer: buffer,
        replaced=replaced,
    )


def random_copy(
    module: nn.Module,
    noise: torch.Generator,
    *,
    replaced: Mapping[int, Any] | None = None,
    finish: Callable[[nn.Module, nn.Module], None] = lambda original, copied: None,
) -> nn.Module:
    """Return a copy of a module with its own buffers, and random weights in float32 that take no gradients."""
    return copy_tree(
        module,
        lambda parameter: nn.Parameter(random_values(parameter, noise), requires_grad=False),
        lambda buffer: real_values(buffer, noise),
        replaced=replaced,
        finish=finish,
    )


def copy_on_cpu(
    module: nn.Module,
    parameter: Callable[[torch.Tensor], nn.Parameter],
    dtype: torch.dtype,
    *,
    replaced: Mapping[int, Any] | None = None,
    finish: Callable[[nn.Module, nn.Module], None] = lambda original, copied: None,
) -> nn.Module:
    """Return a copy with its own buffers, in ``dtype``, and kernels that compute in it on the CPU."""
    noise = torch.Generator().manual_seed(1)
    configs: dict[int, Any] = {}
    for _, inner in names.named_modules(module):
        config = inner.__dict__.get("config")
        for key, kernels in _KERNELS.items():
            if getattr(config, key, kernels[0]) not in kernels:
                configs.setdefault(id(config), copy.copy(config)).__dict__[key] = kernels[0]

    def buffer(original: torch.Tensor) -> torch.Tensor:
        value = real_values(original.detach(), noise)
        return value.to(dtype) if value.is_floating_point() else value.clone()

    return copy_tree(module, parameter, buffer, replaced=configs | dict(replaced or {}), finish=finish)


def replaced_forward(module: nn.Module) -> str | None:
    """Return the name of a module with a forward of its object that a copy would call on the original; None: none."""
    for name, inner in names.named_modules(module):
        forward = inner.__dict__.get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not inner:
            return name
    return None


class CheapMatrices(TorchFunctionMode):
    """Multiply by large matrices at the cost of a sum: all features of a token are mixed."""

    def __torch_function__(self, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and len(args) > 1 and args[1].numel() >= LARGE:
            inputs, (rows, columns) = args[0], args[1].shape
            features = torch.arange(rows).remainder(columns)
            return inputs[..., features] + inputs.sum(-1, keepdim=True) / columns**0.5
        return function(*args, **kwargs)


def real_values(buffer: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Return a buffer on the CPU, in float32 where it has floats; of one without memory random numbers."""
    if type(buffer) is not torch.Tensor or buffer.is_meta:  # a fake tensor has a class of its own
        return random_values(buffer, noise)
    return buffer.cpu().float() if buffer.is_floating_point() else buffer.cpu()


def random_values(
    tensor: torch.Tensor, noise: torch.Generator, dtype: torch.dtype = torch.float32, *, centred: bool = False
) -> torch.Tensor:
    """Return random numbers of the shape of ``tensor``, in ``dtype`` where it has floats; large ones share memory.

    ``centred``: matrices have the mean 0 and keep the size of features, so that no router prefers one expert.
    """
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    scale = 1.0 if tensor.ndim < 2 else tensor.shape[-1] ** -0.5 * (12**0.5 if centred else 1.0)
    low = 0.4 if tensor.ndim > 1 and not centred else 0.5
    if tensor.numel() < LARGE:
        return torch.rand(tensor.shape, generator=noise).sub_(low if tensor.ndim > 1 else -low).mul_(scale).to(dtype)
    # Row i begins 7 elements after row i - 1, a matrix 13 after the one before: no two rows are equal.
    strides = (13,) * (tensor.ndim - 2) + (7, 1) if tensor.ndim > 1 else (1,)
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    return torch.rand(size, generator=noise).sub_(low).mul_(scale).to(dtype).as_strided(tensor.shape, strides)


def kind_of(block: nn.Module) -> Any:
    """Return what blocks that compute alike have in common: modules, shapes, settings, functions of their own."""
    plain = (bool, int, float, str, types.FunctionType, types.MethodType, functools.partial)
    kind = set()
    for name, module in block.named_modules():
        settings = ((k, _comparable(v)) for k, v in vars(module).items() if isinstance(v, plain))
        shapes = ((key, None if p is None else p.shape) for key, p in _torch.own_parameters(module).items())
        kind.add((name, _torch.own_class(module), frozenset(s for s in settings if s[0] != "layer_idx"), *shapes))
    return frozenset(kind)


def _comparable(setting: Any) -> Any:
    if isinstance(setting, functools.partial):
        return setting.func, repr(setting.args), repr(setting.keywords)
    return getattr(setting, "__func__", setting)
