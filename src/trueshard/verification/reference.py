"""The reference: one process, without sharding, that takes the whole global batch part by part.

- It runs twice. The second run begins with parameters that are a rounding error away from the first's, and changes its
  gradients by as much at every step: how far it ends up is what rounding does to this model.
- Where mixed precision or compiling is asked for, which change the result on one device too, the reference has the same
  plan, and is compared with plain training.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trueshard import _torch
from trueshard.verification.compare import (
    FLOORS,
    SHAKE,
    Named,
    Structure,
    TensorStore,
    Tolerances,
    distance,
    gathered_tensors,
    structure_of,
    values_of,
    whole,
)
from trueshard.verification.subjects import Case, Subject, TrainingSetup
from trueshard.verification.training import Comparer, Progress, RunRecord, Watcher, subject_of, train


@dataclass(frozen=True)
class Reference:
    """Result of the reference, with which the other runs are compared; its tensors are on disk."""

    setting: Mapping[str, Any]
    """Name, parameters and optimizers, for the report."""
    structure: Structure
    """Structure of the model before its first step."""
    tolerances: Tolerances
    record: RunRecord
    constant_buffers: Sequence[str]
    plain: tuple[float, float] | None
    """Distance from plain training: largest relative difference of a step's losses, and of how far all parameters
    together have moved over their movement there. None if the reference is plain training itself."""
    notes: Sequence[str]


class StepRecorder(Watcher):
    """Record every tensor of every step on disk."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self.short: dict[int, torch.dtype] = {}
        """By number of the optimizer, the 16-bit dtype in which it computes what is stored in a wider one."""

    def see(self, kind: str, step: int, values: Named) -> None:
        for name, tensor in gathered_tensors(values):
            self._store.write(kind, step, name, tensor)

    @contextlib.contextmanager
    def stepping(self, number: int) -> Iterator[None]:
        with ShortDtypes() as seen:
            yield
        if seen.dtypes:
            self.short[number] = seen.dtypes[0]


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


class RoundingNoise(Comparer):
    """Change a run by rounding errors of ``compute`` or of its own dtypes, and measure how far that takes it."""

    def __init__(self, case: Case, compute: torch.dtype | None) -> None:
        super().__init__(case.tensors("reference"), Tolerances({}, 0.0, {}), (), case.steps)
        self._compute = compute
        self._random = torch.Generator().manual_seed(0)

    def begin(self, setup: TrainingSetup) -> None:
        for parameter in setup.model.parameters():
            if parameter.requires_grad:
                self._shake(parameter, torch.promote_types(parameter.dtype, torch.float32))

    def gradients(self, step: int, setup: TrainingSetup) -> None:
        for parameter in setup.model.parameters():
            if parameter.grad is not None:
                self._shake(parameter.grad, self._compute or parameter.grad.dtype)
        super().gradients(step, setup)

    @torch.no_grad()
    def _shake(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Change nonzero elements by rounding errors of ``dtype``, of their own and, as sums cancel, the usual size."""
        part = _torch.local(tensor.detach())
        if not part.is_floating_point():
            return
        wide, some = part.double(), part != 0
        usual = wide[some].square().mean().sqrt() if bool(some.any()) else 0.0
        change = torch.rand(part.shape, generator=self._random, dtype=torch.float64).mul_(2).sub_(1).to(part.device)
        change *= SHAKE * torch.finfo(dtype).eps
        part.copy_(torch.where(some, wide + change * (wide.abs() + usual), wide))


def run(case: Case, progress: Progress) -> Reference:
    """Take both runs; leave the first one's tensors in ``case.tensors("reference")``."""
    subject, record, store = subject_of(case), RunRecord(), case.tensors("reference")
    recorder = StepRecorder(store)
    build = subject.sharded if case.changes_arithmetic else subject.plain
    progress.stage = "building the model"
    setup = build()
    structure = structure_of(setup.model, setup.optimizers)
    losses = train(case, subject, setup, record, recorder, progress)
    _check_trains(subject.name, losses, store, case.steps)
    constant = [
        name
        for name in store.names("buffers", 0)
        if torch.equal(store.read("buffers", 0, name), store.read("buffers", case.steps, name))
    ]
    precision = None if setup.plan is None else setup.plan.mixed_precision
    compute = None if precision is None or precision.compute is None else getattr(torch, precision.compute)
    floor, floors = _floors(setup, recorder.short, compute)
    progress.stage = "building the model again"
    again = build()
    if again.model is setup.model:
        raise ValueError(f"{subject.name} gives the same model each time it is called; make a new one there")
    del setup
    for key, value in gathered_tensors(values_of("parameters", again.model)):
        if distance(value, store.read("parameters", 0, key))[0]:
            raise ValueError(
                f"{subject.name} gives {key!r} other values each time it is called, although the random generators of "
                "Python, numpy and torch are seeded before: make it repeatable"
            )
    noise = RoundingNoise(case, compute)
    train(case, subject, again, record, noise, progress)
    measured = {(each.kind, each.step, each.name): each.relative for each in noise.found if not each.words}
    setting = {
        "name": subject.name,
        "parameters": sum(each.numel() for each in again.model.parameters()),
        "trainable": sum(each.numel() for each in again.model.parameters() if each.requires_grad),
        "optimizers": [type(each).__name__ for each in again.optimizers],
    }
    return Reference(
        setting=setting,
        structure=structure,
        tolerances=Tolerances(measured, floor, floors),
        record=record,
        constant_buffers=constant,
        plain=_plain_distance(case, subject, losses, progress) if case.changes_arithmetic else None,
        notes=subject.notes,
    )


def _floors(
    setup: TrainingSetup, short: Mapping[int, torch.dtype], compute: torch.dtype | None
) -> tuple[float, dict[str, float]]:
    """Return what any tensor may differ by, and parameters whose optimizer computes in a 16-bit dtype, by name.

    Whether such a computation (Muon's Newton-Schulz in bfloat16) rounds one way or the other moves an update by a few
    roundings, or not at all: a second run may miss what a third one does.
    """
    name_of = {id(parameter): name for name, parameter in setup.model.named_parameters()}
    dtypes = {each.dtype for each in setup.model.parameters() if each.requires_grad} | ({compute} if compute else set())
    return max((FLOORS.get(dtype, FLOORS[torch.float32]) for dtype in dtypes), default=FLOORS[torch.float32]), {
        name_of[id(parameter)]: 3 * FLOORS[dtype]
        for number, dtype in short.items()
        for group in setup.optimizers[number].param_groups
        for parameter in group["params"]
    }


def _plain_distance(case: Case, subject: Subject, losses: Sequence[float], progress: Progress) -> tuple[float, float]:
    progress.stage = "building the plain model"
    setup = subject.plain()
    setup.scaler = None
    plain = train(case, subject, setup, RunRecord(), Watcher(), progress)
    store = case.tensors("reference")
    apart = moved = 0.0
    for name, value in values_of("parameters", setup.model).items():
        before, after = (store.read("parameters", step, name).double() for step in (0, case.steps))
        apart += float((whole(value).double() - after).square().sum())
        moved += float((whole(value).double() - before).square().sum())
    pairs = zip(*(torch.tensor(each, dtype=torch.float64) for each in (losses, plain)), strict=True)
    return max(distance(*pair)[1] for pair in pairs), math.sqrt(apart / moved) if moved else float(apart > 0)


def _check_trains(name: str, losses: Sequence[float], store: TensorStore, steps: int) -> None:
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise ValueError(f"{name}: the loss of step {step} is {loss} on one process: there is nothing to compare")
    if not store.names("gradients", 1):
        raise ValueError(f"{name}: no parameter has a gradient on one process: there is nothing to compare")
    for key in store.names("gradients", 1):
        if not torch.equal(store.read("parameters", steps, key), store.read("parameters", 0, key)):
            return
    raise ValueError(
        f"{name}: no parameter moves in {steps} steps on one process: there is nothing to compare; give the optimizer "
        "the parameters, and a learning rate"
    )
