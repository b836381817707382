"""The sharded run, compared with the reference step by step, and the run on other ranks that resumes from it.

- Each rank takes its part; every tensor is gathered, one at a time, and the first rank compares it.
- Around a save, every bit of each rank's part is compared: saving must have no side effect.
- Before a load, everything that a checkpoint holds is changed, so that the load has to bring all of it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard.errors import one_line
from trueshard.model.names import unwrap
from trueshard.verification.compare import (
    Comparison,
    TensorStore,
    Tolerances,
    differences,
    differences_on_disk,
    distance,
    floors_of,
    gathered_tensors,
    local,
    number_distance,
    structure_of,
    values_of,
)
from trueshard.verification.reference import Reference
from trueshard.verification.subjects import Case, TrainingSetup
from trueshard.verification.training import ComputeDtypes, Progress, Watcher, subject_of, train

CHECKPOINT = "checkpoint"
SAVED = ("parameters", "buffers", "state")
"""Kinds of values that a checkpoint holds."""

RankState = dict[str, Any]
"""This rank's values, by a description of each."""


def run(case: Case, progress: Progress) -> dict[str, Any]:
    """Train sharded, and save before the first step and after ``case.save_after``. Collective."""
    subject, known = subject_of(case), case.get("reference")
    progress.stage = "shard()"
    setup = subject.sharded()
    found: dict[str, Any] = {"plan": setup.plan, "structure": _structure_differences(setup, known)}
    comparer = Comparer(case, known, progress, saves=True)
    comparer.begin(setup)
    comparer.save(setup, 0)
    dtypes = ComputeDtypes(setup)
    train(case, subject, setup, known.record, comparer, progress)
    found["computed in"] = dtypes.end()
    comparer.end(setup)
    found["structure at the end"] = _structure_differences(setup, known)
    steps, comparer.found = comparer.found, []
    try:
        found["loaded"], found["structure loaded"] = comparer.load(setup)
    except (ValueError, RuntimeError, OSError) as error:
        words = f"cannot be loaded: {type(error).__name__}: {one_line(error)}"
        found["loaded"] = [Comparison("checkpoint", case.save_after, CHECKPOINT, math.inf, math.inf, 0.0, words)]
        found["structure loaded"] = {}
    return found | {"steps": steps, "disturbed": comparer.disturbed, "disk": comparer.disk}


def restore(case: Case, progress: Progress) -> dict[str, Any]:
    """Load on other ranks what ``run`` saved, and take the remaining steps. Collective."""
    subject, known = subject_of(case), case.get("reference")
    progress.stage = "building the model"
    setup = subject.sharded() if case.other_ranks > 1 or case.changes_arithmetic else subject.plain()
    comparer = Comparer(case, known, progress)
    loaded, structure = comparer.load(setup)
    train(case, subject, setup, known.record, comparer, progress, first=case.save_after + 1)
    return {"loaded": loaded, "structure": structure, "steps": comparer.found}


class Comparer(Watcher):
    """Compare each step with the reference's. What it finds is on the first rank."""

    def __init__(self, case: Case, known: Reference, progress: Progress, saves: bool = False) -> None:
        self._case, self._known, self._progress, self._saves = case, known, progress, saves
        self._store = case.tensors("reference")
        floors = floors_of(known.short, known.structure.members())
        self._tolerances = Tolerances(known.noise, known.floor, floors)
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.found: list[Comparison] = []
        self.disturbed: list[str] = []
        """Side effects of a save, in words."""
        self.disk: list[str] = []
        """Differences of a checkpoint's own listing, in words."""

    def begin(self, setup: TrainingSetup) -> None:
        """Compare the initial values with the reference's: no bit may differ."""
        for kind in ("parameters", "buffers"):
            self.compare(kind, 0, setup, self._store, exactly=True)

    def end(self, setup: TrainingSetup) -> None:
        """Compare the buffers that did not change in the reference: no bit may differ."""
        constant = set(self._known.constant_buffers)
        self.compare("buffers", self._case.steps, setup, self._store, exactly=True, only=constant)

    def gradients(self, step: int, setup: TrainingSetup) -> None:
        self.compare("gradients", step, setup, self._store)

    def stepped(self, step: int, setup: TrainingSetup, loss: float, norm: float) -> None:
        self._add("losses", step, "", *number_distance(loss, self._known.losses[step - 1]))
        self._add("gradient norm", step, "", *number_distance(norm, self._known.norms[step - 1]))
        self.compare("parameters", step, setup, self._store)
        self.compare("state", step, setup, self._store)
        if self._saves and step == self._case.save_after:
            self.save(setup, step)

    def compare(
        self,
        kind: str,
        step: int,
        setup: TrainingSetup,
        store: TensorStore,
        exactly: bool = False,
        only: set[str] | None = None,
    ) -> None:
        """Compare every tensor of a kind with those of ``store``. Collective.

        Args:
            exactly: no bit may differ.
            only: names to compare; None: all.
        """
        expected = set(store.names(kind, step)) if self._is_first else set()
        values = values_of(kind, setup.model, setup.optimizers)
        if only is not None:
            expected, values = expected & only, {name: each for name, each in values.items() if name in only}
        for name, tensor in gathered_tensors(values):
            if not self._is_first:
                continue
            if name not in expected:
                self._wrong(kind, step, name, "is there, and not on one process")
                continue
            expected.discard(name)
            known = store.read(kind, step, name)
            if known.dtype != tensor.dtype:
                self._wrong(kind, step, name, f"is {tensor.dtype}, and {known.dtype} there".replace("torch.", ""))
                continue
            start = self._store.read(kind, 0, name) if kind == "parameters" and step and not exactly else None
            self._add(kind, step, name, *distance(tensor, known, start), exactly)
        for name in sorted(expected):
            self._wrong(kind, step, name, "is missing")

    def save(self, setup: TrainingSetup, step: int) -> None:
        """Write a checkpoint, and find its side effects. Collective."""
        self._progress.stage = f"saving after step {step}"
        before = rank_state(setup.model, setup.optimizers)
        name = CHECKPOINT if step else f"{CHECKPOINT}-before"
        trueshard.save(self._case.folder / name, **_saved(setup))
        mine = [f"saving after step {step} {words}" for words in changes(before, setup.model, setup.optimizers)]
        ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        self.disturbed += [f"{words} (rank {rank})" for rank, each in enumerate(ranks) for words in each]
        if self._is_first:
            listing = trueshard.inspect(str(self._case.folder / name))
            assert isinstance(listing, trueshard.Inspected)
            self.disk += differences_on_disk(listing, self._known.structure)
        if step:
            saved = self._case.tensors("saved")
            for kind in SAVED:
                for key, tensor in gathered_tensors(values_of(kind, setup.model, setup.optimizers)):
                    if self._is_first:
                        saved.write(kind, step, key, tensor)

    def load(self, setup: TrainingSetup) -> tuple[list[Comparison], dict[str, str]]:
        """Overwrite all that the checkpoint holds, load it, and compare every bit with what was saved. Collective.

        Returns:
            The comparisons, and how names, dtypes, ties, trainability and groups differ from the reference's.
        """
        self._progress.stage = "loading the checkpoint"
        overwrite(setup.model, setup.optimizers)
        trueshard.load(self._case.folder / CHECKPOINT, **_saved(setup))
        self._progress.stage = "after loading the checkpoint"
        for kind in SAVED:
            self.compare(kind, self._case.save_after, setup, self._case.tensors("saved"), exactly=True)
        loaded, self.found = self.found, []
        return loaded, _structure_differences(setup, self._known)

    def _add(self, kind: str, step: int, name: str, largest: float, relative: float, exactly: bool = False) -> None:
        if self._is_first:
            tolerance = 0.0 if exactly else self._tolerances.of(kind, step, name)
            self.found.append(Comparison(kind, step, name, largest, relative, tolerance))

    def _wrong(self, kind: str, step: int, name: str, words: str) -> None:
        self.found.append(Comparison(kind, step, name, math.inf, math.inf, 0.0, words))


def _structure_differences(setup: TrainingSetup, known: Reference) -> dict[str, str]:
    return differences(structure_of(setup.model, setup.optimizers), known.structure)


def _saved(setup: TrainingSetup) -> dict[str, Any]:
    """Return the content of the checkpoint as arguments of ``trueshard.save`` and ``load``."""
    several = {f"optimizer{number}": each for number, each in enumerate(setup.optimizers)} or None
    optimizer = setup.optimizers[0] if len(setup.optimizers) == 1 else several
    scaler = {} if setup.scaler is None else {"scaler": setup.scaler}
    return {"model": setup.model, "optimizer": optimizer, **scaler}


# ---- side effects


@torch.no_grad()
def overwrite(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Change this rank's part of all that a checkpoint holds: also persistent buffers and numbers of groups."""
    values = [*unwrap(model).state_dict(keep_vars=True).values(), *values_of("state", model, optimizers).values()]
    for value in values:
        if isinstance(value, torch.Tensor):
            part = local(value)
            part.logical_not_() if part.dtype == torch.bool else part.add_(1)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({key: _other(value) for key, value in group.items() if key != "params"})


def _other(value: Any) -> Any:
    if isinstance(value, float):
        return value / 2
    if isinstance(value, tuple) and value and all(isinstance(each, float) for each in value):
        return tuple(each / 2 for each in value)
    return value


def rank_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> RankState:
    """Copy this rank's parameters, buffers, gradients, optimizer state, groups, modes and random state."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in _walk(model, optimizers)}


def changes(before: RankState, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Return what differs from ``before``, in words."""
    after = dict(_walk(model, optimizers))
    words = [f"removed {key}" for key in before if key not in after]
    words += [f"made {key}" for key in after if key not in before]
    for key, value in before.items():
        if key in after and not _same(value, after[key]):
            words.append(f"changed {key}{_by(value, after[key])}")
    return words


def _walk(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield f"parameter {name!r}", local(parameter)
        yield f"requires_grad of {name!r}", parameter.requires_grad
        yield f"the gradient of {name!r}", None if parameter.grad is None else local(parameter.grad)
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", local(buffer)
    for name, value in values_of("state", model, optimizers).items():
        yield f"optimizer state {name!r}", local(value) if isinstance(value, torch.Tensor) else value
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{key!r} of optimizer {number}, group {place}", value
    for name, module in model.named_modules():
        yield f"the mode of module {name!r}", module.training
    yield "the random state", torch.get_rng_state()


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        unequal = one != two
        if one.is_floating_point():
            unequal &= ~(one.isnan() & two.isnan())
        return not bool(unequal.any())
    return type(one) is type(two) and bool(one is two or one == two)


def _by(one: Any, two: Any) -> str:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape and one.numel():
        return f" by up to {float((two.double() - one.double()).abs().max()):.3g}"
    return ""
