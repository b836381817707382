"""Counts the bytes that a rank receives, from the collectives themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Inside, adds up received bytes by kind, as the ring algorithms receive them.

    all-gather of an output of B bytes over N ranks: (N-1)/N · B; reduce-scatter of an input of B bytes: (N-1)/N · B;
    all-reduce of B bytes: 2 (N-1)/N · B.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
        self.calls: dict[str, int] = dict.fromkeys(self.received, 0)

    @property
    def total(self) -> float:
        """bytes"""
        return sum(self.received.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d._allgather_base_" in name:
            self._add("all_gather", args[0], args[0].numel() // args[1].numel(), 1)
        elif "c10d._reduce_scatter_base_" in name:
            self._add("reduce_scatter", args[1], args[1].numel() // args[0].numel(), 1)
        elif "c10d.allreduce_" in name:
            import torch.distributed as dist

            for tensor in args[0]:
                self._add("all_reduce", tensor, dist.get_world_size(), 2)
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, tensor: torch.Tensor, ranks: int, times: int) -> None:
        self.received[kind] += times * (ranks - 1) / ranks * tensor.numel() * tensor.itemsize
        self.calls[kind] += 1
