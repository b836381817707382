"""A function of the user that makes a model, and perhaps its optimizers, batch and loss, as what is verified.

What it leaves out is found as the planner finds it: the loss that ``forward`` returns, a batch by the first layer or
the transformers configuration, AdamW.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trueshard.planner.inputs.batches import module_feed
from trueshard.planner.inputs.configurations import hub_feed
from trueshard.planner.inputs.factories import Factory, Original, Parts, explained, from_callable, from_file
from trueshard.planner.inputs.nests import mapped
from trueshard.planner.inputs.optimizers import optimizers_of
from trueshard.planner.inputs.workloads import hub_model
from trueshard.train.losses.protocol import Mean
from trueshard.verification.job import Job
from trueshard.verification.shrinking import keep_layers
from trueshard.verification.subject import Made, seed_all, shard

SAMPLES = 2
"""A part has so many of them, where the batch is made here."""
SEQUENCE = 32
"""Tokens of a sample, at most, where the batch is made here."""

FIRST_SCALE = 1024.0
"""Of a loss in float16: torch's own first one, 65536, leaves out steps until it has come down."""

Batches = Callable[[int, int], Any]
"""(step, part) → batch."""


class FactorySubject:
    """What a factory makes.

    Raises:
        ValueError: there is no such factory, or it needs arguments.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        seed_all(job.seed)  # a file may make its batch when it is imported
        self._factory = from_file(job.source, guarded=False) if isinstance(job.source, str) else _given(job.source)
        self.name = self._factory.name
        self.max_norm = math.inf
        self.notes: list[str] = []
        self._batches: Batches | None = None
        self._loss: Any = None

    def plain(self) -> Made:
        parts = self._build()
        model = parts.model.train()
        optimizers = self._optimizers(parts)
        if self._job.layers is not None and (removed := keep_layers(model, self._job.layers, optimizers)):
            self._note(f"The model has {removed} blocks less: of each list, the first {self._job.layers} are kept.")
        if torch.cuda.is_available():
            model.cuda()
        if self._batches is None:
            self._batches, self._loss = self._fed(parts, model)
        scaler = None
        if self._job.words.get("mixed_precision") == "fp16":
            scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu", init_scale=FIRST_SCALE)
        return Made(model, optimizers, Mean(parts.loss or self._loss), scaler)

    def sharded(self) -> Made:
        made = self.plain()
        made.plan = shard(self._job, made.model, made.optimizers)
        return made

    def microbatches(self, step: int, part: int) -> list[Any]:
        assert self._batches is not None
        seed_all(self._job.seed + 1_000_003 * step)
        batch = self._batches(step, part)
        return [batch] * (2 - step % 2)  # every second step accumulates

    def _build(self) -> Parts:
        factory = self._factory
        seed_all(self._job.seed)
        if isinstance(factory, Original):
            given = factory.beside
            optimizers = given.get("optimizers", given.get("optimizer"))
            return Parts(*copy.deepcopy((factory.module, given.get("batch"), given.get("loss"), optimizers)))
        function: Callable[..., Any] = factory.function
        if self._job.layers is not None and "layers" in inspect.signature(function).parameters:
            function = functools.partial(function, layers=self._job.layers)
        with explained(factory.name, factory.file, factory.folder):
            result = function()
        return factory.parts_of(result)

    def _optimizers(self, parts: Parts) -> list[torch.optim.Optimizer]:
        given = parts.optimizers
        if self._job.optimizer is not None or given is None:
            if given is None and self._job.optimizer is None:
                self._note("The optimizer is AdamW with a learning rate of 1e-3: the factory brings none.")
            given = optimizers_of(self._job.optimizer or "adamw")
        if callable(given) and not isinstance(given, torch.optim.Optimizer):
            given = given(parts.model)
        several = list(given.values()) if isinstance(given, Mapping) else given
        found = list(several) if isinstance(several, (list, tuple)) else [several]
        for each in found:
            if not isinstance(each, torch.optim.Optimizer):
                raise ValueError(
                    f"{self.name}: its optimizer is a {type(each).__name__}; give torch.optim.Optimizer objects, or a "
                    "function (model) → optimizers"
                )
        return found

    def _fed(self, parts: Parts, model: nn.Module) -> tuple[Batches, Any]:
        """Where batches come from, and the loss of one."""
        from trueshard.planner.inputs.batches import model_loss

        given, count = parts.batch, self._job.parts
        if given is None:
            base = hub_model(model)
            feed = (
                hub_feed(type(base), base.config, self._job.sequence)
                if base is not None
                else module_feed(model, self._job.sequence)
            )
            length = self._job.sequence or min(feed.sequence, SEQUENCE)
            for said in feed.assumptions:
                self._note(said)
            return lambda step, part: self._part(feed.batch(SAMPLES * count, length), part, count), feed.loss
        if callable(given):
            call = _called(given, SAMPLES * count, self._job.sequence or SEQUENCE, self.name)
            return lambda step, part: self._part(call(step), part, count), model_loss
        if _are_several(given):
            batches = list(itertools.islice(iter(given), self._job.steps))
            if not batches:
                raise ValueError(f"{self.name}: its batches are empty; give at least one")
            return lambda step, part: self._part(batches[(step - 1) % len(batches)], part, count), model_loss
        return lambda step, part: self._part(given, part, count), model_loss

    def _part(self, batch: Any, part: int, parts: int) -> Any:
        """A rank's rows of a batch: of every tensor whose first size is that of the first tensor."""
        tensors = [each for each in _tensors(batch) if each.ndim]
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
        if parts > 1 and all(torch.equal(one, two) for one, two in zip(_tensors(own), _tensors(other), strict=True)):
            raise ValueError(
                f"{self.name}: every rank would train on the same samples, so that a gradient which is not reduced "
                "would not show; give a batch of different samples"
            )
        return own

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


def _given(function: Callable[..., Any]) -> Factory:
    factory = from_callable(function)
    factory.file = None  # whose lines nobody looks for
    return factory


def _called(function: Callable[..., Any], samples: int, sequence: int, name: str) -> Callable[[int], Any]:
    """A function of the user: of nothing, of the step, or of (microbatch, sequence) as the planner calls it."""
    needed = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 2:
        raise ValueError(f"{name}: batch wants {len(needed)} arguments; it is called with (microbatch, sequence)")
    return lambda step: function(*((), (step,), (samples, sequence))[len(needed)])


def _are_several(given: Any) -> bool:
    """Whether something is batches, a loader or a list of them, and not one batch."""
    if isinstance(given, (torch.Tensor, Mapping, tuple)):
        return False
    if isinstance(given, list):
        return bool(given) and not any(isinstance(each, torch.Tensor) for each in given)
    return isinstance(given, Iterable)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, value)
    return found
