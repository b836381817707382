"""Counts the bytes that a rank receives, from the collectives themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Inside, adds up received bytes by kind, as the ring algorithms receive them. A rank's own part does not count.

    all-gather of an output of B bytes over N ranks: (N-1)/N · B; reduce-scatter of an input of B bytes: (N-1)/N · B;
    all-reduce of B bytes: 2 (N-1)/N · B; all-to-all: what the other ranks send; broadcast, reduce, gather and scatter:
    what arrives at this rank, where a reduce is taken for a chain that ends at the root.

    Raises:
        NotImplementedError: a collective was called whose bytes are not known here.
    """

    def __init__(self) -> None:
        super().__init__()
        kinds = ["all_gather", "reduce_scatter", "all_reduce", *{kind: None for kind, _ in _RULES.values()}]
        self.received: dict[str, float] = dict.fromkeys(kinds, 0.0)
        self.calls: dict[str, int] = dict.fromkeys(kinds, 0)

    @property
    def total(self) -> float:
        """bytes"""
        return sum(self.received.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does to its local tensors comes here in its turn
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._count(func._schema.name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name in _SILENT:
            return
        if name not in _RULES:
            raise NotImplementedError(f"{name} is a collective whose received bytes are not known: add it to the rules")
        kind, rule = _RULES[name]
        self.received[kind] += rule(args)
        self.calls[kind] += 1


def _bytes(value: torch.Tensor | Iterable[Any]) -> int:
    """Of a tensor, or of all in a nested list."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    return sum(_bytes(each) for each in value)


def _group(value: Any) -> dist.ProcessGroup:
    if isinstance(value, str):
        return _resolve_process_group(value)  # type: ignore[arg-type]
    return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)


def _all_reduced(tensors: Any, group: Any) -> float:
    ranks = _group(group).size()
    return 2 * (ranks - 1) / ranks * _bytes(tensors)


def _exchanged(output: torch.Tensor, group: Any, splits: list[int]) -> float:
    """Rows from the others, of an all-to-all into ``output``, by ``splits`` (none: equal parts)."""
    group = _group(group)
    if not splits:
        return (group.size() - 1) / group.size() * _bytes(output)
    row = _bytes(output) / max(1, output.shape[0])
    return row * (sum(splits) - splits[group.rank()])


def _exchanged_functional(args: Any) -> float:
    tensor, received, _, group = args
    row = _bytes(tensor) / max(1, tensor.shape[0]) if tensor.numel() else tensor[:1].numel() * tensor.itemsize
    return row * (sum(received) - received[_group(group).rank()])


def _at_root(args: Any, whole: Any, part: Any) -> float:
    return _bytes(whole) - _bytes(part) if _group(args[2]).rank() == args[3] else 0


def _elsewhere(tensors: Any, group: Any, root: int) -> float:
    return 0 if _group(group).rank() == root else _bytes(tensors)


_RULES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "c10d::_allgather_base_": ("all_gather", lambda a: _bytes(a[0]) - _bytes(a[1])),
    "c10d::allgather_": ("all_gather", lambda a: _bytes(a[0]) - _bytes(a[1])),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", lambda a: _bytes(a[0]) - _bytes(a[1])),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", lambda a: (a[1] - 1) * _bytes(a[0])),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", lambda a: (a[1] - 1) * _bytes(a[0])),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", lambda a: _bytes(a[1]) - _bytes(a[0])),
    "c10d::reduce_scatter_": ("reduce_scatter", lambda a: _bytes(a[1]) - _bytes(a[0])),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", lambda a: _bytes(a[1]) - _bytes(a[0])),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", lambda a: (a[2] - 1) / a[2] * _bytes(a[0])),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", lambda a: (a[2] - 1) / a[2] * _bytes(a[0])),
    "c10d::allreduce_": ("all_reduce", lambda a: _all_reduced(a[0], a[1])),
    "c10d::allreduce_coalesced_": ("all_reduce", lambda a: _all_reduced(a[0], a[1])),
    "_c10d_functional::all_reduce": ("all_reduce", lambda a: _all_reduced(a[0], a[2])),
    "_c10d_functional::all_reduce_": ("all_reduce", lambda a: _all_reduced(a[0], a[2])),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", lambda a: _all_reduced(a[0], a[2])),
    "c10d::alltoall_base_": ("all_to_all", lambda a: _exchanged(a[0], a[2], a[3])),
    "c10d::alltoall_": ("all_to_all", lambda a: _bytes(a[0]) - _bytes(a[0][_group(a[2]).rank()])),
    "_c10d_functional::all_to_all_single": ("all_to_all", _exchanged_functional),
    "_dtensor::shard_dim_alltoall": ("all_to_all", lambda a: _exchanged(a[0], a[3], [])),
    "c10d::broadcast_": ("broadcast", lambda a: _elsewhere(a[0], a[1], a[2])),
    "_c10d_functional::broadcast": ("broadcast", lambda a: _elsewhere(a[0], a[2], a[1])),
    "_c10d_functional::broadcast_": ("broadcast", lambda a: _elsewhere(a[0], a[2], a[1])),
    "c10d::reduce_": ("reduce", lambda a: _bytes(a[0]) if _group(a[1]).rank() == a[3] else 0),
    "c10d::gather_": ("gather", lambda a: _at_root(a, a[0], a[1])),
    "c10d::scatter_": ("scatter", lambda a: _elsewhere(a[0], a[2], a[3])),
    "c10d::recv_": ("receive", lambda a: _bytes(a[0])),
    "c10d::recv_any_source_": ("receive", lambda a: _bytes(a[0])),
    "_c10d_functional::irecv": ("receive", lambda a: _bytes(a[0])),
}
"""Operator → (kind, its arguments → bytes)."""

_SILENT = {
    *("c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan", "c10d::send"),
    *("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::isend"),
}
"""Operators by which a rank receives nothing."""
