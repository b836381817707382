"""The runs of a verification: the reference, the sharded run, and the run on other ranks that resumes from it.

- The reference is one process, without sharding, that takes the whole global batch part by part. It runs twice. The
  second run begins with parameters that are a rounding error away from the first's, and changes its gradients by as
  much at every step: how far it ends up is what rounding does to this model.
- Where mixed precision or compiling is asked for, which change the result on one device too, the reference has the same
  plan, and is compared with plain training.
- The sharded run is compared with it step by step. Each rank takes its part; every tensor is gathered, one at a time,
  and the first rank compares it.
- Around a save, every bit of each rank's part is compared: saving must have no side effect.
- Before a load, everything that a checkpoint holds is changed, so that the load has to bring all of it back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.errors import one_line
from trueshard.model.names import unwrap
from trueshard.optim.seeded_random import DRAWS
from trueshard.verification import compare
from trueshard.verification.compare import FLOORS, Comparison, Named, Structure, TensorStore, Tolerances
from trueshard.verification.subjects import Case, Subject, TrainingSetup, subject_of
from trueshard.verification.training import Comparer, Progress, RunRecord, Watcher, train, wrong_dtypes

CHECKPOINT = "checkpoint"
SAVED = ("parameters", "buffers", "state")  # kinds of values that a checkpoint holds
WORDS = {"parameters": "parameter", "gradients": "the gradient of", "buffers": "buffer", "state": "optimizer state"}


@dataclass(frozen=True)
class Reference:
    """Result of the reference, with which the other runs are compared; its tensors are on disk."""

    setting: Mapping[str, Any]  # name, parameters and optimizers, for the report
    structure: Structure  # before the first step
    ending: Structure  # after the last step: an optimizer may count in its groups
    tolerances: Tolerances
    record: RunRecord
    constant_buffers: Sequence[str]
    plain: tuple[float, float] | None
    """Distance from plain training: largest relative difference of a step's losses, and of how far all parameters
    together have moved over their movement there. None if the reference is plain training, or the optimizer draws."""
    notes: Sequence[str]
    hashes: Mapping[int, str]  # of the state after each step, where the run is exact


class StepRecorder(Watcher):
    """Record every tensor of every step on disk."""

    def __init__(self, store: TensorStore) -> None:
        super().__init__()
        self._store = store
        self.short: dict[int, torch.dtype] = {}  # optimizer's number → 16-bit dtype in which it computes wider values

    def see(self, kind: str, step: int, values: Named) -> None:
        for name, tensor in compare.gathered_tensors(values):
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
        before, after = (
            {tensor.dtype for tensor in _torch.tensors_in(values) if tensor.is_floating_point()}
            for values in ((args, kwargs), result)
        )
        self.dtypes += [dtype for dtype in after - before if dtype.itemsize == 2 and before]
        return result


class RoundingNoise(Comparer):
    """Change a run by rounding errors of ``compute`` or of its own dtypes, and measure how far that takes it."""

    def __init__(self, case: Case, compute: torch.dtype | None) -> None:
        super().__init__(case, Tolerances({}, 0.0, {}), ())
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
        change *= compare.SHAKE * torch.finfo(dtype).eps
        part.copy_(torch.where(some, wide + change * (wide.abs() + usual), wide))


def reference(case: Case, progress: Progress) -> Reference:
    """Run without sharding, twice; leave the first one's tensors in ``case.tensors("reference")``."""
    subject, record, store = subject_of(case.on_other_ranks()), RunRecord(), case.tensors("reference")
    recorder = StepRecorder(store)
    build = subject.sharded if case.changes_arithmetic else subject.plain
    progress.stage = "building the model"
    setup = build()
    structure = compare.structure_of(setup.model, setup.optimizers)
    losses = train(subject, setup, record, recorder, progress)
    ending = compare.structure_of(setup.model, setup.optimizers)
    _check_trains(subject.name, losses, store, case.steps)
    precision = None if setup.plan is None else setup.plan.mixed_precision
    compute = None if precision is None or precision.compute is None else getattr(torch, precision.compute)
    floor, floors = _floors(setup, recorder.short, compute)
    progress.stage = "building the model again"
    again = build()
    _check_repeatable(subject.name, setup.model, again.model, store)
    del setup
    noise = RoundingNoise(case, compute)
    train(subject, again, record, noise, progress)
    measured = {(each.kind, each.step, each.name): each.relative for each in noise.compared if not each.words}
    parameters = list(again.model.parameters())
    draws = any(DRAWS in group for optimizer in again.optimizers for group in optimizer.param_groups)
    drawn = ["The optimizer draws random numbers, and plain training would draw others: it is not compared."] * draws
    return Reference(
        setting={
            "name": subject.name,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "optimizers": [type(optimizer).__name__ for optimizer in again.optimizers],
        },
        structure=structure,
        ending=ending,
        tolerances=Tolerances(measured, floor, floors),
        record=record,
        constant_buffers=[
            name
            for name in store.names("buffers", 0)
            if torch.equal(store.read("buffers", 0, name), store.read("buffers", case.steps, name))
        ],
        plain=_plain_distance(subject, losses, progress) if case.changes_arithmetic and not draws else None,
        notes=[*subject.notes, *drawn, *recorder.coarse, *_batch_norms(again.model)],
        hashes=recorder.hashes,
    )


def _check_repeatable(name: str, first: nn.Module, again: nn.Module, store: TensorStore) -> None:
    """Raise ValueError unless the second model is another object of the same values. Collective."""
    if again is first:
        raise ValueError(f"{name} gives the same model each time it is called; make a new one there")
    for key, value in compare.gathered_tensors(compare.values_of("parameters", again)):
        if compare.distance(value, store.read("parameters", 0, key))[0]:
            raise ValueError(
                f"{name} gives {key!r} other values each time it is called, although the random generators of "
                "Python, numpy and torch are seeded before: make it repeatable"
            )


def _batch_norms(model: nn.Module) -> list[str]:
    norms = [module for module in model.modules() if isinstance(module, _torch.BatchNorm) and module.training]
    if all(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        return []
    return [
        "The model has batch normalisation, which sees one rank's part of the batch: it does not compute what one "
        "device computes. Use nn.SyncBatchNorm.convert_sync_batchnorm(model)."
    ]


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


def _plain_distance(subject: Subject, losses: Sequence[float], progress: Progress) -> tuple[float, float]:
    progress.stage = "building the plain model"
    setup = subject.plain()
    setup.scaler = None
    plain = train(subject, setup, RunRecord(), Watcher(), progress)
    store, steps = subject.case.tensors("reference"), (0, subject.case.steps)
    apart = moved = 0.0
    for name, value in compare.values_of("parameters", setup.model).items():
        before, after = (store.read("parameters", step, name).double() for step in steps)
        apart += float((compare.whole(value).double() - after).square().sum())
        moved += float((compare.whole(value).double() - before).square().sum())
    pairs = zip(*(torch.tensor(each, dtype=torch.float64) for each in (losses, plain)), strict=True)
    return max(compare.distance(*pair)[1] for pair in pairs), math.sqrt(apart / moved) if moved else float(apart > 0)


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


# The sharded run


def sharded(case: Case, progress: Progress) -> dict[str, Any]:
    """Train sharded, and save before the first step and after ``case.save_after``. Collective."""
    subject, known = subject_of(case), case.get("reference")
    progress.stage = "shard()"
    setup = subject.sharded()
    beginning = compare.structure_of(setup.model, setup.optimizers)
    result: dict[str, Any] = {"plan": setup.plan, "structure": compare.differences(beginning, known.structure)}
    comparer = CheckpointComparer(case, known, progress)
    with wrong_dtypes(setup) as result["computed in"]:
        train(subject, setup, known.record, comparer, progress)
    ending = compare.structure_of(setup.model, setup.optimizers)
    result["structure at the end"] = compare.differences(ending, known.ending)
    result["in common"] = compare.unequal_copies(setup.model)
    result["steps"], comparer.compared = comparer.compared, []
    try:
        result["loaded"], result["structure loaded"] = comparer.load(setup)
    except (ValueError, RuntimeError, OSError) as error:
        words = f"cannot be loaded: {type(error).__name__}: {one_line(error)}"
        result["loaded"] = [Comparison.fault("checkpoint", case.save_after, CHECKPOINT, words)]
        result["structure loaded"] = {}
    return result | {"disturbed": comparer.disturbed, "disk": comparer.disk, "hashes": comparer.hashes}


def restored(case: Case, progress: Progress) -> dict[str, Any]:
    """Load on other ranks what ``sharded`` saved, and take the remaining steps. Collective."""
    subject, known = subject_of(case), case.get("reference")
    progress.stage = "building the model"
    setup = subject.sharded() if case.other_ranks > 1 or case.changes_arithmetic else subject.plain()
    comparer = CheckpointComparer(case, known, progress)
    loaded, structure = comparer.load(setup)
    train(subject, setup, known.record, comparer, progress, first=case.save_after + 1)
    return {"loaded": loaded, "structure": structure, "steps": comparer.compared, "hashes": comparer.hashes}


class CheckpointComparer(Comparer):
    """Compare each step with the reference's, and checkpoints with what was saved."""

    def __init__(self, case: Case, known: Reference, progress: Progress) -> None:
        super().__init__(case, known.tolerances, known.constant_buffers, case.is_exact)
        self._known, self._progress = known, progress
        self.disturbed: list[str] = []  # side effects of a save, in words
        self.disk: list[str] = []  # differences of a checkpoint's own listing, in words

    def begin(self, setup: TrainingSetup) -> None:
        super().begin(setup)
        self.save(setup, 0)

    def stepped(self, step: int, setup: TrainingSetup, loss: float, norm: float) -> None:
        super().stepped(step, setup, loss, norm)
        if step == self.case.save_after:
            self.save(setup, step)

    def save(self, setup: TrainingSetup, step: int) -> None:
        """Write a checkpoint, and find its side effects. Collective."""
        self._progress.stage = f"saving after step {step}"
        before = rank_state(setup.model, setup.optimizers)
        name = CHECKPOINT if step else f"{CHECKPOINT}-before"
        trueshard.save(self.case.folder / name, **_saved(setup))
        mine = [f"saving after step {step} {words}" for words in changes(before, setup.model, setup.optimizers)]
        ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        self.disturbed += [f"{words} (rank {rank})" for rank, messages in enumerate(ranks) for words in messages]
        if self._is_first:
            listing = trueshard.inspect(str(self.case.folder / name))
            assert isinstance(listing, trueshard.Inspected)
            self.disk += compare.differences_on_disk(listing, self._known.structure)
        values = {kind: compare.values_of(kind, setup.model, setup.optimizers) for kind in SAVED if step}
        for kind in values:
            for key, tensor in compare.gathered_tensors(values[kind]):
                if self._is_first:
                    self.case.tensors("saved").write(kind, step, key, tensor)

    def load(self, setup: TrainingSetup) -> tuple[list[Comparison], dict[str, str]]:
        """Overwrite all that the checkpoint holds, load it, and compare every bit with what was saved. Collective.

        Returns the comparisons, and by aspect how the structure differs from the reference's.
        """
        self._progress.stage = "loading the checkpoint"
        overwrite(setup.model, setup.optimizers)
        trueshard.load(self.case.folder / CHECKPOINT, **_saved(setup))
        self._progress.stage = "after loading the checkpoint"
        for kind in SAVED:
            values = compare.values_of(kind, setup.model, setup.optimizers)
            self.compare(kind, self.case.save_after, values, self.case.tensors("saved"), exactly=True)
        loaded, self.compared = self.compared, []
        start, end = self._known.structure, self._known.ending
        structures = (compare.structure_of(setup.model, setup.optimizers), start)
        return loaded, compare.differences(*(compare.without_counts(each, start, end) for each in structures))


def _saved(setup: TrainingSetup) -> dict[str, Any]:
    optimizers = {f"optimizer{number}": optimizer for number, optimizer in enumerate(setup.optimizers)}
    optimizer = setup.optimizers[0] if len(optimizers) == 1 else optimizers or None
    return {"model": setup.model, "optimizer": optimizer, **({"scaler": setup.scaler} if setup.scaler else {})}


@torch.no_grad()
def overwrite(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Change this rank's part of all that a checkpoint holds: also persistent buffers and numbers of groups."""
    state = compare.values_of("state", model, optimizers)
    for value in (*unwrap(model).state_dict(keep_vars=True).values(), *state.values()):
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


def rank_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return this rank's values, by a description of each."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in _walk(model, optimizers)}


def changes(before: Mapping[str, Any], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Return how this rank's values differ from those that ``rank_state`` returned before, in words."""
    after = dict(_walk(model, optimizers))
    words = [f"removed {key}" for key in before if key not in after]
    words += [f"made {key}" for key in after if key not in before]
    for key in [key for key in before if key in after]:
        one, two = before[key], after[key]
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.dtype == two.dtype:
            if largest := compare.distance(two, one)[0]:
                words.append(f"changed {key} by up to {largest:.3g}")
        elif type(one) is not type(two) or isinstance(one, torch.Tensor) or not (one is two or one == two):
            words.append(f"changed {key}")
    return words


def _walk(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    for kind, words in WORDS.items():
        for name, value in compare.values_of(kind, model, optimizers).items():
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
