"""The reference: one process, without sharding, that takes the whole global batch part by part.

It runs twice. The second run begins with parameters that are a rounding error away from the first's, and changes its
gradients by as much at every step: how far it ends up is what rounding does to this model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trueshard.verification import states
from trueshard.verification.beside_plain import BesidePlain, beside_plain
from trueshard.verification.choosing import subject_of
from trueshard.verification.compare import distance, floor_of
from trueshard.verification.job import Job, Tensors
from trueshard.verification.noise import Noise
from trueshard.verification.recording import Recorder
from trueshard.verification.structure import Structure, structure_of
from trueshard.verification.subject import Made, Subject
from trueshard.verification.training import Batches, Stage, train


@dataclass(frozen=True)
class Reference:
    """What the other runs are held against, besides the tensors on disk."""

    name: str
    structure: Structure
    """Of the model before its first step."""
    losses: Sequence[float]
    norms: Sequence[float]
    """Of all gradients of a step, before they are clipped."""
    noise: dict[tuple[str, int, str], float]
    """By kind, step and name: how far rounding took a tensor."""
    floor: float
    short: dict[int, torch.dtype]
    """By number of the optimizer: the dtype of 16 bits in which it computes."""
    limits: dict[int, float]
    """To which the gradients of each step are clipped."""
    batches: Batches
    constant_buffers: Sequence[str]
    plain: BesidePlain | None
    """Where the reference has mixed precision or is compiled."""
    notes: Sequence[str]
    parameters: int
    trainable: int
    optimizers: Sequence[str]


def run(job: Job, stage: Stage) -> Reference:
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
    return Reference(
        name=subject.name,
        structure=before,
        losses=recorder.losses,
        norms=recorder.norms,
        noise=noise.found,
        floor=floor_of(dtypes if computed_in is None else [*dtypes, computed_in]),
        short=recorder.short,
        limits=limits,
        batches=batches,
        constant_buffers=constant,
        plain=beside_plain(job, subject, recorder, stage) if job.changes_arithmetic else None,
        notes=subject.notes,
        parameters=sum(each.numel() for each in again.model.parameters()),
        trainable=sum(each.numel() for each in again.model.parameters() if each.requires_grad),
        optimizers=[type(each).__name__ for each in again.optimizers],
    )


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
