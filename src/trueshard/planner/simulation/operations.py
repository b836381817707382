"""What an operator costs: whether it runs anything at all, and its floating-point operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_NOTHING = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "lift_fresh",
    "lift",
    "_to_dlpack",
    "set_",
    "resize_",
    "_unsafe_view",
    "_reshape_alias",
    "record_stream",
}
"""Operators that launch no kernel, beside views."""

_ATTENTION_ON_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": False,
    "_scaled_dot_product_flash_attention_for_cpu_backward": True,
}


_GROUPED = torch.ops.aten._grouped_mm.default
"""Matrix products of groups of rows, such as experts'."""


@dataclass(frozen=True)
class Operation:
    """What is known of an operator by itself."""

    is_free: bool
    """It launches no kernel: a view, or memory that is not written."""
    is_attention: bool
    reduces_in_place: bool
    """A loss whose reduced value lies in memory made for the unreduced one."""
    flops: Callable[..., int] | None


@functools.cache
def operation(func: Any) -> Operation:
    """What is known of ``func``."""
    name = func._schema.name.partition("::")[2]
    arguments = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
    returns = [each.alias_info for each in func._schema.returns]
    is_view = bool(returns) and all(each is not None for each in returns) and not any(a.is_write for a in arguments)
    return Operation(
        is_view or name in _NOTHING,
        "attention" in name,
        name in ("mse_loss", "smooth_l1_loss"),
        flop_registry.get(func._overloadpacket),
    )


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Every tensor among an operator's arguments or results: these nest lists and tuples, nothing else."""
    found: list[torch.Tensor] = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += tensors_of(each)
    return found


def result_bytes(func: Any, args: Any) -> int | None:
    """Bytes of the storage under an operator's result, where they are more than the result needs; None where not.

    A reduced loss is written into memory made for the unreduced one. Source: ``mse_loss_out`` of ATen/native/Loss.cpp.
    """
    if operation(func).reduces_in_place and (args[2] if len(args) > 2 else 1):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return math.prod(shape) * torch.result_type(args[0], args[1]).itemsize
    return None


def flops_of(func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> int:
    """Floating-point operations of a matrix product, convolution or attention by torch's own formulas; else 0."""
    name = func._schema.name.partition("::")[2]
    if name in _ATTENTION_ON_CPU:
        return _attention(args, backward=_ATTENTION_ON_CPU[name])
    if func is _GROUPED:
        return _grouped_flops(*args[:2])
    formula = operation(func).flops
    if formula is None:
        return 0
    made: Any = results[0] if len(results) == 1 else tuple(results)
    if name == "convolution_backward":  # what nobody asked for is missing among the results
        given = iter(results)
        made = tuple(next(given) if wanted else None for wanted in args[-1])
    return int(formula(*args, **kwargs, out_val=made))


def run_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` on fake tensors."""
    if func is _GROUPED:
        return _grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """``_grouped_mm``, of which torch's rule for fake tensors takes bfloat16 alone, while kernels take other floats.

    Source: ``create_grouped_gemm_output_tensor`` of GroupedMMUtils.h; rows are a multiple of 16 bytes in real models.
    """
    groups = [offs.shape[0]] if left.dim() == right.dim() == 2 else []
    groups = [left.shape[0]] if left.dim() == right.dim() == 3 else groups
    return left.new_empty([*groups, left.shape[-2], right.shape[-1]], dtype=out_dtype or left.dtype)


def _grouped_flops(left: torch.Tensor, right: torch.Tensor) -> int:
    """Every row is multiplied with one of the groups: 2·m·k·n."""
    if left.dim() == 3 and right.dim() == 2:
        return int(2 * right.numel() * left.shape[-2])
    return int(2 * left.numel() * right.shape[-1])


def _attention(args: Any, *, backward: bool) -> int:
    """Two products forward, five backward, as torch counts attention on other devices: 2·b·h·s·t·d each."""
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, queries, width = query.shape
    return (10 if backward else 4) * int(batch * heads * queries * key.shape[-2] * width)
