"""Facts about single operators: whether one launches a kernel, its FLOPs, and what a collective moves.

Collectives are counted by the ring algorithms: bytes that reach this rank, its own part left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from trueshard import _torch
from trueshard.planner.trace import Collective

COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of collective operators."""

FUSED = "fused"
"""Namespace of the kernels of ``scan_kernels.toml``: whose last argument is its FLOPs."""

_WITHOUT_TRAFFIC = ("wait_tensor", "barrier", "monitored_barrier_")
_WITHOUT_KERNEL = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"),
    *("lift", "_to_dlpack", "set_", "resize_", "_unsafe_view", "_reshape_alias", "record_stream"),
}
"""Operators besides views that launch no kernel."""
_LOSSES = ("mse_loss", "smooth_l1_loss")
"""Losses whose reduced value lies in memory allocated for the unreduced one."""
_ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_GROUPED_MM = torch.ops.aten._grouped_mm.default
"""Matrix products of groups of rows, such as experts'."""


@functools.cache
def short_name(func: Any) -> str:
    """Return the operator's name without namespace and overload, for example ``"mul_"``."""
    name: str = _torch.schema_of(func).name
    return name.partition("::")[2]


@functools.cache
def packet_name(func: Any) -> str:
    """Return the operator's name without overload, for example ``"aten.mul_"``."""
    return str(_torch.packet_of(func))


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return every tensor among an operator's arguments or results, which nest lists and tuples, nothing else."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_of(value)
    return tensors


def nbytes(value: torch.Tensor | Iterable[Any]) -> int:
    """Return the bytes of a tensor's elements, or of all tensors in a nested list."""
    return sum(tensor.nbytes for tensor in tensors_of([value]))


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments that it writes in place."""
    return tensors_of(args[i] if i < len(args) else kwargs.get(name) for i, name in _written_positions(func))


@functools.cache
def _written_positions(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(_torch.schema_of(func).arguments)
    return tuple(
        (i, argument.name)
        for i, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def is_free(func: Any) -> bool:
    """True if the operator launches no kernel: a view, or memory that is not written."""
    returns = [alias.alias_info for alias in _torch.schema_of(func).returns]
    is_view = bool(returns) and all(alias is not None for alias in returns) and not _written_positions(func)
    return is_view or short_name(func) in _WITHOUT_KERNEL


def storage_bytes(func: Any, args: Any) -> int | None:
    """Return the bytes of the storage under an operator's result where it is larger than the result; else None.

    A reduced loss is written into memory made for the unreduced one. Source: ``mse_loss_out`` of ATen/native/Loss.cpp.
    """
    if short_name(func) in _LOSSES and (args[2] if len(args) > 2 else 1):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return math.prod(shape) * torch.result_type(args[0], args[1]).itemsize
    return None


def run_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on fake tensors."""
    if short_name(func) == "wait_tensor":  # of fake tensors it returns new memory, of real ones what it is given
        return args[0]
    return _grouped_mm(*args, **kwargs) if func is _GROUPED_MM else _torch.run_fake(func, args, kwargs)


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """``_grouped_mm`` for every float: torch's rule for fake tensors accepts bfloat16 alone, kernels accept others.

    Source: ``create_grouped_gemm_output_tensor`` of GroupedMMUtils.h; rows are a multiple of 16 bytes in real models.
    """
    groups = [offs.shape[0]] if left.dim() == right.dim() == 2 else []
    groups = [left.shape[0]] if left.dim() == right.dim() == 3 else groups
    return left.new_empty([*groups, left.shape[-2], right.shape[-1]], dtype=out_dtype or left.dtype)


# Floating-point operations


def flops_of(func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> int:
    """Return the FLOPs of a matrix product, convolution or attention by torch's formulas; 0 for other operators."""
    name = short_name(func)
    if func.namespace == FUSED:
        return int(args[-1])
    if name.startswith(_ATTENTION_ON_CPU):
        # Two products forward, five backward, as torch counts attention on other devices: 2·b·h·s·t·d each.
        query, key = args[:2] if name == _ATTENTION_ON_CPU else args[1:3]
        batch, heads, queries, width = query.shape
        return (4 if name == _ATTENTION_ON_CPU else 10) * int(batch * heads * queries * key.shape[-2] * width)
    if func is _GROUPED_MM:
        # Every row is multiplied with one of the groups: 2·m·k·n.
        left, right = args[:2]
        one_left = left.dim() == 3 and right.dim() == 2
        return int(2 * right.numel() * left.shape[-2] if one_left else 2 * left.numel() * right.shape[-1])
    formula = flop_registry.get(_torch.packet_of(func))
    if formula is None:
        return 0
    made: Any = results[0] if len(results) == 1 else tuple(results)
    if name == "convolution_backward":  # gradients that were not requested are missing among the results
        gradients = iter(results)
        made = tuple(next(gradients) if requested else None for requested in args[-1])
    return int(formula(*args, **kwargs, out_val=made))


# Collectives

_WHOLE: dict[str, tuple[Collective, int, Callable[[Any], int]]] = {
    "_allgather_base_": ("all_gather", 2, lambda args: nbytes(args[0])),
    "allgather_": ("all_gather", 2, lambda args: nbytes(args[0])),
    "all_gather_into_tensor": ("all_gather", 2, lambda args: args[1] * nbytes(args[0])),
    "_reduce_scatter_base_": ("reduce_scatter", 2, lambda args: nbytes(args[1])),
    "reduce_scatter_": ("reduce_scatter", 2, lambda args: nbytes(args[1])),
    "reduce_scatter_tensor": ("reduce_scatter", 3, lambda args: nbytes(args[0])),
    "allreduce_": ("all_reduce", 1, lambda args: nbytes(args[0])),
    "all_reduce": ("all_reduce", 2, lambda args: nbytes(args[0])),
    "all_reduce_": ("all_reduce", 2, lambda args: nbytes(args[0])),
    "alltoall_base_": ("all_to_all", 2, lambda args: nbytes(args[0])),
    "all_to_all_single": ("all_to_all", 3, lambda args: nbytes(args[0])),
    "broadcast_": ("broadcast", 1, lambda args: nbytes(args[0])),
    "broadcast": ("broadcast", 2, lambda args: nbytes(args[0])),
}
"""Operator → (kind, position of the group among the arguments, function from arguments to bytes of the whole)."""

_POSITIONS = {"alltoall_base_": (3, 4), "all_to_all_single": (1, 2), "broadcast_": (2,), "broadcast": (1,)}
"""Operator → positions of the arguments with the rows that arrive from each rank and leave for it, or with the root."""


def traffic(func: Any, args: Any) -> tuple[Collective, dist.ProcessGroup, int, int, int] | None:
    """Return (kind, group, bytes of the whole tensor, bytes that this rank receives, and sends by all-to-all).

    None if nothing moves.

    Raises:
        NotImplementedError: an unknown collective.
    """
    name = short_name(func)
    if name in _WITHOUT_TRAFFIC:
        return None
    if name not in _WHOLE:
        raise NotImplementedError(
            f"the planner does not know what the collective {_torch.schema_of(func).name} communicates"
        )
    kind, position, count = _WHOLE[name]
    group, full = group_of(args[position]), count(args)
    received, sent, here = full - full // group.size(), 0, group.rank()
    if kind == "all_reduce":
        received = 2 * (group.size() - 1) * full // group.size()
    elif kind == "broadcast":
        received = 0 if here == args[_POSITIONS[name][0]] else full
    elif kind == "all_to_all" and args[_POSITIONS[name][0]]:  # else all ranks send equally many
        row = math.prod(args[0].shape[1:]) * args[0].itemsize
        received, sent = (row * (sum(rows) - rows[here]) for rows in map(args.__getitem__, _POSITIONS[name]))
    return kind, group, full, received, sent


def group_of(value: Any) -> dist.ProcessGroup:
    """Return the process group that a collective operator is given."""
    if isinstance(value, str):
        return _torch.group_named(value)
    return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)
