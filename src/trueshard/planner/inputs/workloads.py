"""Make a ``Workload`` of a configuration, a file, a function or a module."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn

from trueshard import _torch
from trueshard.checkpoint.catalogue import resolve_latest
from trueshard.model import names
from trueshard.planner.inputs.architectures import unknown
from trueshard.planner.inputs.batches import Feed, Loss, MakeBatch, example_feed, model_loss, module_feed
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
from trueshard.planner.inputs.fake_tensors import mapped
from trueshard.planner.inputs.hub_batches import hub_feed
from trueshard.planner.inputs.optimizers import checked, optimizers_of
from trueshard.planner.workload import Workload
from trueshard.plans import dtype_name

Source: TypeAlias = Configuration | Factory | Original
"""Builds the same model, on fake tensors, at every ``build(dtype)``."""


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
    source = _source_of(model)
    dtype = None if storage_dtype is None else getattr(torch, dtype_name("storage_dtype", storage_dtype))
    made = _Made(source, dtype)
    if isinstance(source, Configuration):
        assumptions, has_optimizers = list(source.assumptions), False
        assumptions += ["Parameters are stored in float32 (--storage-dtype)."] if dtype is None else []
        feed = (
            hub_feed(source.cls, source.settings, sequence) if batch is None else _feed_of(batch, model_loss, sequence)
        )
    else:
        assumptions = []
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


def _source_of(model: str | os.PathLike[str] | Callable[[], Any] | nn.Module) -> Source:
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
        return mapped(_off_meta, self.parts.batch(microbatch, sequence))

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


def model_feed(model: nn.Module, sequence: int | None) -> Feed:
    """Return a feed by the configuration of a model of transformers (PEFT's wrappers taken off), else by the code."""
    hub = sys.modules.get("transformers.modeling_utils")
    base: Any = names.unwrap(model)
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    if hub is not None and isinstance(base, hub.PreTrainedModel):
        return hub_feed(type(base), base.config, sequence)
    return module_feed(model, sequence)


def is_size(batch: Any) -> bool:
    """Return True for ``(microbatch, sequence)``."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2 and all(type(count) is int for count in batch)
