"""What is verified: a model with optimizers, a loss and data, built anew in each process from the same seed.

- ``plain()`` is what one process trains without any sharding; ``sharded()`` is that after ``trueshard.shard``.
- The global batch of a step consists of parts, one for each rank: whoever takes a part, it is the same samples, and
  its random numbers (dropout) are drawn from the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from trueshard.plans import Plan
from trueshard.train.losses.protocol import Loss
from trueshard.verification.job import Job


class Refused(Exception):
    """``trueshard.shard`` did not take what was asked for; its own words."""


@dataclass
class Made:
    """A model, ready to be trained."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss: Loss
    scaler: torch.amp.GradScaler | None = None
    plan: Plan | None = None
    """How it was sharded; None: it is plain."""


class Subject(Protocol):
    """Something that can be built again and again."""

    name: str
    max_norm: float
    """To which gradients are clipped; infinity: they are measured."""
    notes: list[str]
    """What was taken for granted or made smaller, in sentences."""

    def plain(self) -> Made:
        """A new model in this process, trained by nobody yet, not sharded."""

    def sharded(self) -> Made:
        """The same, sharded over the ranks of this process group. Collective.

        Raises:
            Refused: ``shard()`` did not take it.
        """

    def microbatches(self, step: int, part: int) -> list[Any]:
        """A part of the global batch of a step, on the CPU.

        Args:
            step: from 1 on.
            part: below ``Job.parts``.
        """


def seed_all(seed: int) -> None:
    """Begin every random generator that a model or a batch may be drawn from."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002 - what user code draws from
    torch.manual_seed(seed)


def shard(job: Job, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Plan:
    """``trueshard.shard`` with the job's words. Raises ``Refused``."""
    mesh = None
    if job.replicate > 1:
        kind, shape = "cuda" if torch.cuda.is_available() else "cpu", (job.replicate, job.ranks // job.replicate)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    try:
        return trueshard.shard(model, *optimizers, mesh=mesh, **job.words)
    except (ValueError, TypeError, NotImplementedError, trueshard.NothingFits) as error:
        raise Refused(" ".join(str(error).split())) from error
