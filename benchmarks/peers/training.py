"""A sharded training on this rank, whoever sharded it, and its step in three pieces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.llama import loss_of

PIECES = ("step", "clipping", "optimizer's step")
"""What is clocked: all of a step, and of it, these."""
REFERENCE = "by hand"
"""Whose losses are right."""
TOLERANCE = 1e-5
"""The largest difference of two losses, nats, that summing in another order makes here."""


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


@dataclass(frozen=True)
class Training:
    """What a way prepared."""

    model: nn.Module
    """Called for the loss; its parameters are DTensors."""
    optimizer: Any
    """With ``step()`` and ``zero_grad()``."""
    clip: Callable[[], object]
    """Clips gradients to a norm of one."""
    backward: Callable[[torch.Tensor], None] = _backward

    def step(self, batch: torch.Tensor) -> tuple[float, torch.Tensor]:
        """One step.

        Args:
            batch: of this rank, int64 ``[sequences, tokens]``.

        Returns:
            The loss in nats, and seconds of ``PIECES`` by the wall's and the processor's clock, float64 ``[3, 2]``.
        """
        began = _now()
        loss = loss_of(self.model, batch)
        self.backward(loss)
        reduced = _now()
        self.clip()
        clipped = _now()
        self.optimizer.step()
        stepped = _now()
        self.optimizer.zero_grad()
        return loss.item(), torch.stack([_now() - began, clipped - reduced, stepped - clipped])


def _now() -> torch.Tensor:
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
