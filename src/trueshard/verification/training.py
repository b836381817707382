"""The steps that every run of a verification takes, plain or sharded, by the same lines; and what is recorded of them.

A step: forward and backward of each part with its own random seed, gradient norm (clipped where asked for), the
optimizers. It is not the trainer's step: a plain model must not go through this library.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.checkpoint.format import crc32
from trueshard.checkpoint.process_group import as_bytes
from trueshard.checkpoint.state import seed_all
from trueshard.errors import UserError
from trueshard.model.names import named_modules, unwrap
from trueshard.optim.exact import loss_on_grid
from trueshard.sharding.hooks import runtime_of
from trueshard.verification import compare
from trueshard.verification.compare import Named
from trueshard.verification.modules import Recorder
from trueshard.verification.subjects import Subject, TrainingSetup, tensors_of


@dataclass
class Progress:
    stage: str = "beginning"  # what this process does, for the report of a failure


@dataclass
class RunRecord:
    """The batches and clipping of the first run, which every later run has to repeat."""

    limits: dict[int, float] = field(default_factory=dict)  # norm to which the gradients of a step are clipped
    checksums: dict[tuple[int, int, int], int] = field(default_factory=dict)  # by step, part and microbatch

    def check_batch(self, name: str, place: tuple[int, int, int], batch: Any) -> None:
        """Keep the checksum of a microbatch, or raise ``UserError`` if another one is known."""
        checksum = 0
        for tensor in tensors_of(batch):
            checksum = crc32(as_bytes(tensor), checksum)
        if self.checksums.setdefault(place, checksum) != checksum:
            raise UserError(
                f"{name} gives another batch in each process or at each call, although the random generators of "
                "Python, numpy and torch are seeded before: make it repeatable"
            )


def train(
    subject: Subject,
    setup: TrainingSetup,
    record: RunRecord,
    progress: Progress,
    first: int = 1,
    stepping: Sequence[AbstractContextManager[Any]] = (),
) -> Iterator[tuple[str, int, Named]]:
    """Take the steps from ``first`` on with this rank's parts; yield (kind, step, values). Collective if sharded.

    Step 0 is before training. Gradients are yielded before they are clipped, and what is done to them counts. The rest
    is yielded after the optimizers' step, while gradients are still there; in an exact run the ``"hash"`` of all, too.
    Gradients are clipped as ``record`` says; if it does not, to the subject's norm or, where it has none, to half of
    their own norm at every second step. ``stepping``: contexts for the steps of each optimizer.
    """
    runtime = runtime_of(unwrap(setup.model))
    case, parts, scaler = subject.case, parts_here(subject, setup.model), setup.scaler
    for kind in ("parameters", "buffers") if first == 1 else ():
        yield kind, 0, compare.values_of(kind, setup.model)
    for step in range(first, case.steps + 1):
        progress.stage = f"step {step}: forward and backward"
        microbatches = microbatches_of(subject, step, parts)
        for part, number, batch in microbatches:
            record.check_batch(subject.name, (step, part, number), batch)
        loss = accumulate(setup, microbatches, step, case.seed)
        if scaler is not None:
            for optimizer in setup.optimizers:
                scaler.unscale_(optimizer)
        progress.stage = f"step {step}: gradients"
        yield "gradients", step, compare.values_of("gradients", setup.model)
        if step not in record.limits:
            clips = math.isinf(subject.max_norm) and step % 2 == 0
            record.limits[step] = _clip(setup, math.inf) / 2 if clips else subject.max_norm
        norm = _clip(setup, record.limits[step])
        progress.stage = f"step {step}: optimizer"
        for number, optimizer in enumerate(setup.optimizers):
            with stepping[number] if stepping else contextlib.nullcontext():
                optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        progress.stage = f"step {step}: after it"
        yield "losses", step, {"": loss}
        yield "gradient norm", step, {"": norm}
        if runtime is not None and runtime.exact is not None:
            optimizers = {str(number): optimizer for number, optimizer in enumerate(setup.optimizers)}
            yield "hash", step, {"": trueshard.state_hash(setup.model, optimizers).total}
        for kind in ("parameters", "buffers", "state"):
            yield kind, step, compare.values_of(kind, setup.model, setup.optimizers)
        for optimizer in setup.optimizers:
            optimizer.zero_grad()


Microbatches = list[tuple[int, int, Any]]
"""(part, number in the part, batch)."""


def microbatches_of(subject: Subject, step: int, parts: Sequence[int]) -> Microbatches:
    """Return those of some parts of a step's global batch, on the CPU."""
    return [(part, number, batch) for part in parts for number, batch in enumerate(subject.microbatches(step, part))]


def parts_here(subject: Subject, model: nn.Module) -> range:
    """Return the parts of the global batch that this rank takes."""
    runtime = runtime_of(unwrap(model))
    rank, ranks = (0, 1) if runtime is None else runtime.axes.reader
    count = subject.case.parts // ranks
    return range(rank * count, (rank + 1) * count)


def accumulate(
    setup: TrainingSetup, microbatches: Microbatches, step: int, seed: int, recorder: Recorder | None = None
) -> float:
    """Run forward and backward of all microbatches; return the mean loss over the global batch."""
    runtime = runtime_of(unwrap(setup.model))
    context = None if runtime is None else runtime.axes.along.get("context")
    count = sum(setup.loss.count(batch) for *_, batch in microbatches)
    if context is not None and context.get_local_rank():
        count = 0  # of sequences that another rank counts
    total = torch.zeros((), dtype=torch.float64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mean = None if setup.plan is None else trueshard.token_mean(setup.model, count)
    for place, (part, number, batch) in enumerate(microbatches, start=1):
        last = place == len(microbatches)
        seed_all(seed + 1_000_003 * step + 1_009 * part + number)
        if recorder is not None:
            recorder.begin(part, number)
        with contextlib.nullcontext() if setup.plan is None else trueshard.accumulate(setup.model, last=last):
            moved = _torch.to_device(batch, device)
            value = setup.loss(setup.model, moved if context is None else trueshard.split_sequence(setup.model, moved))
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                shown = list(value.shape) if isinstance(value, torch.Tensor) else f"{value!r}"
                raise ValueError(f"the loss is {shown}; it must be a tensor with one number")
            if recorder is not None:
                recorder.end_forward(value)
            scaled = value / count if mean is None else mean(value)
            (scaled if setup.scaler is None else setup.scaler.scale(scaled)).backward()
        total += loss_on_grid(value).cpu() if runtime is not None and runtime.exact else value.detach().double().cpu()
    return float(total) / count if mean is None else mean.value(total)


@torch.no_grad()
def _clip(setup: TrainingSetup, limit: float) -> float:
    """Clip the gradients of a step to ``limit``; return their norm before.

    Of a plain model summed in float64: on a CPU torch's sum over a long float32 tensor has lost five of seven digits.
    """
    if setup.plan is not None:
        return float(trueshard.clip_grad_norm_(setup.model.parameters(), limit))
    gradients = [parameter.grad for parameter in setup.model.parameters() if parameter.grad is not None]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    for gradient in gradients:
        gradient.mul_(torch.tensor(min(limit / (norm + 1e-6), 1.0), dtype=gradient.dtype))
    return norm


@contextlib.contextmanager
def wrong_dtypes(setup: TrainingSetup) -> Iterator[list[str]]:
    """Yield a list; the first parameter that a forward finds in another dtype than asked for is added, in words."""
    plan = setup.plan
    compute = None if plan is None or plan.mixed_precision is None else plan.mixed_precision.compute
    kept = set() if plan is None else {parameter.name for parameter in plan.replicated}
    wrong: list[str] = []

    def look(prefix: str, module: nn.Module, arguments: Any) -> None:
        for key, parameter in _torch.own_parameters(module).items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter is not None and name not in kept and parameter.is_floating_point() and not wrong:
                dtype = str(parameter.dtype).removeprefix("torch.")
                if dtype != compute:
                    wrong.append(f"{name!r} is computed in {dtype}, asked for {compute}")

    hooks = [
        module.register_forward_pre_hook(functools.partial(look, name))
        for name, module in named_modules(setup.model)
        if compute is not None and _torch.own_parameters(module)
    ]
    yield wrong
    for hook in hooks:
        hook.remove()
