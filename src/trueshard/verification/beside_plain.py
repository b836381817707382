"""Mixed precision and compiling beside plain training: where both sides of a verification use them, this holds both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trueshard.verification import states
from trueshard.verification.compare import number_distance
from trueshard.verification.job import Job
from trueshard.verification.recording import Recorder, Steps
from trueshard.verification.subject import Made, Subject
from trueshard.verification.training import Batches, Stage, train


@dataclass(frozen=True)
class BesidePlain:
    """How far training with the plan's arithmetic is from plain training, nothing of this library in it."""

    losses: float
    """The largest relative difference of a step's losses."""
    moved: float
    """How far all parameters together have moved otherwise, over how far they have moved in plain training."""


def beside_plain(job: Job, subject: Subject, recorder: Recorder, stage: Stage) -> BesidePlain:
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
