"""One step of training, as everyone writes it: the same code runs on fake tensors, in a rehearsal, and in the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trueshard.engine import accumulate
from trueshard.optim.clip import clip_grad_norm_
from trueshard.planner.events import Phase
from trueshard.planner.workload import Workload


def run_step(
    workload: Workload,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[Any],
    enter: Callable[[Phase], None] = lambda phase: None,
) -> None:
    """Forward and backward of each microbatch, clipping, the optimizers' step, ``zero_grad``.

    Args:
        workload: whose loss and clipping.
        model: sharded.
        optimizers: its.
        batches: the microbatches of one step; more than one accumulate.
        enter: told of each phase as it begins.
    """
    for i, batch in enumerate(batches):
        with accumulate(model, last=i == len(batches) - 1):
            enter("forward")
            loss = workload.loss(model, batch)
            if len(batches) > 1:
                loss = loss / len(batches)
            enter("backward")
            loss.backward()
            del loss
    enter("clip")
    if workload.clip is not None:
        clip_grad_norm_(model.parameters(), workload.clip)
    enter("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    enter("between")
    for optimizer in optimizers:
        optimizer.zero_grad()
