"""The steps that every run of a verification takes, plain or sharded, by the same lines.

A step: each part's forward and backward with its own random seed, gradient norm (clipped where asked for), the
optimizers. What is seen on the way goes to a ``Watcher``.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard.errors import UserError
from trueshard.planner.inputs.nests import mapped
from trueshard.verification.subject import Made, Subject, seed_all


@dataclass
class Stage:
    """What is going on in this process, for whoever says where it failed."""

    words: str = "beginning"


class Batches(dict[tuple[int, int, int], int]):
    """Checksums of microbatches by step, part and number: the same in every process, or nothing can be compared."""

    def check(self, name: str, place: tuple[int, int, int], batch: Any) -> None:
        """Keep the checksum of a microbatch, or raise ``UserError`` if another is known."""
        found: list[int] = [0]

        def add(each: Any) -> None:
            if isinstance(each, torch.Tensor):
                whole = each.detach().cpu().contiguous().flatten()
                found[0] = zlib.crc32(whole.view(torch.uint8).numpy().tobytes(), found[0])

        mapped(add, batch)
        if self.setdefault(place, found[0]) != found[0]:
            raise UserError(
                f"{name} gives another batch in each process or at each call, although the random generators of "
                "Python, numpy and torch are seeded before: make it repeatable"
            )


class Watcher(Protocol):
    """Sees a run."""

    def gradients(self, step: int, made: Made) -> None:
        """All gradients of the step are there, and not clipped. Collective."""

    def stepping(self, number: int) -> AbstractContextManager[None]:
        """Around the step of an optimizer."""

    def stepped(self, step: int, made: Made, loss: float, norm: float) -> None:
        """The optimizers have stepped; gradients are still there. Collective."""


def train(
    subject: Subject,
    made: Made,
    parts: Sequence[int],
    steps: range,
    seed: int,
    limits: dict[int, float],
    batches: Batches,
    watcher: Watcher,
    stage: Stage,
) -> None:
    """Take ``steps``. Collective where the model is sharded.

    Args:
        parts: of each step's global batch, those that are this process's.
        seed: from which the random numbers of each part's forward follow.
        batches: checksums of the microbatches, which are held against it, or kept there.
        limits: to which norm the gradients of each step are clipped; a step that is not there yet is put there: the
            subject's own, or, where it has none, half of the norm at every second step.
    """
    for step in steps:
        stage.words = f"step {step}: forward and backward"
        microbatches = [
            (part, number, each) for part in parts for number, each in enumerate(subject.microbatches(step, part))
        ]
        for part, number, batch in microbatches:
            batches.check(subject.name, (step, part, number), batch)
        loss = _accumulate(made, microbatches, step, seed)
        if made.scaler is not None:
            for optimizer in made.optimizers:
                made.scaler.unscale_(optimizer)
        stage.words = f"step {step}: gradients"
        watcher.gradients(step, made)
        if step not in limits:
            clips = math.isinf(subject.max_norm) and step % 2 == 0
            limits[step] = float(_clip(made, math.inf)) / 2 if clips else subject.max_norm
        norm = float(_clip(made, limits[step]))
        stage.words = f"step {step}: optimizer"
        for number, optimizer in enumerate(made.optimizers):
            with watcher.stepping(number):
                if made.scaler is None:
                    optimizer.step()
                else:
                    made.scaler.step(optimizer)
        if made.scaler is not None:
            made.scaler.update()
        stage.words = f"step {step}: after it"
        watcher.stepped(step, made, loss, norm)
        for optimizer in made.optimizers:
            optimizer.zero_grad()


def _accumulate(made: Made, microbatches: list[tuple[int, int, Any]], step: int, seed: int) -> float:
    """Forward and backward of all microbatches; returns the mean loss over the global batch."""
    count = sum(made.loss.count(batch) for *_, batch in microbatches)
    total = torch.zeros((), dtype=torch.float64)
    mean = None if made.plan is None else trueshard.token_mean(made.model, count)
    for place, (part, number, batch) in enumerate(microbatches, start=1):
        last = place == len(microbatches)
        seed_all(seed + 1_000_003 * step + 1_009 * part + number)
        with contextlib.nullcontext() if made.plan is None else trueshard.accumulate(made.model, last=last):
            value = made.loss(made.model, _to_device(batch))
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                shown = list(value.shape) if isinstance(value, torch.Tensor) else f"{value!r}"
                raise ValueError(f"the loss is {shown}; it must be a tensor with one number")
            scaled = value / count if mean is None else mean(value)
            (scaled if made.scaler is None else made.scaler.scale(scaled)).backward()
        total += value.detach().double().cpu()
    return float(total) / count if mean is None else mean.value(total)


def _clip(made: Made, limit: float) -> torch.Tensor:
    if made.plan is None:
        return _clip_plain(made.model, limit)
    return trueshard.clip_grad_norm_(made.model.parameters(), limit)


@torch.no_grad()
def _clip_plain(model: nn.Module, limit: float) -> torch.Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` computes, with its sum in float64: on a CPU its own, over a long float32
    tensor, has lost five of seven digits."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    norm = (
        torch.stack([each.double().square().sum() for each in gradients]).sum().sqrt() if gradients else torch.zeros(())
    )
    for each in gradients:
        each.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0).to(each.device, each.dtype))
    return norm


def _to_device(batch: Any) -> Any:
    if not torch.cuda.is_available():
        return batch
    return mapped(lambda each: each.cuda() if isinstance(each, torch.Tensor) else each, batch)


def parts_of_rank(parts: int) -> range:
    """This rank's parts of a global batch, of which each rank takes as many."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    each = parts // ranks
    return range(rank * each, (rank + 1) * each)
