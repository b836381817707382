"""Schedules of pipelines as numbers: microbatches in flight, bubbles, and what a stage receives. See ``pipelining``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

ScheduleWord = Literal["1f1b", "gpipe", "interleaved"]
SCHEDULES = get_args(ScheduleWord)


@dataclass(frozen=True)
class Pipeline:
    """Stages of a model, and the order in which microbatches run through them."""

    stages: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    """Chunks of blocks a rank, one after another in the model; more than one for ``"interleaved"`` alone."""

    parts: int = 1
    """Parts of an activation, sent by as many ranks of the tensor axis; 1: each sends all, as in ``shard()``."""
    outputs: bool = False
    """True if the last stage keeps its outputs of all microbatches to the end of a step, each rank its part, as torch's
    schedules do by default (``output_chunks`` of torch/distributed/pipelining/stage.py), and joins them in one tensor
    then (``_merge_outputs`` of schedules.py)."""

    def __post_init__(self) -> None:
        for key, value in (("pipeline", self.stages), ("virtual", self.virtual)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{key}={value!r} must be a whole number, 1 or more")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
        if (self.virtual > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"schedule={self.schedule!r} with virtual={self.virtual}: chunks of a rank, 2 or more, go with "
                'schedule="interleaved", and it with them'
            )

    def check(self, microbatches: int, blocks: int) -> None:
        """Raise ValueError if a model of so many blocks cannot be cut, or the schedule wants other microbatches."""
        if self.stages * self.virtual > blocks:
            raise ValueError(
                f"pipeline={self.stages} × virtual={self.virtual}: the model has {blocks} blocks, fewer than chunks"
            )
        if self.schedule == "1f1b" and microbatches < self.stages:
            raise ValueError(
                f"accumulation={microbatches}: with schedule='1f1b' there are at least as many microbatches as the "
                f"{self.stages} stages"
            )
        if self.schedule == "interleaved" and microbatches % self.stages:
            raise ValueError(
                f"accumulation={microbatches}: with schedule='interleaved' the microbatches are a multiple of the "
                f"{self.stages} stages"
            )

    def blocks(self, stage: int, blocks: int) -> int:
        """Return how many of a model's blocks a stage has; what is left over goes to the stages in the middle first.

        The first and the last have embeddings and the head besides.
        """
        fewest, left = divmod(blocks, self.stages)
        return fewest + (stage <= left if 0 < stage < self.stages - 1 else stage == 0 and left == self.stages - 1)

    def middle(self, blocks: int) -> int:
        """Return how many stages in the middle have more blocks than the first one."""
        return sum(self.blocks(stage, blocks) > self.blocks(0, blocks) for stage in range(1, self.stages - 1))

    def in_flight(self, stage: int, microbatches: int) -> float:
        """Return how many microbatches of a stage's activations its ranks hold at most."""
        behind = self.stages - stage - 1
        if self.schedule == "gpipe":
            return microbatches
        if self.schedule == "1f1b":
            return min(behind + 1, microbatches)
        chunks = 2 * behind + (self.virtual - 1) * self.stages + 1
        return min(chunks, microbatches * self.virtual) / self.virtual

    def backwards(self, stage: int, microbatches: int) -> Iterator[tuple[float, float]]:
        """Yield, for each backward of a rank's stage: microbatches in flight, and the part of the stage's gradients.

        A chunk of several accumulates gradients from its first backward on, and reduces them after its last. Order:
        ``ScheduleInterleaved1F1B`` of torch/distributed/pipelining/schedules.py. Of one chunk a stage has all at once.
        """
        if self.virtual == 1:
            yield self.in_flight(stage, microbatches), 1.0
            return
        every = microbatches * self.virtual
        forwards = min(every, (self.virtual - 1) * self.stages + 2 * (self.stages - stage - 1))
        left = [microbatches] * self.virtual
        for done in range(every):
            chunk = self.virtual - 1 - done // self.stages % self.virtual
            forwards = min(every, forwards + 1)
            begun = sum(0 < count < microbatches for number, count in enumerate(left) if number != chunk)
            yield (forwards - done) / self.virtual, (begun + 1) / self.virtual
            left[chunk] -= 1

    def received(self, stage: int, microbatches: int) -> int:
        """Return how many activations and gradients of a microbatch a rank of a stage receives in a step."""
        edges = int(stage == 0) + int(stage == self.stages - 1)
        return microbatches * (2 * self.virtual - edges)
