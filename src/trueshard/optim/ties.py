"""Parameters that are one in the whole model, and of which several stages of a pipeline hold a copy: a tied head.

- Stages are sharded alike, each over ranks of its own. So the ranks at one place of their stages hold the same shard
  of each copy, and the copies exchange shards, not whole tensors.
- Copies begin with the first stage's values. After a backward their gradients are added up: each copy has that of the
  whole model, so equal optimizers make equal updates, and the copies stay bit-equal.
- What was accumulated before a backward is the sum already; it is set aside meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch
from trueshard.distributed import device_of
from trueshard.errors import TrueShardRuntimeError, TrueShardTypeError, TrueShardValueError
from trueshard.model import registry


def tie_of(parameter: torch.Tensor) -> Tie | None:
    """Return the tie of ``parameter``; None: no other stage has a copy of it."""
    ties: list[Tie] = [tie for model in registry.models() for tie in model.ties]
    return next((tie for tie in ties if tie.parameter is parameter), None)


def check_stages(argument: str, stages: Any) -> None:
    """Raise TypeError or ValueError unless ``stages``, called ``argument`` in messages, is a 1-D mesh."""
    if not isinstance(stages, DeviceMesh):
        raise TrueShardTypeError(f"{argument} must be a torch.distributed DeviceMesh, not {type(stages).__name__}")
    if stages.ndim != 1:
        raise TrueShardValueError(f'{argument} must be 1-D, one rank of each stage, not {stages.ndim}-D: mesh["stage"]')


def check_added_up(optimizer: torch.optim.Optimizer, ties: Sequence[Tie]) -> None:
    """Raise RuntimeError if ``optimizer`` would step a copy with the gradient of its own stage alone."""
    pending = [tie for tie in ties if tie.is_pending]
    for parameter in (p for group in optimizer.param_groups for p in group["params"]) if pending else ():
        if (tie := next((tie for tie in pending if tie.parameter is parameter), None)) is not None:
            raise TrueShardRuntimeError(
                f"{type(optimizer).__name__} would step {tie.name!r} with the gradient of this stage alone: run "
                "backward by a schedule of torch.distributed.pipelining, which ends by adding up the copies' "
                "gradients, or drop them with zero_grad()"
            )


class Tie:
    """One copy, ``parameter``, called ``name`` in the whole model; ``holders``: those of ``stages`` that have one."""

    def __init__(self, parameter: nn.Parameter, name: str, stages: DeviceMesh, holders: Sequence[int]) -> None:
        self.parameter, self._stages, self._holders = parameter, stages, holders
        self.name = name
        self.is_first = stages.get_local_rank() == holders[0]
        """True for the first stage's copy, the one that counts where each parameter counts once."""
        self.is_pending = False
        """True from the beginning of a backward until a schedule has added up the copies' gradients."""
        self._earlier: torch.Tensor | None = None
        """Gradient accumulated before this backward: the sum over copies already."""

    @property
    def holders(self) -> list[int]:
        """Ranks that hold a copy of this rank's shard, in the order of stages."""
        ranks = dist.get_process_group_ranks(self._stages.get_group())
        return [ranks[holder] for holder in self._holders]

    @torch.no_grad()
    def take_values(self) -> None:
        """Take the first copy's values. Collective; nothing on the meta device."""
        local = _torch.local(self.parameter)
        if not local.is_meta:
            local.copy_(self.exchange(local)[0])

    def exchange(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all holders, in their order.

        They travel from rank to rank in the group of the stages: one made for the holders alone would cost more memory,
        and makes torch count groups differently on different ranks.
        """
        mine, device = self._stages.get_local_rank(), device_of(self._stages)
        local = local.to(device).contiguous()
        if not local.numel():
            return [local]
        parts = [local if holder == mine else torch.empty_like(local) for holder in self._holders]
        group, operations = self._stages.get_group(), []
        for part, holder in zip(parts, self._holders, strict=True):
            if holder != mine:
                operations.append(dist.P2POp(dist.isend, local, group=group, group_peer=holder))
                operations.append(dist.P2POp(dist.irecv, part, group=group, group_peer=holder))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return parts

    def set_aside(self) -> None:
        """Move the accumulated gradient aside, before a backward."""
        if not self.is_pending:
            self.is_pending = True
            self._earlier, self.parameter.grad = self.parameter.grad, None

    @torch.no_grad()
    def add_up(self) -> None:
        """Make the gradient the sum over all copies, after a backward. Collective."""
        if self.parameter.requires_grad:
            if self.parameter.grad is None:
                self.parameter.grad = torch.zeros_like(self.parameter)
            local = _torch.local(self.parameter.grad)
            # In one order on all copies, so that they get the same bits.
            local.copy_(functools.reduce(torch.add, self.exchange(local)))
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Add what was set aside to the gradient."""
        earlier, grad = self._earlier, self.parameter.grad
        self.forget()
        if earlier is not None and grad is not None:
            _torch.local(grad).add_(_torch.local(earlier))
        elif earlier is not None:
            self.parameter.grad = earlier

    def forget(self) -> None:
        """Drop what was set aside."""
        self._earlier, self.is_pending = None, False
