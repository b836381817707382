"""Which parameters a backward reached: ranks must agree, or their gradients would be reduced into one another.

FSDP2 reduces the gradients that a rank has, packed together. Where a rank reached other parameters than the next (an
expert to which none of its tokens went), the packs do not fit, or worse, fit by accident.

- Units that hold a list of modules (experts) are reduced whole, zeros where a rank has no gradient, which is exact.
  What no rank reached keeps its gradient None, as on one device: one small all-reduce a backward tells.
- Anywhere else a rank that misses a gradient compares with the others, and a difference is an error. When all fit by
  accident, all miss some; so no rank waits for one that has nothing to compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import device_of, gather_objects, groups_of


class Usage:
    """Follows which parameters of one sharded model get gradients.

    Args:
        mesh: the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._lists: list[tuple[ShardedModule, list[nn.Parameter]]] = []
        self._elsewhere: list[tuple[str, nn.Parameter]] = []
        self._marked: set[int] = set()
        self._used: set[int] = set()
        self._empty: set[int] | None = None

    def add(self, module: ShardedModule, parameters: Sequence[tuple[str, nn.Parameter]], *, holds_list: bool) -> None:
        """Follow the sharded ``parameters`` of a unit."""
        if holds_list and self.mesh.size() > 1 and hasattr(module, "set_reduce_scatter_unused_params"):  # 2.13 on
            module.set_reduce_scatter_unused_params(True, recurse=False)
            self._lists.append((module, [parameter for _, parameter in parameters]))
        elif self.mesh.size() > 1:
            self._elsewhere += parameters

    def begin(self) -> None:
        """A backward begins."""
        if self._empty is None:
            self._empty = {id(p) for _, parameters in self._lists for p in parameters if p.grad is None}
        for module, _ in self._lists:
            for _, sharded, gathered in _torch.gathered_parameters(module, recurse=False):
                if gathered.requires_grad and id(gathered) not in self._marked:
                    self._marked.add(id(gathered))
                    gathered.register_post_accumulate_grad_hook(self._marker(id(sharded)))

    def _marker(self, key: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self._used.add(key)

    def end(self) -> None:
        """A backward that reduced gradients has ended. Collective, where anything is to be told.

        Raises:
            RuntimeError: ranks reached different parameters; the message names one and the remedy.
        """
        self._forget_zeros()
        missing = [name for name, parameter in self._elsewhere if parameter.requires_grad and parameter.grad is None]
        if missing and len(missing) < len(self._elsewhere):
            self._compare(missing)

    def forget(self) -> None:
        """A backward was cut short."""
        self._used.clear()
        self._empty = None

    def _forget_zeros(self) -> None:
        empty, self._empty = self._empty, None
        parameters = [p for _, parameters in self._lists for p in parameters if p.requires_grad]
        if empty is None or not parameters:
            return
        reached = torch.tensor(
            [id(p) in self._used for p in parameters], dtype=torch.uint8, device=device_of(self.mesh)
        )
        for group in groups_of(self.mesh):
            dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=group)
        for parameter, flag in zip(parameters, reached.tolist(), strict=True):
            if not flag and id(parameter) in empty:
                parameter.grad = None
        self._used.clear()

    def _compare(self, missing: list[str]) -> None:
        digest = int.from_bytes(hashlib.sha256("\n".join(missing).encode()).digest()[:7], "big")
        both = torch.tensor([digest, -digest], dtype=torch.int64, device=device_of(self.mesh))
        for group in groups_of(self.mesh):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        if int(both[0]) == -int(both[1]):
            return
        everyone: list[Any] = gather_objects(missing, self.mesh)
        name = next(name for name in sorted(set().union(*everyone)) if not all(name in each for each in everyone))
        without = [rank for rank, each in enumerate(everyone) if name in each]
        raise RuntimeError(
            f"{name!r} got a gradient on some ranks but not on ranks {without}, so this step's gradients are mixed up: "
            "let every rank use the same parameters (add 0 * module(x).sum() where one is skipped)"
        )
