"""The sharded run, compared with the reference step by step, and the run on other ranks that resumes from it.

- Each rank takes its part; every tensor is gathered, one at a time, and the first rank compares it.
- Around a save, every bit of each rank's part is compared: saving must have no side effect.
- Before a load, everything that a checkpoint holds is changed, so that the load has to bring all of it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.errors import one_line
from trueshard.model.names import unwrap
from trueshard.verification.compare import (
    Comparison,
    differences,
    differences_on_disk,
    distance,
    gathered_tensors,
    structure_of,
    values_of,
)
from trueshard.verification.reference import Reference
from trueshard.verification.subjects import Case, TrainingSetup
from trueshard.verification.training import Comparer, Progress, subject_of, train, wrong_dtypes

CHECKPOINT = "checkpoint"
SAVED = ("parameters", "buffers", "state")  # kinds of values that a checkpoint holds
WORDS = {"parameters": "parameter", "gradients": "the gradient of", "buffers": "buffer", "state": "optimizer state"}
RankState = dict[str, Any]  # this rank's values, by a description of each


def run(case: Case, progress: Progress) -> dict[str, Any]:
    """Train sharded, and save before the first step and after ``case.save_after``. Collective."""
    subject, known = subject_of(case), case.get("reference")
    progress.stage = "shard()"
    setup = subject.sharded()
    found: dict[str, Any] = {"plan": setup.plan, "structure": _structure_differences(setup, known)}
    comparer = CheckpointComparer(case, known, progress)
    with wrong_dtypes(setup) as found["computed in"]:
        train(case, subject, setup, known.record, comparer, progress)
    found["structure at the end"] = _structure_differences(setup, known)
    found["steps"], comparer.found = comparer.found, []
    try:
        found["loaded"], found["structure loaded"] = comparer.load(setup)
    except (ValueError, RuntimeError, OSError) as error:
        words = f"cannot be loaded: {type(error).__name__}: {one_line(error)}"
        found["loaded"] = [Comparison.fault("checkpoint", case.save_after, CHECKPOINT, words)]
        found["structure loaded"] = {}
    return found | {"disturbed": comparer.disturbed, "disk": comparer.disk}


def restore(case: Case, progress: Progress) -> dict[str, Any]:
    """Load on other ranks what ``run`` saved, and take the remaining steps. Collective."""
    subject, known = subject_of(case), case.get("reference")
    progress.stage = "building the model"
    setup = subject.sharded() if case.other_ranks > 1 or case.changes_arithmetic else subject.plain()
    comparer = CheckpointComparer(case, known, progress)
    loaded, structure = comparer.load(setup)
    train(case, subject, setup, known.record, comparer, progress, first=case.save_after + 1)
    return {"loaded": loaded, "structure": structure, "steps": comparer.found}


class CheckpointComparer(Comparer):
    """Compare each step with the reference's, and checkpoints with what was saved."""

    def __init__(self, case: Case, known: Reference, progress: Progress) -> None:
        super().__init__(case.tensors("reference"), known.tolerances, known.constant_buffers, case.steps)
        self._case, self._known, self._progress = case, known, progress
        self.disturbed: list[str] = []
        """Side effects of a save, in words."""
        self.disk: list[str] = []
        """Differences of a checkpoint's own listing, in words."""

    def begin(self, setup: TrainingSetup) -> None:
        super().begin(setup)
        self.save(setup, 0)

    def stepped(self, step: int, setup: TrainingSetup, loss: float, norm: float) -> None:
        super().stepped(step, setup, loss, norm)
        if step == self._case.save_after:
            self.save(setup, step)

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

        Returns the comparisons, and by aspect how the structure differs from the reference's.
        """
        self._progress.stage = "loading the checkpoint"
        overwrite(setup.model, setup.optimizers)
        trueshard.load(self._case.folder / CHECKPOINT, **_saved(setup))
        self._progress.stage = "after loading the checkpoint"
        for kind in SAVED:
            values = values_of(kind, setup.model, setup.optimizers)
            self.compare(kind, self._case.save_after, values, self._case.tensors("saved"), exactly=True)
        loaded, self.found = self.found, []
        return loaded, _structure_differences(setup, self._known)


def _structure_differences(setup: TrainingSetup, known: Reference) -> dict[str, str]:
    return differences(structure_of(setup.model, setup.optimizers), known.structure)


def _saved(setup: TrainingSetup) -> dict[str, Any]:
    several = {f"optimizer{number}": each for number, each in enumerate(setup.optimizers)} or None
    optimizer = setup.optimizers[0] if len(setup.optimizers) == 1 else several
    scaler = {} if setup.scaler is None else {"scaler": setup.scaler}
    return {"model": setup.model, "optimizer": optimizer, **scaler}


@torch.no_grad()
def overwrite(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Change this rank's part of all that a checkpoint holds: also persistent buffers and numbers of groups."""
    values = [*unwrap(model).state_dict(keep_vars=True).values(), *values_of("state", model, optimizers).values()]
    for value in values:
        if isinstance(value, torch.Tensor):
            part = _torch.local(value.detach())
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
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in _walk(model, optimizers)}


def changes(before: RankState, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    after = dict(_walk(model, optimizers))
    words = [f"removed {key}" for key in before if key not in after]
    words += [f"made {key}" for key in after if key not in before]
    for key in [key for key in before if key in after]:
        one, two = before[key], after[key]
        if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.dtype == two.dtype):
            is_same = type(one) is type(two) and not isinstance(one, torch.Tensor) and (one is two or one == two)
            words += [] if is_same else [f"changed {key}"]
        elif largest := distance(two, one)[0]:
            words.append(f"changed {key} by up to {largest:.3g}")
    return words


def _walk(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    for kind, words in WORDS.items():
        for name, value in values_of(kind, model, optimizers).items():
            yield f"{words} {name!r}", _torch.local(value.detach()) if isinstance(value, torch.Tensor) else value
    for name, parameter in model.named_parameters():
        yield f"requires_grad of {name!r}", parameter.requires_grad
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{key!r} of optimizer {number}, group {place}", value
    for name, module in model.named_modules():
        yield f"the mode of module {name!r}", module.training
    yield "the random state", torch.get_rng_state()
