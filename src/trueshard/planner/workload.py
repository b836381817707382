"""What is trained, as functions that can be called under fake tensors: no weight and no datum is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trueshard.plans import Plan


@dataclass(frozen=True)
class Workload:
    """A model with what a step of it is. The functions are called where every tensor is fake and on the CPU."""

    name: str
    """How it is called in tables, for example the folder's name."""
    model: Callable[[], nn.Module]
    """Makes the model, in training mode, unsharded."""
    optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]]
    """Makes the optimizers over the unsharded model's parameters."""
    batch: Callable[[int, int], Any]
    """(microbatch, sequence) → one rank's microbatch, whatever ``loss`` takes."""
    loss: Callable[[nn.Module, Any], torch.Tensor]
    """(model, batch) → a scalar with a gradient; calls the model once."""
    sequence: int
    """Tokens of one sample; 1 where samples are no sequences."""
    clip: float | None = 1.0
    """Norm to which gradients are clipped; None: not at all."""
    assumptions: tuple[str, ...] = ()
    """What was taken for granted, one sentence each, for the reader of a forecast."""


@dataclass(frozen=True)
class Job:
    """A workload on ranks: what is simulated."""

    workload: Workload
    ranks: tuple[int, ...]
    """Mesh shape: (shard,) or (replicate, shard)."""
    rank: int = 0
    """Which one; shards of indivisible dimensions differ between ranks, and rank 0 holds the most."""
    microbatch: int = 1
    """Samples in one forward."""
    accumulation: int = 1
    """Microbatches a step."""
    plan: Plan | None = None
    """What to apply; None: by words."""
    optimizer: str = "adamw"
    """How the optimizer is called in tables."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """``shard()``'s arguments where they differ from its defaults."""
    on_cpu: bool = False
    """Whether operators take the memory for themselves that they take on a CPU."""
