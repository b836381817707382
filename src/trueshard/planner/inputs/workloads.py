"""Make a ``Workload`` of a configuration, a file, a function or a module; optimizers by words."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn

from trueshard import _torch
from trueshard.checkpoint.catalogue import resolve_latest
from trueshard.errors import one_line
from trueshard.model import names
from trueshard.model.names import Index
from trueshard.model.units import choose_units
from trueshard.planner.inputs.architectures import unknown
from trueshard.planner.inputs.batches import Feed, Loss, MakeBatch, example_feed, hub_feed, model_feed, model_loss
from trueshard.planner.inputs.factories import (
    Configuration,
    Factory,
    Original,
    TrainingParts,
    from_callable,
    from_file,
    named_configuration,
    read_configuration,
)
from trueshard.planner.workload import Workload
from trueshard.plans import dtype_name

Source: TypeAlias = Configuration | Factory | Original
"""Builds the same model, on fake tensors, at every ``build(dtype)``."""


ASSUMED = "_trueshard_assumed"
"""Attribute of a function that was made for a configuration: what was taken for granted in that, by sentence."""


def workload_of(
    model: str | os.PathLike[str] | Callable[[], Any] | nn.Module,
    *,
    sequence: int | None = None,
    optimizer: str | Callable[[nn.Module], Any] | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    clip: float | None = 1.0,
    storage_dtype: str | None = None,
) -> Workload:
    """Return what is trained, with what was taken for granted. Arguments: see ``planning.Request``.

    A function, which takes no arguments, returns a module, ``(module, batch)``, ``(module, batch, loss)``, or an object
    or dict with ``model`` and perhaps ``batch``, ``loss`` and ``optimizers``; a file may define functions of these
    names beside it. What is given here comes first, then that, then what the model itself shows.

    Raises:
        ValueError: one line that names what does not fit, and the remedy.
        TypeError: ``model`` is none of what it may be.
    """
    if is_size(batch):
        sequence, batch = sequence or batch[1], None
    if sequence is not None and sequence < 1:
        raise ValueError(f"sequence={sequence} must be at least 1")
    source = source_of(model)
    dtype = None if storage_dtype is None else getattr(torch, dtype_name("storage_dtype", storage_dtype))
    made = _Made(source, dtype)
    if isinstance(source, Configuration):
        assumptions, has_optimizers = list(source.assumptions), False
        assumptions += ["Parameters are stored in float32 (--storage-dtype)."] if dtype is None else []
        feed = (
            hub_feed(source.cls, source.settings, sequence) if batch is None else _feed_of(batch, model_loss, sequence)
        )
    else:
        assumptions = list(getattr(model, ASSUMED, ()))
        feed = _feed_of_factory(made, sequence, batch)
        has_optimizers = made.parts.optimizers is not None and optimizer is None
    # Without transformers' checks of values, such as that there are as many image tokens as features.
    unchecked = mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1")
    return Workload(
        name=source.name,
        model=made.model,
        optimizers=made.optimizers if has_optimizers else optimizers_of(optimizer or "adamw"),
        batch=feed.batch,
        loss=unchecked(loss or feed.loss),
        sequence=feed.sequence,
        clip=clip,
        assumptions=(*assumptions, *feed.assumptions),
    )


def source_of(model: str | os.PathLike[str] | Callable[[], Any] | nn.Module) -> Source:
    """Return what builds a model; raise ValueError for words that name none, TypeError for anything else."""
    if isinstance(model, nn.Module):
        return Original(model)
    if isinstance(model, (str, os.PathLike)):
        words = os.fspath(model)
        path = Path(resolve_latest(Path(words).expanduser()))
        if path.is_dir() or path.suffix == ".json":
            return read_configuration(path)
        if ".py" in words:
            return from_file(words)
        if (configuration := named_configuration(words)) is not None:
            return configuration
        raise ValueError(unknown(words, path.absolute().parent))
    if callable(model):
        return from_callable(model)
    raise TypeError(f"a model is a path, a function or a torch.nn.Module, not a {type(model).__name__}")


@dataclass
class _Made:
    """The latest model of a source, with what came with it: a loss may belong to the model it was made with."""

    source: Source
    dtype: torch.dtype | None
    parts: TrainingParts = field(init=False)
    """Set by ``model``."""

    def model(self) -> nn.Module:
        self.parts = self.source.build(self.dtype)
        model = self.parts.model
        if not model.training:
            model.train()
        return model

    def batch(self, microbatch: int, sequence: int) -> Any:
        return _torch.mapped(_off_meta, self.parts.batch(microbatch, sequence))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert self.parts.loss is not None
        value = self.parts.loss(model, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"the loss of {self.source.name} must be a scalar tensor, not {shown}")
        return value

    def optimizers(self, model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        return checked(self.parts.optimizers, f"optimizers of {self.source.name}", model)


def _feed_of_factory(made: _Made, sequence: int | None, batch: Any) -> Feed:
    """Return batches and loss as given, else the factory's own, else by the model."""
    with _torch.fake_tensors(), torch.compiler.set_stance("force_eager"):  # a look: only what is no tensor is kept
        if batch is not None and isinstance(made.source, Factory):
            made.parts = made.source.look()
        else:
            model = made.model()
        loss: Loss = made.loss if made.parts.loss is not None else model_loss
        if batch is None and (batch := made.parts.batch) is not None and callable(batch):
            batch = made.batch
        if batch is not None:
            return _feed_of(batch, loss, sequence)
        feed = model_feed(model, sequence)
        return feed if made.parts.loss is None else dataclasses.replace(feed, loss=loss)


def _feed_of(batch: Any, loss: Loss, sequence: int | None) -> Feed:
    return Feed(batch, loss, _length(batch, sequence or 2048)) if callable(batch) else example_feed(batch, loss)


def _length(batch: MakeBatch, sequence: int) -> int:
    """Return the tokens of a sample of ``batch``: ``sequence`` where its shapes follow it, else what ``batch`` holds.

    What ``batch`` raises is left to the simulation, which names it.
    """
    try:
        with _torch.fake_tensors():
            shown, longer = batch(1, sequence), batch(1, 2 * sequence)
            shapes = [[tuple(tensor.shape) for tensor in _torch.tensors_in(value)] for value in (shown, longer)]
            return sequence if shapes[0] != shapes[1] else example_feed(shown, model_loss).sequence
    except Exception:
        return sequence


def _off_meta(value: Any) -> Any:
    """Return real zeros for a tensor that the factory made on the meta device."""
    is_meta = isinstance(value, torch.Tensor) and value.is_meta and not _torch.is_fake(value)
    return torch.zeros(value.shape, dtype=value.dtype) if is_meta else value


def is_size(batch: Any) -> bool:
    """Return True for ``(microbatch, sequence)``."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2 and all(type(count) is int for count in batch)


# Optimizers by words, as a step on a GPU would run them

Make = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]

WAYS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
"""Ending of a name → which of torch's implementations."""


def optimizers_of(words: str | Callable[[nn.Module], Any]) -> Make:
    """Return a function that makes optimizers over the parameters of a model that require a gradient.

    Args:
        words: ``"sgd-momentum"``, or a class of ``torch.optim`` in any case, perhaps with an ending of ``WAYS``
            (``"adamw-fused"``); or ``"package.module:Class"``; each perhaps with settings after a colon
            (``"adamw:betas=(0.9, 0.95),weight_decay=0.1"``). Without an ending it is foreach where the class has
            that, torch's default on a GPU. ``"muon"`` takes the matrices of blocks and AdamW the rest, as its authors
            say. Or a callable(model) → optimizer(s). ValueError if the words name nothing.
    """
    if not isinstance(words, str):
        return lambda model: checked(words, getattr(words, "__name__", "the optimizer function"), model)
    cls, settings = _parse(words)
    accepted = inspect.signature(cls).parameters
    if "lr" in accepted and accepted["lr"].default is inspect.Parameter.empty:
        settings.setdefault("lr", 1e-3)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for key in settings:
            if key not in accepted:
                near = names.nearest(key, list(accepted)[1:])
                raise ValueError(f"optimizer {words!r}: {cls.__name__} takes no {key!r}.{near}")
    if "foreach" in accepted and not settings.get("fused"):
        settings.setdefault("foreach", True)

    def make(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not parameters:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        try:
            if cls is torch.optim.Muon:
                return _muon(model, parameters, settings)
            return [cls([name for _, name in parameters], **settings)]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"optimizer {words!r}: {cls.__name__} refuses: {one_line(error)}") from None

    return make


def checked(optimizers: Any, name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return one optimizer or several, or what a function of ``model`` makes, as a list; else raise ValueError."""
    if callable(optimizers) and not isinstance(optimizers, torch.optim.Optimizer):
        optimizers = optimizers(model)
    optimizers = optimizers.values() if isinstance(optimizers, Mapping) else optimizers
    several = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"{name} gives a {type(optimizer).__name__}, not torch.optim.Optimizer object(s)")
    return several


def _parse(words: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that words name, and its settings."""
    name, *rest = words.split(":", 2 if "." in words.partition(":")[0] else 1)
    if "." not in name:
        cls, preset = _named(name.strip().lower(), words)
        return cls, preset | _settings(rest[0] if rest else "", words)
    if not rest:
        raise ValueError(f"optimizer {words!r}: write package.module:Class")
    try:
        classes = _classes(importlib.import_module(name))
    except ImportError as error:
        raise ValueError(f"optimizer {words!r}: {name} cannot be imported ({error})") from None
    if rest[0] not in classes:
        near = names.nearest(rest[0], classes)
        raise ValueError(f"optimizer {words!r}: {name} has no optimizer {rest[0]!r}.{near}")
    return classes[rest[0]], _settings(rest[1] if len(rest) > 1 else "", words)


def _named(name: str, words: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    preset: dict[str, Any] = {}
    for ending, way in WAYS.items():
        if name.endswith(f"-{ending}"):
            name, preset = name.removesuffix(f"-{ending}"), {**way}
    if name == "sgd-momentum":
        name, preset = "sgd", preset | {"momentum": 0.9}
    classes = {key.lower(): cls for key, cls in _classes(torch.optim).items()}
    if name not in classes:
        near = names.nearest(name, sorted(classes))
        raise ValueError(
            f"no optimizer is called {words!r}.{near} Known: {', '.join(sorted([*classes, 'sgd-momentum']))}"
        )
    return classes[name], preset


def _classes(module: Any) -> dict[str, type[torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    classes = {key: value for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)}
    return {key: cls for key, cls in classes.items() if cls is not base}


def _settings(text: str, words: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise SyntaxError
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(f"optimizer {words!r}: {text!r} is no list of settings; write key=value,key=value") from None


def _muon(
    model: nn.Module, parameters: list[tuple[str, nn.Parameter]], settings: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside blocks, AdamW for embeddings, heads, gains and biases, as its author does."""
    blocks = tuple(f"{name}." for name in choose_units(Index(model), "auto"))
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in parameters:
        is_matrix = parameter.ndim == 2 and name.startswith(blocks) and id(parameter) not in tables
        (matrices if is_matrix else others).append(parameter)
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, **settings)] if matrices else []
    return [*made, torch.optim.AdamW(others, foreach=True)] if others else made
