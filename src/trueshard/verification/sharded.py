"""The run over N ranks, held against the reference as it goes; and the one over other ranks that goes on from its save.

Each rank takes its part; every tensor is gathered, one at a time, and the first rank compares it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import trueshard
from trueshard.verification import states
from trueshard.verification.choosing import subject_of
from trueshard.verification.compare import Apart, Tolerances, distance, floors_of, number_distance
from trueshard.verification.computing import Computing
from trueshard.verification.job import Job, Tensors
from trueshard.verification.recording import Steps, plain_tensor
from trueshard.verification.reference import Reference
from trueshard.verification.spoiling import spoil
from trueshard.verification.structure import differences, differences_on_disk, structure_of
from trueshard.verification.subject import Made
from trueshard.verification.training import Stage, parts_of_rank, train
from trueshard.verification.undisturbed import changed, snapshot

CHECKPOINT = "checkpoint"


def run(job: Job, stage: Stage) -> dict[str, Any]:
    """Train sharded, and save before the first step and after ``job.save_after``. Collective."""
    subject = subject_of(job)
    stage.words = "shard()"
    made = subject.sharded()
    known = job.get("reference")
    found: dict[str, Any] = {
        "plan": made.plan,
        "structure": differences(structure_of(*_parts(made)), known.structure),
    }
    watcher = Comparing(job, known, stage, saves=True)
    watcher.begin(made)
    watcher.save(made, 0)
    steps = range(1, job.steps + 1)
    computing = Computing(made)
    train(subject, made, parts_of_rank(job.parts), steps, job.seed, known.limits, known.batches, watcher, stage)
    found["computed in"] = computing.end()
    watcher.end(made)
    found["structure at the end"] = differences(structure_of(*_parts(made)), known.structure)
    apart, watcher.apart = watcher.apart, []
    try:
        found["loaded"], found["structure loaded"] = watcher.load(made)
    except (ValueError, RuntimeError, OSError) as error:
        words = f"cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
        found["loaded"] = [Apart("checkpoint", job.save_after, CHECKPOINT, math.inf, math.inf, 0.0, words)]
        found["structure loaded"] = {}
    return found | {"apart": apart, "disturbed": watcher.disturbed, "disk": watcher.disk}


def restore(job: Job, stage: Stage) -> dict[str, Any]:
    """Load on other ranks what ``run`` saved, and take the steps that are left. Collective."""
    subject = subject_of(job)
    stage.words = "building the model"
    made = subject.sharded() if job.other_ranks > 1 or job.changes_arithmetic else subject.plain()
    known = job.get("reference")
    watcher = Comparing(job, known, stage)
    loaded, structure = watcher.load(made)
    steps = range(job.save_after + 1, job.steps + 1)
    train(subject, made, parts_of_rank(job.parts), steps, job.seed, known.limits, known.batches, watcher, stage)
    return {"loaded": loaded, "structure": structure, "apart": watcher.apart}


class Comparing(Steps):
    """Holds each step against the reference's. What it finds is on the first rank."""

    def __init__(self, job: Job, known: Reference, stage: Stage, saves: bool = False) -> None:
        self._job, self._known, self._stage = job, known, stage
        self._store = job.tensors("reference")
        floors = floors_of(known.short, known.structure.members())
        self._tolerances = Tolerances(known.noise, known.floor, floors)
        self._saves = saves
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.apart: list[Apart] = []
        self.disturbed: list[str] = []
        """What a save has changed, in words."""
        self.disk: list[str] = []
        """What a checkpoint's own listing says otherwise, in words."""

    def begin(self, made: Made) -> None:
        """Hold what the run begins with against what the reference began with: no bit may differ."""
        self.hold("parameters", 0, states.parameters_of(made.model), self._store, exactly=True)
        self.hold("buffers", 0, states.buffers_of(made.model), self._store, exactly=True)

    def end(self, made: Made) -> None:
        """Hold the buffers that the reference has left alone."""
        constant = set(self._known.constant_buffers)
        buffers = {name: each for name, each in states.buffers_of(made.model).items() if name in constant}
        self.hold("buffers", self._job.steps, buffers, self._store, exactly=True, only=constant)

    def gradients(self, step: int, made: Made) -> None:
        self.hold("gradients", step, states.gradients_of(made.model), self._store)

    def stepped(self, step: int, made: Made, loss: float, norm: float) -> None:
        known = (("losses", loss, self._known.losses), ("gradient norm", norm, self._known.norms))
        for kind, found, expected in known:
            self._told(kind, step, "", *number_distance(found, expected[step - 1]))
        self.hold("parameters", step, states.parameters_of(made.model), self._store)
        self.hold("state", step, states.state_of(made.model, made.optimizers), self._store)
        if self._saves and step == self._job.save_after:
            self.save(made, step)

    def hold(
        self,
        kind: str,
        step: int,
        tensors: states.Named,
        store: Tensors,
        exactly: bool = False,
        only: set[str] | None = None,
    ) -> None:
        """Compare every tensor of a kind with those that ``store`` has. Collective.

        Args:
            exactly: no bit may differ.
            only: names that are expected; None: all that the store has.
        """
        expected = set(store.names(kind, step)) if self._is_first else set()
        expected &= expected if only is None else only
        for name, value in states.gathered(tensors):
            tensor = value if isinstance(value, torch.Tensor) else plain_tensor(value)
            if not self._is_first or tensor is None:
                continue
            if name not in expected:
                self._wrong(kind, step, name, "is there, and not on one process")
                continue
            expected.discard(name)
            known = store.read(kind, step, name)
            if known.dtype != tensor.dtype:
                self._wrong(kind, step, name, f"is {tensor.dtype}, and {known.dtype} there".replace("torch.", ""))
                continue
            before = self._store.read(kind, 0, name) if kind == "parameters" and step and not exactly else None
            self._told(kind, step, name, *distance(tensor, known, before), exactly)
        for name in sorted(expected):
            self._wrong(kind, step, name, "is missing")

    def save(self, made: Made, step: int) -> None:
        """Write a checkpoint, and find out whether that has changed anything. Collective."""
        self._stage.words = f"saving after step {step}"
        before = snapshot(made.model, made.optimizers)
        more: dict[str, Any] = {} if made.scaler is None else {"scaler": made.scaler}
        name = CHECKPOINT if step else f"{CHECKPOINT}-before"
        trueshard.save(self._job.folder / name, model=made.model, optimizer=_optimizers(made), **more)
        mine = [f"saving after step {step} {words}" for words in changed(before, made.model, made.optimizers)]
        ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        self.disturbed += [f"{words} (rank {rank})" for rank, each in enumerate(ranks) for words in each]
        if self._is_first:
            listing = trueshard.inspect(str(self._job.folder / name))
            assert isinstance(listing, trueshard.Inspected)
            self.disk += differences_on_disk(listing, self._known.structure)
        if step:
            saved = self._job.tensors("saved")
            for kind, tensors in _everything(made).items():
                for key, value in states.gathered(tensors):
                    tensor = value if isinstance(value, torch.Tensor) else plain_tensor(value)
                    if self._is_first and tensor is not None:
                        saved.write(kind, step, key, tensor)

    def load(self, made: Made) -> tuple[list[Apart], dict[str, str]]:
        """Spoil all that the checkpoint holds, load it, and hold every bit against what was saved. Collective.

        Returns:
            The comparisons, and how names, dtypes, ties, trainability and groups differ from the reference's.
        """
        self._stage.words = "loading the checkpoint"
        spoil(made.model, made.optimizers)
        more: dict[str, Any] = {} if made.scaler is None else {"scaler": made.scaler}
        trueshard.load(self._job.folder / CHECKPOINT, model=made.model, optimizer=_optimizers(made), **more)
        self._stage.words = "after loading the checkpoint"
        for kind, tensors in _everything(made).items():
            self.hold(kind, self._job.save_after, tensors, self._job.tensors("saved"), exactly=True)
        loaded, self.apart = self.apart, []
        return loaded, differences(structure_of(*_parts(made)), self._known.structure)

    def _told(self, kind: str, step: int, name: str, largest: float, relative: float, exactly: bool = False) -> None:
        if self._is_first:
            tolerance = 0.0 if exactly else self._tolerances.of(kind, step, name)
            self.apart.append(Apart(kind, step, name, largest, relative, tolerance))

    def _wrong(self, kind: str, step: int, name: str, words: str) -> None:
        self.apart.append(Apart(kind, step, name, math.inf, math.inf, 0.0, words))


def _everything(made: Made) -> dict[str, states.Named]:
    return {
        "parameters": states.parameters_of(made.model),
        "buffers": states.buffers_of(made.model),
        "state": states.state_of(made.model, made.optimizers),
    }


def _optimizers(made: Made) -> Any:
    """As ``trueshard.save`` takes one or several."""
    if len(made.optimizers) == 1:
        return made.optimizers[0]
    return {f"optimizer{number}": each for number, each in enumerate(made.optimizers)} or None


def _parts(made: Made) -> tuple[torch.nn.Module, Sequence[torch.optim.Optimizer]]:
    return made.model, made.optimizers
