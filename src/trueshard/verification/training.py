"""The steps that every run of a verification takes, plain or sharded, by the same lines; and what is recorded of them.

A step: forward and backward of each part with its own random seed, gradient norm (clipped where asked for), the
optimizers. A ``Watcher`` sees it.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.errors import UserError
from trueshard.model.names import named_modules
from trueshard.planner.inputs.fake_tensors import mapped
from trueshard.verification.compare import TensorStore, gathered_tensors, values_of
from trueshard.verification.subjects import Case, FactorySubject, Subject, TrainingSetup, seed_all


@dataclass
class Progress:
    """The current stage of this process, for the report of a failure."""

    stage: str = "beginning"


@dataclass
class RunRecord:
    """The batches and clipping of the first run, which every later run has to repeat."""

    limits: dict[int, float] = field(default_factory=dict)
    """Norm to which the gradients of a step are clipped."""
    checksums: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Checksum of each microbatch, by step, part and number."""

    def check_batch(self, name: str, place: tuple[int, int, int], batch: Any) -> None:
        """Keep the checksum of a microbatch, or raise ``UserError`` if another one is known."""
        found: list[int] = [0]

        def add(each: Any) -> None:
            if isinstance(each, torch.Tensor):
                whole = each.detach().cpu().contiguous().flatten()
                found[0] = zlib.crc32(whole.view(torch.uint8).numpy().tobytes(), found[0])

        mapped(add, batch)
        if self.checksums.setdefault(place, found[0]) != found[0]:
            raise UserError(
                f"{name} gives another batch in each process or at each call, although the random generators of "
                "Python, numpy and torch are seeded before: make it repeatable"
            )


class Watcher:
    """Base class of what sees a run."""

    def gradients(self, step: int, setup: TrainingSetup) -> None:
        """Called when all gradients of the step are there, not clipped. Collective."""

    def stepping(self, number: int) -> AbstractContextManager[None]:
        """Return a context around the step of an optimizer."""
        return contextlib.nullcontext()

    def stepped(self, step: int, setup: TrainingSetup, loss: float, norm: float) -> None:
        """Called when the optimizers have stepped; gradients are still there. Collective."""


def subject_of(case: Case) -> Subject:
    """Return the subject that the case's source describes.

    Raises:
        ValueError: it cannot be built; one line that says why.
    """
    if callable(case.source) or isinstance(case.source, str):
        return FactorySubject(case)
    from trueshard.verification.config_subject import ConfigSubject  # which needs the trainer's libraries

    return ConfigSubject(case)


def train(
    case: Case,
    subject: Subject,
    setup: TrainingSetup,
    record: RunRecord,
    watcher: Watcher,
    progress: Progress,
    first: int = 1,
) -> list[float]:
    """Take the steps from ``first`` on with this rank's parts; return their losses. Collective if sharded.

    Args:
        record: completed where it says nothing of a step. Gradients are clipped to the subject's norm or, where it has
            none, to half of their own norm at every second step.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    each = case.parts // ranks
    parts, losses = range(rank * each, (rank + 1) * each), []
    for step in range(first, case.steps + 1):
        progress.stage = f"step {step}: forward and backward"
        microbatches = [
            (part, number, batch) for part in parts for number, batch in enumerate(subject.microbatches(step, part))
        ]
        for part, number, batch in microbatches:
            record.check_batch(subject.name, (step, part, number), batch)
        losses.append(_accumulate(setup, microbatches, step, case.seed))
        if setup.scaler is not None:
            for optimizer in setup.optimizers:
                setup.scaler.unscale_(optimizer)
        progress.stage = f"step {step}: gradients"
        watcher.gradients(step, setup)
        if step not in record.limits:
            clips = math.isinf(subject.max_norm) and step % 2 == 0
            record.limits[step] = float(_clip(setup, math.inf)) / 2 if clips else subject.max_norm
        norm = float(_clip(setup, record.limits[step]))
        progress.stage = f"step {step}: optimizer"
        for number, optimizer in enumerate(setup.optimizers):
            with watcher.stepping(number):
                if setup.scaler is None:
                    optimizer.step()
                else:
                    setup.scaler.step(optimizer)
        if setup.scaler is not None:
            setup.scaler.update()
        progress.stage = f"step {step}: after it"
        watcher.stepped(step, setup, losses[-1], norm)
        for optimizer in setup.optimizers:
            optimizer.zero_grad()
    return losses


def _accumulate(setup: TrainingSetup, microbatches: list[tuple[int, int, Any]], step: int, seed: int) -> float:
    """Run forward and backward of all microbatches; return the mean loss over the global batch."""
    count = sum(setup.loss.count(batch) for *_, batch in microbatches)
    total = torch.zeros((), dtype=torch.float64)
    mean = None if setup.plan is None else trueshard.token_mean(setup.model, count)
    for place, (part, number, batch) in enumerate(microbatches, start=1):
        last = place == len(microbatches)
        seed_all(seed + 1_000_003 * step + 1_009 * part + number)
        with contextlib.nullcontext() if setup.plan is None else trueshard.accumulate(setup.model, last=last):
            value = setup.loss(setup.model, _to_device(batch))
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                shown = list(value.shape) if isinstance(value, torch.Tensor) else f"{value!r}"
                raise ValueError(f"the loss is {shown}; it must be a tensor with one number")
            scaled = value / count if mean is None else mean(value)
            (scaled if setup.scaler is None else setup.scaler.scale(scaled)).backward()
        total += value.detach().double().cpu()
    return float(total) / count if mean is None else mean.value(total)


def _clip(setup: TrainingSetup, limit: float) -> torch.Tensor:
    if setup.plan is None:
        return _clip_plain(setup.model, limit)
    return trueshard.clip_grad_norm_(setup.model.parameters(), limit)


@torch.no_grad()
def _clip_plain(model: nn.Module, limit: float) -> torch.Tensor:
    """Clip like ``torch.nn.utils.clip_grad_norm_``, with the sum in float64; return the norm.

    On a CPU torch's own sum over a long float32 tensor has lost five of seven digits.
    """
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


class ComputeDtypes:
    """Check at every forward, until ``end``, in which dtype each module finds its parameters."""

    def __init__(self, setup: TrainingSetup) -> None:
        precision = None if setup.plan is None else setup.plan.mixed_precision
        self._asked = None if precision is None else precision.compute
        self._other: dict[str, str] = {}
        kept = set() if setup.plan is None else {each.name for each in setup.plan.replicated}
        self._hooks = [
            module.register_forward_pre_hook(self._looker(name, kept))
            for name, module in named_modules(setup.model)
            if self._asked is not None and _torch.own_parameters(module)
        ]

    def end(self) -> str:
        """Return what computes in another dtype than was asked for, in words, or ""."""
        for hook in self._hooks:
            hook.remove()
        name = next(iter(self._other), "")
        return f"{name!r} is computed in {self._other[name]}, asked for {self._asked}" if name else ""

    def _looker(self, prefix: str, kept: set[str]) -> Any:
        def look(module: nn.Module, arguments: Any) -> None:
            for key, parameter in _torch.own_parameters(module).items():
                name = f"{prefix}.{key}" if prefix else key
                if parameter is None or name in kept or not parameter.is_floating_point():
                    continue
                dtype = str(parameter.dtype).removeprefix("torch.")
                if dtype != self._asked:
                    self._other.setdefault(name, dtype)

        return look


class StepRecorder(Watcher):
    """Record every tensor of every step on disk."""

    def __init__(self, store: TensorStore) -> None:
        self.store = store
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.short: dict[int, torch.dtype] = {}
        """By number of the optimizer, the 16-bit dtype in which it computes what is stored in a wider one."""

    def begin(self, setup: TrainingSetup) -> None:
        """Record the initial values."""
        self._keep(0, setup, "parameters", "buffers")

    def gradients(self, step: int, setup: TrainingSetup) -> None:
        self._keep(step, setup, "gradients")

    @contextlib.contextmanager
    def stepping(self, number: int) -> Iterator[None]:
        with ShortDtypes() as seen:
            yield
        if seen.dtypes:
            self.short[number] = seen.dtypes[0]

    def stepped(self, step: int, setup: TrainingSetup, loss: float, norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self._keep(step, setup, "parameters", "buffers", "state")

    def _keep(self, step: int, setup: TrainingSetup, *kinds: str) -> None:
        for kind in kinds:
            for name, tensor in gathered_tensors(values_of(kind, setup.model, setup.optimizers)):
                self.store.write(kind, step, name, tensor)


class ShortDtypes(_torch.DispatchMode):
    """Collect the 16-bit dtypes in which operators compute that are given wider ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.dtype for each in _torch.tensors_in((args, kwargs)) if each.is_floating_point()}
        made = {each.dtype for each in _torch.tensors_in(result) if each.is_floating_point()}
        self.dtypes += [each for each in made - given if each.itemsize == 2 and given]
        return result
