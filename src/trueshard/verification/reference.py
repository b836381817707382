"""The reference: one process, without sharding, that takes the whole global batch part by part.

- It runs twice. The second run begins with parameters that are a rounding error away from the first's, and changes its
  gradients by as much at every step: how far it ends up is what rounding does to this model.
- Where mixed precision or compiling is asked for, which change the result on one device too, the reference has the same
  plan, and is compared with plain training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trueshard.verification.compare import (
    SHAKE,
    Structure,
    TensorStore,
    distance,
    floor_of,
    gathered,
    local,
    number_distance,
    structure_of,
    values_of,
    whole,
)
from trueshard.verification.subjects import Case, Subject, TrainingSetup
from trueshard.verification.training import Progress, RunRecord, StepRecorder, Watcher, subject_of, train


@dataclass(frozen=True)
class PlainDistance:
    """Distance between training with the plan's arithmetic and plain training without this library."""

    losses: float
    """Largest relative difference of a step's losses."""
    moved: float
    """Difference between how far all parameters together have moved, over their movement in plain training."""


@dataclass(frozen=True)
class Reference:
    """Result of the reference, with which the other runs are compared; its tensors are on disk."""

    name: str
    structure: Structure
    """Structure of the model before its first step."""
    losses: Sequence[float]
    norms: Sequence[float]
    """Norm of all gradients of each step, before clipping."""
    noise: dict[tuple[str, int, str], float]
    """By kind, step and name: how far rounding took a tensor."""
    floor: float
    short: dict[int, torch.dtype]
    """By number of the optimizer: the 16-bit dtype in which it computes."""
    record: RunRecord
    constant_buffers: Sequence[str]
    plain: PlainDistance | None
    """None if the reference is plain training itself."""
    notes: Sequence[str]
    parameters: int
    trainable: int
    optimizers: Sequence[str]


class RoundingNoise(Watcher):
    """Change a run by rounding errors, and measure how far that takes it."""

    def __init__(self, recorder: StepRecorder, compute: torch.dtype | None) -> None:
        self._recorder, self._store, self._compute = recorder, recorder.store, compute
        self._random = torch.Generator().manual_seed(0)
        self.found: dict[tuple[str, int, str], float] = {}

    def begin(self, setup: TrainingSetup) -> None:
        """Change the trainable parameters."""
        for parameter in setup.model.parameters():
            if parameter.requires_grad:
                self._shake(parameter, torch.promote_types(parameter.dtype, torch.float32))

    def gradients(self, step: int, setup: TrainingSetup) -> None:
        for parameter in setup.model.parameters():
            if parameter.grad is not None:
                self._shake(parameter.grad, self._compute or parameter.grad.dtype)
        self._measure("gradients", step, setup)

    def stepped(self, step: int, setup: TrainingSetup, loss: float, norm: float) -> None:
        self.found["losses", step, ""] = number_distance(loss, self._recorder.losses[step - 1])[1]
        self.found["gradient norm", step, ""] = number_distance(norm, self._recorder.norms[step - 1])[1]
        self._measure("parameters", step, setup)
        self._measure("state", step, setup)

    def _measure(self, kind: str, step: int, setup: TrainingSetup) -> None:
        known = set(self._store.names(kind, step))
        for name, value in gathered(values_of(kind, setup.model, setup.optimizers)):
            if isinstance(value, torch.Tensor) and name in known:
                expected = self._store.read(kind, step, name)
                if expected.shape == value.shape:
                    start = self._store.read(kind, 0, name) if kind == "parameters" else None
                    self.found[kind, step, name] = distance(value, expected, start)[1]

    @torch.no_grad()
    def _shake(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Change elements that are not zero by rounding errors of ``dtype``, relative to their own and the usual size.

        The usual size counts because sums cancel.
        """
        part = local(tensor)
        if not part.is_floating_point():
            return
        wide, some = part.double(), part != 0
        usual = wide[some].square().mean().sqrt() if bool(some.any()) else 0.0
        change = torch.rand(part.shape, generator=self._random, dtype=torch.float64).mul_(2).sub_(1).to(part.device)
        change *= SHAKE * torch.finfo(dtype).eps
        part.copy_(torch.where(some, wide + change * (wide.abs() + usual), wide))


def run(case: Case, progress: Progress) -> Reference:
    """Take both runs; leave the first one's tensors in ``case.tensors("reference")``.

    Raises:
        ValueError: the factory gives the same model twice, or other values each time.
    """
    subject, recorder, record = subject_of(case), StepRecorder(case.tensors("reference")), RunRecord()
    store = recorder.store
    progress.stage = "building the model"
    setup = _built(case, subject)
    structure = structure_of(setup.model, setup.optimizers)
    recorder.begin(setup)
    train(case, subject, setup, record, recorder, progress)
    _check_trains(subject.name, recorder, case.steps)
    dtypes = [each.dtype for each in setup.model.parameters() if each.requires_grad] or [torch.float32]
    constant = [
        name
        for name in store.names("buffers", 0)
        if torch.equal(store.read("buffers", 0, name), store.read("buffers", case.steps, name))
    ]
    progress.stage = "building the model again"
    again = _built(case, subject)
    if again.model is setup.model:
        raise ValueError(f"{subject.name} gives the same model each time it is called; make a new one there")
    del setup
    _check_same(subject.name, again, store)
    precision = None if again.plan is None else again.plan.mixed_precision
    compute = None if precision is None or precision.compute is None else getattr(torch, precision.compute)
    noise = RoundingNoise(recorder, compute)
    noise.begin(again)
    train(case, subject, again, record, noise, progress)
    return Reference(
        name=subject.name,
        structure=structure,
        losses=recorder.losses,
        norms=recorder.norms,
        noise=noise.found,
        floor=floor_of(dtypes if compute is None else [*dtypes, compute]),
        short=recorder.short,
        record=record,
        constant_buffers=constant,
        plain=_plain_distance(case, subject, recorder, progress) if case.changes_arithmetic else None,
        notes=subject.notes,
        parameters=sum(each.numel() for each in again.model.parameters()),
        trainable=sum(each.numel() for each in again.model.parameters() if each.requires_grad),
        optimizers=[type(each).__name__ for each in again.optimizers],
    )


def _built(case: Case, subject: Subject) -> TrainingSetup:
    return subject.sharded() if case.changes_arithmetic else subject.plain()


def _plain_distance(case: Case, subject: Subject, recorder: StepRecorder, progress: Progress) -> PlainDistance:
    """Train the plain model too, without mixed precision and compiling, and compare."""
    progress.stage = "building the plain model"
    setup = subject.plain()
    setup.scaler = None
    plain = train(case, subject, setup, RunRecord(), Watcher(), progress)
    apart = moved = 0.0
    for name, value in values_of("parameters", setup.model).items():
        before, after = (recorder.store.read("parameters", step, name).double() for step in (0, case.steps))
        apart += float((whole(value).double() - after).square().sum())
        moved += float((whole(value).double() - before).square().sum())
    losses = max(number_distance(one, two)[1] for one, two in zip(recorder.losses, plain, strict=True))
    return PlainDistance(losses, math.sqrt(apart / moved) if moved else float(apart > 0))


def _check_trains(name: str, recorder: StepRecorder, steps: int) -> None:
    for step, loss in enumerate(recorder.losses, start=1):
        if not math.isfinite(loss):
            raise ValueError(f"{name}: the loss of step {step} is {loss} on one process: there is nothing to compare")
    store = recorder.store
    if not store.names("gradients", 1):
        raise ValueError(f"{name}: no parameter has a gradient on one process: there is nothing to compare")
    for key in store.names("gradients", 1):
        if not torch.equal(store.read("parameters", steps, key), store.read("parameters", 0, key)):
            return
    raise ValueError(
        f"{name}: no parameter moves in {steps} steps on one process: there is nothing to compare; give the optimizer "
        "the parameters, and a learning rate"
    )


def _check_same(name: str, setup: TrainingSetup, store: TensorStore) -> None:
    for key, value in gathered(values_of("parameters", setup.model)):
        if distance(value, store.read("parameters", 0, key))[0]:
            raise ValueError(
                f"{name} gives {key!r} other values each time it is called, although the random generators of Python, "
                "numpy and torch are seeded before: make it repeatable"
            )
