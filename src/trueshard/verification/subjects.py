"""The model that is verified, with optimizers, loss and data, built anew in each process from the same seed.

- ``plain()`` is trained by one process without any sharding; ``sharded()`` is the same after ``trueshard.shard``.
- The global batch of a step consists of parts, one for each rank: whichever rank takes a part, it is the same samples,
  and its random numbers (dropout) are drawn from the same seed.
- What a user's factory leaves out is found as the planner finds it: the loss that ``forward`` returns, a batch by the
  first layer or the transformers configuration, AdamW.
- ``layers=`` keeps the first few blocks of a large model: enough to see every kind of parameter.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import trueshard
from trueshard._torch import own_class
from trueshard.axes import sizes_of
from trueshard.checkpoint.state import seed_all
from trueshard.distributed import replicated_mesh
from trueshard.errors import one_line
from trueshard.model import names
from trueshard.options import Options
from trueshard.planner.inputs import factories
from trueshard.planner.inputs.batches import model_loss
from trueshard.planner.inputs.factories import Original, TrainingParts
from trueshard.planner.inputs.fake_tensors import mapped
from trueshard.planner.inputs.optimizers import checked, optimizers_of
from trueshard.planner.inputs.workloads import model_feed
from trueshard.plans import Plan
from trueshard.train.losses import Loss, Mean
from trueshard.verification.compare import TensorStore

SAMPLES = 2  # samples of a part, if the batch is made here
SEQUENCE = 32  # tokens of a sample, at most, if the batch is made here
FIRST_SCALE = 1024.0
"""Loss scale for float16 to begin with: with torch's own, 65536, steps are skipped until it has come down."""
# Names of the number of layers in transformers configurations:
COUNTS: tuple[str, ...] = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
COUNTS += ("encoder_layers", "decoder_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Case:
    """One verification: the same data in each of its processes."""

    folder: Path  # temporary folder for what the processes leave to each other
    source: Any  # ``"file.py:factory"``, a function, a module as an ``Original``, or a training configuration
    plan: Plan | None
    choices: Options
    replicate: int  # copies of the model: a mesh (replicate, shard, …) if more than one
    ranks: int
    other_ranks: int  # ranks on which the checkpoint is loaded, on the axis of shards alone
    splits: bool  # ranks share sequences in one of the runs: in all of them a loss is a sum over targets
    parts: int  # of the global batch: as many as ranks that read different samples, here or there
    steps: int
    save_after: int  # step after which a checkpoint is written, from which other ranks go on
    seed: int
    layers: int | None
    sequence: int | None
    optimizer: str | None
    threads: int  # threads of each process: with another number, sums are taken in another order
    timeout: float

    def get(self, name: str) -> Any:
        return pickle.loads((self.folder / f"{name}.pickle").read_bytes())

    def tensors(self, name: str) -> TensorStore:
        return TensorStore(self.folder / name)

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along the axes on which the same samples are read."""
        return sizes_of(self.plan or self.choices)

    def on_other_ranks(self) -> Case:
        """Return the case of a run without choices that depend on the number of ranks."""
        choices = self.choices.replace(reshard_after_forward="default", tensor=1, context=1, experts=1)
        plan = None
        if self.plan is not None:
            plan = replace(self.plan, units=(), reshard_after_forward="default")
            plan = replace(plan, tensor=1, styles={}, sequence=False, context=1, experts=1)
        return replace(self, plan=plan, choices=choices, replicate=1)

    @property
    def changes_arithmetic(self) -> bool:
        """True if mixed precision or compiling is asked for, which changes the result without any sharding too."""
        asked = self.plan or self.choices
        return asked.mixed_precision is not None or bool(asked.compile) or self.is_exact

    @property
    def is_exact(self) -> bool:
        """True if no bit may differ, at any number of ranks."""
        return bool((self.plan or self.choices).exact)


def other_ranks(readers: int) -> tuple[int, int]:
    """Return how many ranks read different samples, and on how many ranks a checkpoint of theirs is loaded.

    One of the two divides the other.
    """
    return readers, readers // 2 if readers % 2 == 0 else 2 if readers == 1 else 1


class TargetSum:
    """The model's own loss, summed over the targets of a batch with ``input_ids`` and ``labels``: a ``Loss``."""

    def count(self, batch: Any) -> int:
        if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
            raise ValueError("context: a batch is a dict with input_ids and labels")
        return int(trueshard.count_targets(batch["labels"]))

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        part = batch if "shift_labels" in batch else trueshard.split_sequence(model, batch)
        loss: torch.Tensor = model(**part, num_items_in_batch=1, use_cache=False).loss
        return loss


class ShardRefused(Exception):
    """``trueshard.shard`` refused; its own words."""


@dataclass
class TrainingSetup:
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss: Loss
    scaler: torch.amp.GradScaler | None = None
    plan: Plan | None = None  # the plan by which the model was sharded; None: it is plain


class Subject(Protocol):
    case: Case
    name: str
    max_norm: float
    """Norm to which gradients are clipped; infinity: it is only measured."""
    notes: list[str]
    """Assumptions, and parts that were made smaller, in sentences."""

    def plain(self) -> TrainingSetup:
        """Build the model in this process, untrained and not sharded."""

    def sharded(self) -> TrainingSetup:
        """Build the same, sharded over the ranks of this process group, or raise ``ShardRefused``. Collective."""

    def microbatches(self, step: int, part: int) -> list[Any]:
        """Return a part (below ``Case.parts``) of the global batch of a step (from 1 on), on the CPU."""


def keep_layers(model: nn.Module, layers: int, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Keep the first ``layers`` modules of every list of blocks, in place; return how many were removed.

    A list of blocks is a ``ModuleList`` or ``Sequential`` of more modules than that, all of one class, which is in no
    other such list. The optimizers forget the parameters of the others.
    """
    root = names.unwrap(model)
    removed = 0
    for held in list(_lists(root, layers + 1)):
        removed += len(held) - layers
        del held[layers:]
    if removed:
        settings = getattr(root, "config", None)
        if settings is not None:
            shorten(settings, layers)
        kept = {id(parameter) for parameter in root.parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                staying = [i for i, parameter in enumerate(group["params"]) if id(parameter) in kept]
                for key in group.keys() & {"params", "param_names"}:
                    group[key] = [group[key][i] for i in staying]
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
            for parameter in [each for each in optimizer.state if id(each) not in kept]:
                del optimizer.state[parameter]
    return removed


def shorten(settings: Any, layers: int) -> None:
    """Write ``layers`` into a transformers configuration and those within it, in place."""
    for inner in vars(settings).values():
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            shorten(inner, layers)
    for name in COUNTS:
        count = getattr(settings, name, None)
        if type(count) is not int or count <= layers:
            continue
        for key, value in vars(settings).items():  # such as one word a layer
            if isinstance(value, list) and len(value) == count:
                setattr(settings, key, value[:layers])
        setattr(settings, name, layers)


def _lists(module: nn.Module, least: int) -> Iterator[Any]:
    for child in module.children():
        blocks = list(child.children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(blocks) >= least
        if is_list and len({own_class(block) for block in blocks}) == 1 and any(True for _ in blocks[0].parameters()):
            yield child
        else:
            yield from _lists(child, least)


def loss_scaler(case: Case) -> torch.amp.GradScaler | None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.amp.GradScaler(kind, init_scale=FIRST_SCALE) if case.choices.scales_loss() else None


class FactorySubject:
    """The model, and perhaps optimizers, batch and loss, that a user's factory makes."""

    def __init__(self, case: Case) -> None:
        self.case = case
        seed_all(case.seed)  # a file may make its batch when it is imported
        if isinstance(case.source, str):
            self._factory = factories.from_file(case.source, guarded=False)
        elif isinstance(case.source, Original):
            self._factory = case.source
        else:
            self._factory = factories.from_callable(case.source)
            self._factory.file = None  # its lines are in no file that the user named
        self.name = self._factory.name
        self.max_norm = math.inf
        self.notes: list[str] = []
        self._batch: Callable[[int], Any] | None = None
        self._loss: Any = model_loss

    def plain(self) -> TrainingSetup:
        parts = self._build()
        model = parts.model.train()
        given = parts.optimizers if self.case.optimizer is None else optimizers_of(self.case.optimizer)
        if given is None:
            self._note("The optimizer is AdamW with a learning rate of 1e-3: the factory brings none.")
            given = optimizers_of("adamw")
        optimizers = checked(given, f"optimizers of {self.name}", model)
        if self.case.layers is not None and (removed := keep_layers(model, self.case.layers, optimizers)):
            self._note(f"The model has {removed} blocks less: of each list, the first {self.case.layers} are kept.")
        if torch.cuda.is_available():
            model.cuda()
        if self._batch is None:
            self._batch = self._fed(parts.batch, model)
        loss: Loss = Mean(parts.loss or self._loss)
        if self.case.splits:
            if parts.loss is not None:
                raise ValueError(f"{self.name}: context splits sequences, and the loss of the factory knows whole ones")
            loss = TargetSum()
        return TrainingSetup(model, optimizers, loss, loss_scaler(self.case))

    def sharded(self) -> TrainingSetup:
        setup, case = self.plain(), self.case
        mesh = replicated_mesh(case.replicate, case.axes) if case.replicate > 1 else None
        try:
            setup.plan = trueshard.shard(
                setup.model, *setup.optimizers, mesh=mesh, plan=case.plan, **vars(case.choices)
            )
        except (ValueError, TypeError, NotImplementedError, trueshard.NothingFits) as error:
            raise ShardRefused(one_line(error)) from error
        return setup

    def microbatches(self, step: int, part: int) -> list[Any]:
        assert self._batch is not None
        seed_all(self.case.seed + 1_000_003 * step)
        batch = self._part(self._batch(step), part, self.case.parts)
        return [batch] * (2 - step % 2)  # every second step accumulates

    def _build(self) -> TrainingParts:
        factory = self._factory
        seed_all(self.case.seed)
        if isinstance(factory, Original):
            module, beside = copy.deepcopy((factory.module, dict(factory.beside)))
            return TrainingParts(module, **beside)
        function: Callable[..., Any] = factory.function
        if self.case.layers is not None and "layers" in inspect.signature(function).parameters:
            function = functools.partial(function, layers=self.case.layers)
        with factories.explained(factory.name, factory.file, factory.folder):
            result = function()
        return factory.parts_of(result)

    def _fed(self, given: Any, model: nn.Module) -> Callable[[int], Any]:
        """Return (step) → global batch for what the factory gives; if it gives none, one that fits, and its loss."""
        samples, sequence = SAMPLES * self.case.parts, self.case.sequence
        if given is None:
            feed = model_feed(model, sequence)
            length = sequence or min(feed.sequence, SEQUENCE)
            for said in feed.assumptions:
                self._note(said)
            self._loss = feed.loss
            return lambda step: feed.batch(samples, length)
        if callable(given):
            return _called(given, samples, sequence or SEQUENCE, self.name)
        is_one = isinstance(given, (torch.Tensor, Mapping, tuple)) or not isinstance(given, Iterable)
        if is_one or (isinstance(given, list) and (not given or any(isinstance(each, torch.Tensor) for each in given))):
            return lambda step: given
        batches = list(itertools.islice(iter(given), self.case.steps))
        if not batches:
            raise ValueError(f"{self.name}: its batches are empty; give at least one")
        return lambda step: batches[(step - 1) % len(batches)]

    def _part(self, batch: Any, part: int, parts: int) -> Any:
        """Return a part's rows of a batch: of every tensor whose first size is that of the first tensor."""
        tensors = [each for each in tensors_of(batch) if each.ndim]
        if not tensors:
            raise ValueError(f"{self.name}: its batch holds no tensor with a dimension; give example tensors")
        rows = tensors[0].shape[0]
        if rows < parts:
            raise ValueError(
                f"{self.name}: its batch has {rows} samples for {parts} ranks; give one for each, or take fewer ranks"
            )

        def cut(each: Any, place: int) -> Any:
            is_rows = isinstance(each, torch.Tensor) and each.ndim > 0 and each.shape[0] == rows
            return each.tensor_split(parts)[place] if is_rows else each

        own = mapped(lambda each: cut(each, part), batch)
        other = mapped(lambda each: cut(each, (part + 1) % parts), batch)
        pairs = zip(tensors_of(own), tensors_of(other), strict=True)
        if parts > 1 and all(torch.equal(one, two) for one, two in pairs):
            raise ValueError(
                f"{self.name}: every rank would train on the same samples, so that a gradient which is not reduced "
                "would not show; give a batch of different samples"
            )
        return own

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


def _called(function: Callable[..., Any], samples: int, sequence: int, name: str) -> Callable[[int], Any]:
    """Return (step) → batch for a user's function of nothing, of the step, or of (microbatch, sequence)."""
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 2:
        raise ValueError(f"{name}: batch wants {len(needed)} arguments; it is called with (microbatch, sequence)")
    return lambda step: function(*((), (step,), (samples, sequence))[len(needed)])


def tensors_of(value: Any) -> list[torch.Tensor]:
    result: list[torch.Tensor] = []
    mapped(lambda each: result.append(each) if isinstance(each, torch.Tensor) else None, value)
    return result
