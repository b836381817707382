"""The reference: one process, without sharding, that takes the whole global batch part by part.

It runs twice. The second run begins with parameters that are a rounding error away from the first's, and changes its
gradients by as much at every step: how far it ends up is what rounding does to this model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from trueshard import _torch
from trueshard.verification import states
from trueshard.verification.choosing import subject_of
from trueshard.verification.compare import SHAKE, distance, floor_of, number_distance
from trueshard.verification.job import Job, Tensors
from trueshard.verification.structure import structure_of
from trueshard.verification.subject import Made, Subject
from trueshard.verification.training import Batches, Stage, train


def run(job: Job, stage: Stage) -> dict[str, Any]:
    """Both runs; leaves the first one's tensors in ``job.tensors("reference")``.

    Raises:
        ValueError: the factory gives the same model twice, or other values each time.
    """
    subject, store = subject_of(job), job.tensors("reference")
    stage.words = "building the model"
    made = _made(job, subject)
    before = structure_of(made.model, made.optimizers)
    recorder = Recorder(store)
    recorder.begin(made)
    everything, steps = range(job.parts), range(1, job.steps + 1)
    limits: dict[int, float] = {}
    batches = Batches()
    train(subject, made, everything, steps, job.seed, limits, batches, recorder, stage)
    _check_says_something(subject.name, recorder, job.steps)
    trainable = [each for each in made.model.parameters() if each.requires_grad]
    dtypes = [each.dtype for each in trainable] or [torch.float32]
    constant = [
        name
        for name in store.names("buffers", 0)
        if torch.equal(store.read("buffers", 0, name), store.read("buffers", job.steps, name))
    ]
    stage.words = "building the model again"
    again = _made(job, subject)
    if again.model is made.model:
        raise ValueError(f"{subject.name} gives the same model each time it is called; make a new one there")
    del made
    _check_same(subject.name, again, store)
    computed_in = _computed_in(again)
    noise = Noise(recorder, computed_in)
    noise.begin(again)
    train(subject, again, everything, steps, job.seed, limits, batches, noise, stage)
    anchor = _beside_plain(job, subject, recorder, stage) if job.changes_arithmetic else None
    return {
        "name": subject.name,
        "plain": anchor,
        "structure": before,
        "losses": recorder.losses,
        "norms": recorder.norms,
        "noise": noise.found,
        "floor": floor_of(dtypes if computed_in is None else [*dtypes, computed_in]),
        "constant buffers": constant,
        "notes": subject.notes,
        "parameters": sum(each.numel() for each in again.model.parameters()),
        "trainable": sum(each.numel() for each in again.model.parameters() if each.requires_grad),
        "optimizers": [type(each).__name__ for each in again.optimizers],
        "limits": limits,
        "batches": batches,
        "short": recorder.short,
    }


class Steps:
    """Sees nothing of the optimizers' steps."""

    def stepping(self, number: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Recorder(Steps):
    """Keeps every tensor of every step."""

    def __init__(self, store: Tensors) -> None:
        self.store = store
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.short: dict[int, torch.dtype] = {}
        """Of optimizers, by number, the dtype of 16 bits in which they compute what is not stored in it."""

    def begin(self, made: Made) -> None:
        """Keep what the run begins with."""
        self._keep("parameters", 0, states.parameters_of(made.model))
        self._keep("buffers", 0, states.buffers_of(made.model))

    def gradients(self, step: int, made: Made) -> None:
        self._keep("gradients", step, states.gradients_of(made.model))

    @contextlib.contextmanager
    def stepping(self, number: int) -> Iterator[None]:
        with ShortDtypes() as seen:
            yield
        if seen.dtypes:
            self.short[number] = seen.dtypes[0]

    def stepped(self, step: int, made: Made, loss: float, norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self._keep("parameters", step, states.parameters_of(made.model))
        self._keep("buffers", step, states.buffers_of(made.model))
        self._keep("state", step, states.state_of(made.model, made.optimizers))

    def _keep(self, kind: str, step: int, tensors: states.Named) -> None:
        for name, value in states.gathered(tensors):
            tensor = value if isinstance(value, torch.Tensor) else plain_tensor(value)
            if tensor is not None:
                self.store.write(kind, step, name, tensor)


class ShortDtypes(_torch.DispatchMode):
    """Sees in which dtypes of 16 bits something computes that is given wider ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.dtype for each in _torch.tensors_in((args, kwargs)) if each.is_floating_point()}
        made = {each.dtype for each in _torch.tensors_in(result) if each.is_floating_point()}
        self.dtypes += [each for each in made - given if each.itemsize == 2 and given]
        return result


class Noise(Steps):
    """Changes a run by rounding errors, and says how far that took it."""

    def __init__(self, recorder: Recorder, computed_in: torch.dtype | None) -> None:
        self._recorder, self._store = recorder, recorder.store
        self._random = torch.Generator().manual_seed(0)
        self._computed_in = computed_in
        self.found: dict[tuple[str, int, str], float] = {}

    def begin(self, made: Made) -> None:
        """Change the parameters that are trained."""
        for parameter in made.model.parameters():
            if parameter.requires_grad:
                self._shake(parameter, torch.promote_types(parameter.dtype, torch.float32))

    def gradients(self, step: int, made: Made) -> None:
        for parameter in made.model.parameters():
            if parameter.grad is not None:
                self._shake(parameter.grad, self._computed_in or parameter.grad.dtype)
        self._compare("gradients", step, states.gradients_of(made.model))

    def stepped(self, step: int, made: Made, loss: float, norm: float) -> None:
        for kind, found, expected in (
            ("losses", loss, self._recorder.losses[step - 1]),
            ("gradient norm", norm, self._recorder.norms[step - 1]),
        ):
            self.found[kind, step, ""] = number_distance(found, expected)[1]
        self._compare("parameters", step, states.parameters_of(made.model))
        self._compare("state", step, states.state_of(made.model, made.optimizers))

    def _compare(self, kind: str, step: int, tensors: states.Named) -> None:
        known = set(self._store.names(kind, step))
        for name, value in states.gathered(tensors):
            if isinstance(value, torch.Tensor) and name in known:
                expected = self._store.read(kind, step, name)
                if expected.shape == value.shape:
                    beside = self._store.read(kind, 0, name) if kind == "parameters" else None
                    self.found[kind, step, name] = distance(value, expected, beside)[1]

    @torch.no_grad()
    def _shake(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Change what is not zero by rounding errors of ``dtype``, of itself and of the usual size, for sums cancel."""
        local = states.local(tensor)
        if not local.is_floating_point():
            return
        wide, some = local.double(), local != 0
        usual = wide[some].square().mean().sqrt() if bool(some.any()) else 0.0
        change = torch.rand(local.shape, generator=self._random, dtype=torch.float64).mul_(2).sub_(1).to(local.device)
        change *= SHAKE * torch.finfo(dtype).eps
        local.copy_(torch.where(some, wide + change * (wide.abs() + usual), wide))


def plain_tensor(value: Any) -> torch.Tensor | None:
    """A number in an optimizer's state as a tensor; None of what is no number."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, (bool, int, float)) else None


@dataclass(frozen=True)
class BesidePlain:
    """How far training with the plan's arithmetic is from plain training, nothing of this library in it."""

    losses: float
    """The largest relative difference of a step's losses."""
    moved: float
    """How far all parameters together have moved otherwise, over how far they have moved in plain training."""


def _beside_plain(job: Job, subject: Subject, recorder: Recorder, stage: Stage) -> BesidePlain:
    """Train the plain model too, without mixed precision and compiling."""
    stage.words = "building the plain model"
    made = subject.plain()
    made.scaler = None
    plain = Losses()
    train(subject, made, range(job.parts), range(1, job.steps + 1), job.seed, {}, Batches(), plain, stage)
    apart = moved = 0.0
    for name, value in states.parameters_of(made.model).items():
        before, after = (recorder.store.read("parameters", step, name).double() for step in (0, job.steps))
        apart += float((states.whole(value).double() - after).square().sum())
        moved += float((states.whole(value).double() - before).square().sum())
    losses = max(number_distance(one, two)[1] for one, two in zip(recorder.losses, plain.losses, strict=True))
    return BesidePlain(losses, math.sqrt(apart / moved) if moved else float(apart > 0))


class Losses(Steps):
    """Keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def gradients(self, step: int, made: Made) -> None:
        pass

    def stepped(self, step: int, made: Made, loss: float, norm: float) -> None:
        self.losses.append(loss)


def _check_says_something(name: str, recorder: Recorder, steps: int) -> None:
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


def _made(job: Job, subject: Subject) -> Made:
    return subject.sharded() if job.changes_arithmetic else subject.plain()


def _check_same(name: str, made: Made, store: Tensors) -> None:
    for key, value in states.gathered(states.parameters_of(made.model)):
        if distance(value, store.read("parameters", 0, key))[0]:
            raise ValueError(
                f"{name} gives {key!r} other values each time it is called, although the random generators of Python, "
                "numpy and torch are seeded before: make it repeatable"
            )


def _computed_in(made: Made) -> torch.dtype | None:
    """The dtype of mixed precision."""
    precision = made.plan.mixed_precision if made.plan is not None else None
    if precision is None or precision.compute is None:
        return None
    dtype: torch.dtype = getattr(torch, precision.compute)
    return dtype
