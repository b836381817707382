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

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from trueshard.sharding.hooks import runtime_of
from trueshard.verification import compare
from trueshard.verification.batch_trial import batch_notes
from trueshard.verification.compare import FLOORS, Comparison, Named, Structure, TensorStore, Tolerances
from trueshard.verification.subjects import Case, Subject, TrainingSetup, subject_of
from trueshard.verification.training import Progress, RunRecord, train, wrong_dtypes

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


class Comparer:
    """Compare what a run shows with what the reference has left on disk; the comparisons are on the first rank.

    Buffers are compared before training and, those that are ``constant``, after the last step: no bit may differ. With
    ``exact`` no bit of anything may.
    """

    def __init__(self, case: Case, tolerances: Tolerances, constant: Collection[str], exact: bool = False) -> None:
        self.case, self._is_exact = case, exact
        self._store, self._tolerances, self._constant = case.tensors("reference"), tolerances, constant
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.compared: list[Comparison] = []
        self.hashes: dict[int, str] = {}  # of the state after each step, where the run is exact

    def see(self, kind: str, step: int, values: Named) -> None:
        """Compare what ``train`` yields. Collective."""
        if kind == "hash":
            self.hashes[step] = values[""]
        elif kind != "buffers" or step == 0:
            self.compare(kind, step, values, self._store, exactly=step == 0)
        elif step == self.case.steps:
            constant = {name: value for name, value in values.items() if name in self._constant}
            self.compare(kind, step, constant, self._store, exactly=True, names=self._constant)

    def compare(
        self,
        kind: str,
        step: int,
        values: Named,
        store: TensorStore,
        exactly: bool,
        names: Collection[str] | None = None,
    ) -> None:
        """Compare every tensor of a kind with those of ``store``: all, or those of some names. Collective."""
        expected = set(store.names(kind, step) if names is None else names) if self._is_first else set()
        for name, tensor in compare.gathered_tensors(values):
            if self._is_first and name not in expected:
                self.compared.append(Comparison.fault(kind, step, name, "is there, and not on one process"))
            elif self._is_first:
                expected.discard(name)
                self.compared.append(self._compared(kind, step, name, tensor, store, exactly))
        self.compared += [Comparison.fault(kind, step, name, "is missing") for name in sorted(expected)]

    def _compared(
        self, kind: str, step: int, name: str, tensor: torch.Tensor, store: TensorStore, exactly: bool
    ) -> Comparison:
        expected = store.read(kind, step, name)
        if expected.dtype != tensor.dtype:
            words = f"is {tensor.dtype}, and {expected.dtype} there".replace("torch.", "")
            return Comparison.fault(kind, step, name, words)
        start = self._store.read(kind, 0, name) if kind == "parameters" and step and not exactly else None
        tolerance = 0.0 if exactly or self._is_exact else self._tolerances.of(kind, step, name)
        words = compare.first_bit(tensor, expected) if self._is_exact else ""
        return Comparison(kind, step, name, *compare.distance(tensor, expected, start), tolerance, words)


def reference(case: Case, progress: Progress) -> Reference:
    """Run without sharding, twice; leave the first one's tensors in ``case.tensors("reference")``."""
    subject, record, store = subject_of(case.on_other_ranks()), RunRecord(), case.tensors("reference")
    build = subject.sharded if case.changes_arithmetic else subject.plain
    progress.stage = "building the model"
    setup = build()
    structure = compare.structure_of(setup.model, setup.optimizers)
    short = [ShortDtypes() for _ in setup.optimizers]
    losses, hashes = list[float](), dict[int, str]()
    for kind, step, values in train(subject, setup, record, progress, stepping=short):
        if kind == "losses":
            losses.append(values[""])
        elif kind == "hash":
            hashes[step] = values[""]
        for name, tensor in compare.gathered_tensors(values):
            store.write(kind, step, name, tensor)
    ending = compare.structure_of(setup.model, setup.optimizers)
    _check_trains(subject.name, losses, store, case.steps)
    compute = compute_dtype(setup)
    floor, floors = _floors(setup, [mode.dtypes for mode in short], compute)
    runtime = runtime_of(unwrap(setup.model))
    coarse = [] if runtime is None or runtime.exact is None else runtime.exact.coarse
    progress.stage = "building the model again"
    again = build()
    _check_repeatable(subject.name, setup.model, again.model, store)
    del setup
    noise = _rounding_noise(subject, again, record, progress)
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
        tolerances=Tolerances(noise, floor, floors),
        record=record,
        constant_buffers=[
            name
            for name in store.names("buffers", 0)
            if torch.equal(store.read("buffers", 0, name), store.read("buffers", case.steps, name))
        ],
        plain=_plain_distance(subject, losses, progress) if case.changes_arithmetic and not draws else None,
        notes=[*subject.notes, *drawn, *coarse, *_batch_norms(again.model), *batch_notes(subject, again)],
        hashes=hashes,
    )


def compute_dtype(setup: TrainingSetup) -> torch.dtype | None:
    """Return the dtype in which units compute, if it is not that of their parameters."""
    precision = None if setup.plan is None else setup.plan.mixed_precision
    return None if precision is None or precision.compute is None else getattr(torch, precision.compute)


def shaken(
    subject: Subject, setup: TrainingSetup, record: RunRecord, progress: Progress
) -> Iterator[tuple[str, int, Named]]:
    """Yield what ``train`` does of a run that rounding errors disturb: of its first parameters, and of gradients."""
    random, compute = torch.Generator().manual_seed(0), compute_dtype(setup)
    for parameter in setup.model.parameters():
        if parameter.requires_grad:
            compare.shake(parameter, torch.promote_types(parameter.dtype, torch.float32), random)
    for kind, step, values in train(subject, setup, record, progress):
        for gradient in values.values() if kind == "gradients" else ():
            compare.shake(gradient, compute or gradient.dtype, random)
        yield kind, step, values


def _rounding_noise(
    subject: Subject, setup: TrainingSetup, record: RunRecord, progress: Progress
) -> dict[tuple[str, int, str], float]:
    """Return how far rounding errors take a run, by kind, step and name."""
    comparer = Comparer(subject.case, Tolerances({}, 0.0, {}), ())
    for kind, step, values in shaken(subject, setup, record, progress):
        if step:
            comparer.see(kind, step, values)
    return {(one.kind, one.step, one.name): one.relative for one in comparer.compared if not one.words}


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
    setup: TrainingSetup, short: Sequence[Sequence[torch.dtype]], compute: torch.dtype | None
) -> tuple[float, dict[str, float]]:
    """Return what any tensor may differ by, and parameters whose optimizer computes in a 16-bit dtype, by name.

    ``short``: those dtypes, by optimizer.
    Whether such a computation (Muon's Newton-Schulz in bfloat16) rounds one way or the other moves an update by a few
    roundings, or not at all: a second run may miss what a third one does.
    """
    name_of = {id(parameter): name for name, parameter in setup.model.named_parameters()}
    dtypes = {parameter.dtype for parameter in setup.model.parameters() if parameter.requires_grad}
    usual = FLOORS[torch.float32]
    return max((FLOORS.get(dtype, usual) for dtype in dtypes | ({compute} if compute else set())), default=usual), {
        name_of[id(parameter)]: 3 * FLOORS[dtype]
        for optimizer, computed in zip(setup.optimizers, short, strict=True)
        for dtype in computed[:1]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _plain_distance(subject: Subject, losses: Sequence[float], progress: Progress) -> tuple[float, float]:
    progress.stage = "building the plain model"
    setup = subject.plain()
    setup.scaler = None
    plain = [values[""] for kind, _, values in train(subject, setup, RunRecord(), progress) if kind == "losses"]
    store, steps = subject.case.tensors("reference"), (0, subject.case.steps)
    differing = moved = 0.0
    for name, parameter in setup.model.named_parameters():
        value = compare.full(parameter).double()
        before, after = (store.read("parameters", step, name).double() for step in steps)
        differing += float((value - after).square().sum())
        moved += float((value - before).square().sum())
    pairs = zip(*(torch.tensor(values, dtype=torch.float64) for values in (losses, plain)), strict=True)
    of_losses = max(compare.distance(*pair)[1] for pair in pairs)
    return of_losses, math.sqrt(differing / moved) if moved else float(differing > 0)


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
    subject, expected = subject_of(case), case.get("reference")
    progress.stage = "shard()"
    setup = subject.sharded()
    beginning = compare.structure_of(setup.model, setup.optimizers)
    result: dict[str, Any] = {"plan": setup.plan, "structure": compare.differences(beginning, expected.structure)}
    comparer = CheckpointComparer(case, expected, setup, progress)
    with wrong_dtypes(setup) as result["computed in"]:
        for values in train(subject, setup, expected.record, progress):
            comparer.see(*values)
    ending = compare.structure_of(setup.model, setup.optimizers)
    result["structure at the end"] = compare.differences(ending, expected.ending)
    result["in common"] = compare.unequal_copies(setup.model)
    runtime = runtime_of(unwrap(setup.model))
    result["plan"] = setup.plan if runtime is None else runtime.plan
    result["checks"] = 0 if runtime is None or runtime.watch is None else runtime.watch.checks
    result["steps"], comparer.compared = comparer.compared, []
    try:
        result["loaded"], result["structure loaded"] = comparer.load()
    except (ValueError, RuntimeError, OSError) as error:
        words = f"cannot be loaded: {type(error).__name__}: {one_line(error)}"
        result["loaded"] = [Comparison.fault("checkpoint", case.save_after, CHECKPOINT, words)]
        result["structure loaded"] = {}
    return result | {"disturbed": comparer.disturbed, "disk": comparer.disk, "hashes": comparer.hashes}


def restored(case: Case, progress: Progress) -> dict[str, Any]:
    """Load on other ranks what ``sharded`` saved, and take the remaining steps. Collective."""
    subject, expected = subject_of(case), case.get("reference")
    progress.stage = "building the model"
    setup = subject.sharded() if case.other_ranks > 1 or case.changes_arithmetic else subject.plain()
    comparer = CheckpointComparer(case, expected, setup, progress)
    loaded, structure = comparer.load()
    for values in train(subject, setup, expected.record, progress, first=case.save_after + 1):
        comparer.see(*values)
    return {"loaded": loaded, "structure": structure, "steps": comparer.compared, "hashes": comparer.hashes}


class CheckpointComparer(Comparer):
    """Compare each step with the reference's, and checkpoints with what was saved."""

    def __init__(self, case: Case, expected: Reference, setup: TrainingSetup, progress: Progress) -> None:
        super().__init__(case, expected.tolerances, expected.constant_buffers, case.is_exact)
        self._expected, self._setup, self._progress = expected, setup, progress
        self.disturbed: list[str] = []  # side effects of a save, in words
        self.disk: list[str] = []  # differences of a checkpoint's own listing, in words

    def see(self, kind: str, step: int, values: Named) -> None:
        super().see(kind, step, values)
        if (kind, step) in (("buffers", 0), ("state", self.case.save_after)):  # the last values of that step
            self.save(step)

    def save(self, step: int) -> None:
        """Write a checkpoint, and find its side effects. Collective."""
        setup, self._progress.stage = self._setup, f"saving after step {step}"
        before = rank_state(setup.model, setup.optimizers)
        name = CHECKPOINT if step else f"{CHECKPOINT}-before"
        trueshard.save(self.case.folder / name, **_saved(setup))
        local = [f"saving after step {step} {words}" for words in changes(before, setup.model, setup.optimizers)]
        ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, local)
        self.disturbed += [f"{words} (rank {rank})" for rank, messages in enumerate(ranks) for words in messages]
        if self._is_first:
            listing = trueshard.inspect(str(self.case.folder / name))
            assert isinstance(listing, trueshard.Inspected)
            self.disk += compare.differences_on_disk(listing, self._expected.structure)
        for kind in SAVED if step else ():
            for key, tensor in compare.gathered_tensors(compare.values_of(kind, setup.model, setup.optimizers)):
                if self._is_first:
                    self.case.tensors("saved").write(kind, step, key, tensor)

    def load(self) -> tuple[list[Comparison], dict[str, str]]:
        """Overwrite all that the checkpoint holds, load it, and compare every bit with what was saved. Collective.

        Returns the comparisons, and by aspect how the structure differs from the reference's.
        """
        setup, self._progress.stage = self._setup, "loading the checkpoint"
        overwrite(setup.model, setup.optimizers)
        trueshard.load(self.case.folder / CHECKPOINT, **_saved(setup))
        self._progress.stage = "after loading the checkpoint"
        for kind in SAVED:
            values = compare.values_of(kind, setup.model, setup.optimizers)
            self.compare(kind, self.case.save_after, values, self.case.tensors("saved"), exactly=True)
        loaded, self.compared = self.compared, []
        start, end = self._expected.structure, self._expected.ending
        structures = (compare.structure_of(setup.model, setup.optimizers), start)
        return loaded, compare.differences(*(compare.without_counts(one, start, end) for one in structures))


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
    if isinstance(value, tuple) and all(isinstance(number, float) for number in value):
        return tuple(number / 2 for number in value)
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
