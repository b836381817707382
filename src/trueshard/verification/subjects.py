"""The model that is verified, with optimizers, loss and data, built anew in each process from the same seed.

- It comes from a user's factory or a training configuration; the trainer is imported only for the latter, since it
  needs more libraries.
- ``plain()`` is trained by one process without any sharding; ``sharded()`` is the same after ``trueshard.shard``.
- The global batch of a step consists of parts, one for each rank: whichever rank takes a part, it is the same samples,
  and its random numbers (dropout) are drawn from the same seed.
- What a user's factory leaves out is found as the planner finds it: the loss that ``forward`` returns, a batch by the
  first layer or the transformers configuration, AdamW.
- ``layers=`` keeps the first few blocks of a large model: enough to see every kind of parameter.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import trueshard
from trueshard import _torch
from trueshard._torch import own_class
from trueshard.axes import sizes_of
from trueshard.checkpoint.state import seed_all
from trueshard.distributed import replicated_mesh
from trueshard.errors import UserError, one_line
from trueshard.model import names
from trueshard.options import Options
from trueshard.planner.inputs import factories
from trueshard.planner.inputs.batches import model_feed, model_loss
from trueshard.planner.inputs.factories import Original, TrainingParts
from trueshard.planner.inputs.workloads import checked, optimizers_of
from trueshard.plans import Plan
from trueshard.train.losses import Loss, Mean
from trueshard.train.preference import PreferenceLoss
from trueshard.verification.compare import TensorStore

if TYPE_CHECKING:
    from trueshard.train.config import Config

SAMPLES = 2  # samples of a part, if the batch is made here
SEQUENCE = 32  # tokens of a sample, at most, if the batch is made here
FIRST_SCALE = 1024.0
"""Loss scale for float16 to begin with: with torch's own, 65536, steps are skipped until it has come down."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
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
    watched: int = 0  # step whose modules are looked at, in runs of their own

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
        options = self.plan or self.choices
        return options.mixed_precision is not None or bool(options.compile) or self.is_exact

    @property
    def is_exact(self) -> bool:
        """True if no bit may differ, at any number of ranks."""
        return bool((self.plan or self.choices).exact)


def other_ranks(readers: int) -> tuple[int, int]:
    """Return how many ranks read different samples, and on how many ranks a checkpoint of theirs is loaded.

    One of the two divides the other. They differ, unless there is one GPU, which two ranks cannot share.
    """
    if readers == 1 and torch.cuda.is_available() and torch.cuda.device_count() == 1:
        return 1, 1
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
    """Raised where ``trueshard.shard`` refuses, with its message."""


@dataclass
class TrainingSetup:
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss: Loss
    scaler: torch.amp.GradScaler | None = None
    plan: Plan | None = None  # the plan by which the model was sharded; None: it is plain


class Subject(ABC):
    """A training that is verified, plain and sharded."""

    name: str
    max_norm = math.inf  # norm to which gradients are clipped; infinity: it is only measured

    def __init__(self, case: Case) -> None:
        self.case = case
        self.notes: list[str] = []  # assumptions, and parts that were made smaller, in sentences

    @abstractmethod
    def plain(self) -> TrainingSetup:
        """Build the model in this process, untrained and not sharded."""

    @abstractmethod
    def sharded(self) -> TrainingSetup:
        """Build the same, sharded over the ranks of this process group, or raise ``ShardRefused``. Collective."""

    @abstractmethod
    def microbatches(self, step: int, part: int) -> list[Any]:
        """Return a part (below ``Case.parts``) of the global batch of a step (from 1 on), on the CPU."""


def subject_of(case: Case) -> Subject:
    if callable(case.source) or isinstance(case.source, (str, Original)):
        return FactorySubject(case)
    return ConfigSubject(case)


def keep_layers(model: nn.Module, layers: int, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Keep the first ``layers`` modules of every list of blocks, in place; return how many were removed.

    A list of blocks is a ``ModuleList`` or ``Sequential`` of more modules than that, all of one class, which is in no
    other such list. The optimizers forget the parameters of the others.
    """
    root = names.unwrap(model)
    lists = list(_lists(root, layers + 1))
    removed = sum(len(blocks) - layers for blocks in lists)
    if not removed:
        return 0
    for blocks in lists:
        del blocks[layers:]
    if (settings := getattr(root, "config", None)) is not None:
        shorten(settings, layers)
    kept = {id(parameter) for parameter in root.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            staying = [id(parameter) in kept for parameter in group["params"]]
            for key in group.keys() & {"params", "param_names"}:
                group[key] = list(itertools.compress(group[key], staying))
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        for parameter in [parameter for parameter in optimizer.state if id(parameter) not in kept]:
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


class FactorySubject(Subject):
    """The model, and perhaps optimizers, batch and loss, that a user's factory makes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        seed_all(case.seed)  # a file may make its batch when it is imported
        if isinstance(case.source, str):
            self._factory = factories.from_file(case.source, guarded=False)
        elif isinstance(case.source, Original):
            self._factory = case.source
        else:
            self._factory = factories.from_callable(case.source)
            self._factory.file = None  # its lines are in no file that the user named
        self.name = self._factory.name
        self._batch: Callable[[int], Any] | None = None
        self._loss: Any = model_loss

    def plain(self) -> TrainingSetup:
        case, parts = self.case, self._build()
        model = parts.model.train()
        made = parts.optimizers if case.optimizer is None else optimizers_of(case.optimizer)
        if made is None:
            self._note("The optimizer is AdamW with a learning rate of 1e-3: the factory brings none.")
            made = optimizers_of("adamw")
        optimizers = checked(made, f"optimizers of {self.name}", model)
        if case.layers is not None and (removed := keep_layers(model, case.layers, optimizers)):
            self._note(f"The model has {removed} blocks less: of each list, the first {case.layers} are kept.")
        settings: Any = getattr(names.unwrap(model), "config", None)
        if parts.loss is None and getattr(settings, "output_router_logits", False):
            settings.output_router_logits = False
            self._note("The loss that balances routers is left out: the one process computes parts of a batch apart.")
        if torch.cuda.is_available():
            model.cuda()
        if self._batch is None:
            self._batch = self._fed(parts.batch, model)
        if case.splits and parts.loss is not None:
            raise ValueError(f"{self.name}: context splits sequences, and the loss of the factory knows whole ones")
        loss = TargetSum() if case.splits else Mean(parts.loss or self._loss)
        return TrainingSetup(model, optimizers, loss, loss_scaler(case))

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
            return factory.make()
        takes_layers = self.case.layers is not None and "layers" in inspect.signature(factory.function).parameters
        return factory.make(**({"layers": self.case.layers} if takes_layers else {}))

    def _fed(self, batch: Any, model: nn.Module) -> Callable[[int], Any]:
        """Return (step) → global batch for the factory's ``batch``; if it has none, one that fits, and its loss."""
        samples, sequence = SAMPLES * self.case.parts, self.case.sequence
        if batch is None:
            feed = model_feed(model, sequence)
            length = sequence or min(feed.sequence, SEQUENCE)
            for assumption in feed.assumptions:
                self._note(assumption)
            self._loss = feed.loss
            return lambda step: feed.batch(samples, length)
        if callable(batch):
            return _called(batch, samples, sequence or SEQUENCE, self.name)
        is_one = isinstance(batch, (torch.Tensor, Mapping, tuple)) or not isinstance(batch, Iterable)
        if is_one or (isinstance(batch, list) and (not batch or any(isinstance(part, torch.Tensor) for part in batch))):
            return lambda step: batch
        batches = list(itertools.islice(iter(batch), self.case.steps))
        if not batches:
            raise ValueError(f"{self.name}: its batches are empty; give at least one")
        return lambda step: batches[(step - 1) % len(batches)]

    def _part(self, batch: Any, part: int, parts: int) -> Any:
        """Return a part's rows of a batch: of every tensor whose first size is that of the first tensor."""
        tensors = [tensor for tensor in tensors_of(batch) if tensor.ndim]
        if not tensors:
            raise ValueError(f"{self.name}: its batch holds no tensor with a dimension; give example tensors")
        rows = tensors[0].shape[0]
        if rows < parts:
            raise ValueError(
                f"{self.name}: its batch has {rows} samples for {parts} ranks; give one for each, or take fewer ranks"
            )

        def cut(leaf: Any, place: int) -> Any:
            is_rows = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
            return leaf.tensor_split(parts)[place] if is_rows else leaf

        local = _torch.mapped(lambda leaf: cut(leaf, part), batch)
        other = _torch.mapped(lambda leaf: cut(leaf, (part + 1) % parts), batch)
        pairs = zip(tensors_of(local), tensors_of(other), strict=True)
        if parts > 1 and all(torch.equal(one, two) for one, two in pairs):
            raise ValueError(
                f"{self.name}: every rank would train on the same samples, so that a gradient which is not reduced "
                "would not show; give a batch of different samples"
            )
        return local

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


def _called(function: Callable[..., Any], samples: int, sequence: int, name: str) -> Callable[[int], Any]:
    """Return (step) → batch for a user's function of nothing, of the step, or of (microbatch, sequence)."""
    signature = inspect.signature(function)
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind in POSITIONAL]
    if len(needed) > 2:
        raise ValueError(f"{name}: batch wants {len(needed)} arguments; it is called with (microbatch, sequence)")
    return lambda step: function(*((), (step,), (samples, sequence))[len(needed)])


def tensors_of(value: Any) -> list[torch.Tensor]:
    result: list[torch.Tensor] = []
    _torch.mapped(lambda leaf: result.append(leaf) if isinstance(leaf, torch.Tensor) else None, value)
    return result


def small_configuration(
    path: Path, overrides: Sequence[str], folder: Path, nproc: int, options: Sequence[str]
) -> tuple[Config, list[str]]:
    """Return a configuration whose run lives in ``folder``, with small batches, and notes of the changes.

    Raises UserError or ValueError for a configuration, or ``options`` set beside it, that cannot be verified.
    """
    from trueshard.train.parse import load_config
    from trueshard.train.run.resuming import located

    if options:
        raise ValueError(
            f"{path} says how it is trained and sharded: leave out {', '.join(options)}, or override a key"
        )
    config = located(load_config(path, list(overrides)))
    if config.rl is not None:
        raise UserError(f"{path}: verify compares losses of given data, and [rl] makes its own; name one without [rl]")
    train, parts = config.train, max(other_ranks(config.shard.readers(nproc)))
    accumulate = min(train.accumulation(parts), 2)
    samples = min(2, max(1, train.batch_size // (parts * train.accumulation(parts))))
    update = {"batch_size": parts * accumulate * samples}
    update |= {"accumulate": accumulate} if train.microbatch is None else {"microbatch": samples}
    run = config.run.model_copy(update={"dir": str(folder / "run")})
    note = (
        f"A step takes {update['batch_size']} sequences (the configuration: {train.batch_size}), "
        "at the learning rate without its schedule."
    )
    return config.model_copy(update={"train": train.model_copy(update=update), "run": run}), [note]


class ConfigSubject(Subject):
    """Model, optimizer, loss, data and ``[shard]`` of a configuration, as ``train`` has them.

    The plain model gets the values that the sharded one is filled with: random ones are made block by block, by its
    name. Raises UserError where settings or data are wrong.
    """

    def __init__(self, case: Case) -> None:
        from trueshard.train.run.checks import check

        super().__init__(case)
        self._config: Config = case.source
        ready = check(self._config, case.parts, make=not (self._config.run.folder / "data").exists())
        self._settings, self._data = ready.architecture, ready.data
        self._on_gpu = torch.cuda.is_available() and case.choices.offload != "cpu"
        if case.layers is not None:
            shorten(self._settings, case.layers)
        self.name = str(getattr(self._settings, "model_type", "model"))
        limit = self._config.train.max_grad_norm
        self.max_norm = math.inf if limit is None else limit

    def plain(self) -> TrainingSetup:
        from trueshard.train.models import kernels
        from trueshard.train.models.build import with_values
        from trueshard.train.models.parameters import copy_module
        from trueshard.train.run import session

        config = self._config
        filled = session.build(config, self._settings)
        session.shard(type(config.shard)(), filled)
        session.fill(config, filled, self._settings)
        model = with_values(config, self._settings)
        kernels.install(config.model, model)
        copy_module(model, filled)
        del filled
        if torch.cuda.is_available():
            model.cuda()
        optimizer = session.build_optimizer(config.optimizer, model.named_parameters(), on_gpu=self._on_gpu)
        loss = session.loss_of(config.train)
        if config.data.format == "preference" and config.train.loss is None:
            reference = copy.deepcopy(model).requires_grad_(False) if config.adapter is None else None
            preference = config.preference
            loss = PreferenceLoss(reference, preference.beta, preference.label_smoothing, config.train.whole_logits)
        return TrainingSetup(model.train(), [optimizer], loss, loss_scaler(self.case))

    def sharded(self) -> TrainingSetup:
        from trueshard.train.run import session

        config, settings = self._config, self._settings
        model = session.build(config, settings)
        optimizer = session.build_optimizer(config.optimizer, model.named_parameters(), on_gpu=self._on_gpu)
        section = type(config.shard)(**vars(self.case.choices), replicate=self.case.replicate)
        try:
            plan = session.shard(section, model, optimizer)
        except UserError as error:
            raise ShardRefused(str(error)) from error
        session.fill(config, model, settings)
        loss = session.choose_loss(config, settings, model)
        return TrainingSetup(model.train(), [optimizer], loss, loss_scaler(self.case), plan)

    def microbatches(self, step: int, part: int) -> list[Any]:
        from trueshard.train.run import session

        train = self._config.train
        loader = session.loader_of(self._config, self._data, rank=part, ranks=self.case.parts, prefetch=0)
        loader.load_state_dict({"samples": (step - 1) * train.batch_size})
        return [next(loader) for _ in range(train.accumulation(self.case.parts))]
