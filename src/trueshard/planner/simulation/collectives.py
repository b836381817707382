"""What torch's collective operators mean: kind, bytes, group. By the ring algorithms, a rank's own part not counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from trueshard import _torch
from trueshard.planner.events import Collective

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")

_SILENT = {"wait_tensor", "barrier", "monitored_barrier_"}


def nbytes(value: torch.Tensor | Iterable[Any]) -> int:
    """Of a tensor, or of all in a nested list."""
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.itemsize
    return sum(nbytes(each) for each in value)


def _sent_around(a: Any) -> tuple[int, int]:
    """An all-to-all: (all that arrives, what others send)."""
    output, splits, group = a[0], a[3], group_of(a[2])
    whole = nbytes(output)
    if not splits:
        return whole, whole - whole // group.size()
    row = whole // max(1, output.shape[0])
    return whole, row * (sum(splits) - splits[group.rank()])


def _reduced(tensors: Any, group: Any) -> tuple[int, int]:
    ranks, whole = group_of(group).size(), nbytes(tensors)
    return whole, 2 * (ranks - 1) * whole // ranks


def _scattered(a: Any) -> tuple[int, int]:
    return nbytes(a[1]), nbytes(a[1]) - nbytes(a[0])


def _gathered(a: Any) -> tuple[int, int]:
    return nbytes(a[0]), nbytes(a[0]) - nbytes(a[1])


def _elsewhere(tensors: Any, group: Any, root: int) -> tuple[int, int]:
    whole = nbytes(tensors)
    return whole, 0 if group_of(group).rank() == root else whole


def group_of(value: Any) -> dist.ProcessGroup:
    """The process group that an operator's argument names."""
    if isinstance(value, str):
        return _torch.group_named(value)
    return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)


#: Operator → (kind, where its group is among the arguments, (whole bytes, received bytes) of its arguments).
_RULES: dict[str, tuple[Collective, int, Callable[[Any], tuple[int, int]]]] = {
    "_allgather_base_": ("all_gather", 2, _gathered),
    "allgather_": ("all_gather", 2, _gathered),
    "all_gather_into_tensor": ("all_gather", 2, lambda a: (a[1] * nbytes(a[0]), (a[1] - 1) * nbytes(a[0]))),
    "_reduce_scatter_base_": ("reduce_scatter", 2, _scattered),
    "reduce_scatter_": ("reduce_scatter", 2, _scattered),
    "reduce_scatter_tensor": ("reduce_scatter", 3, lambda a: (nbytes(a[0]), nbytes(a[0]) * (a[2] - 1) // a[2])),
    "allreduce_": ("all_reduce", 1, lambda a: _reduced(a[0], a[1])),
    "all_reduce": ("all_reduce", 2, lambda a: _reduced(a[0], a[2])),
    "all_reduce_": ("all_reduce", 2, lambda a: _reduced(a[0], a[2])),
    "alltoall_base_": ("all_to_all", 2, _sent_around),
    "all_to_all_single": (
        "all_to_all",
        3,
        lambda a: _sent_around((a[0], None, a[3], a[1])),
    ),
    "broadcast_": ("broadcast", 1, lambda a: _elsewhere(a[0], a[1], a[2])),
    "broadcast": ("broadcast", 2, lambda a: _elsewhere(a[0], a[2], a[1])),
}


def described(func: Any, args: Any) -> tuple[Collective, dist.ProcessGroup, int, int] | None:
    """(kind, group, bytes of the whole tensor, bytes that this rank receives); None for what moves nothing.

    Raises:
        NotImplementedError: an operator whose traffic is not known here.
    """
    name = func._schema.name.partition("::")[2]
    if name in _SILENT:
        return None
    if name not in _RULES:
        raise NotImplementedError(f"the planner does not know what the collective {func._schema.name} communicates")
    kind, position, rule = _RULES[name]
    whole, received = rule(args)
    return kind, group_of(args[position]), whole, received
