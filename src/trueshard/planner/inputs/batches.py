"""Batches and losses that nobody gave: found from ``forward`` and the first layer, or from transformers' settings.

The values of a batch are valid, so that it also serves where the model really runs.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trueshard import _torch
from trueshard.model import names
from trueshard.planner.inputs.fake_tensors import mapped

MakeBatch = Callable[[int, int], Any]
Loss = Callable[[nn.Module, Any], torch.Tensor]

TARGETS = ("labels", "targets", "target", "label")
"""Names of targets among the arguments of ``forward``."""

_SMALL = 256 << 10
"""Bytes of the largest tensor of a batch whose values matter."""

_LAYERS = (nn.Embedding, nn.EmbeddingBag, nn.Linear, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d)

HOW = "give batch=, a batch of example tensors or a function (microbatch, sequence) → batch; in a file, define batch()"


@dataclass(frozen=True)
class Feed:
    """Batches of any microbatch and sequence, and the loss of one."""

    batch: MakeBatch
    loss: Loss
    sequence: int
    assumptions: tuple[str, ...] = ()


def model_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch; ``forward`` gets a dict by name, a tuple by place, anything else alone.

    The loss is the output's ``loss`` or ``["loss"]``, a scalar (of the outputs), else by labels that the batch or the
    second element of a pair holds; else the mean square of the first output.
    """
    inputs, target = _split(model, batch)
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return _loss_of(output, target)


def example_feed(example: Any, loss: Loss) -> Feed:
    """Return batches like ``example``: tensors whose first size is its microbatch get the microbatch asked for.

    Small tensors of whole numbers keep their values, by rows: shapes may follow from them (sizes of images, lengths).

    Raises ValueError if ``example`` holds no tensor with a dimension.
    """
    tensors = [tensor for tensor in _torch.tensors_in(example) if tensor.ndim]
    if not tensors:
        raise ValueError(f"the batch holds no tensors: {HOW}")
    rows = tensors[0].shape[0]
    ids = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.ndim == 2]

    def batch(microbatch: int, sequence: int) -> Any:
        def like_example(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            shape = tuple(value.shape)
            is_batched = bool(shape) and shape[0] == rows
            if value.is_floating_point() or value.is_meta or value.untyped_storage().nbytes() > _SMALL:
                return torch.zeros((microbatch, *shape[1:]) if is_batched else shape, dtype=value.dtype)
            return value[torch.arange(microbatch) % rows] if is_batched else value.clone()

        return mapped(like_example, example)

    return Feed(batch, loss, int(ids[0].shape[1]) if ids else 1)


def module_feed(model: nn.Module, sequence: int | None) -> Feed:
    """Return a feed for a module of which only the code is known. Inside ``fake_tensors``.

    Raises ValueError if ``forward`` takes more than one input and targets, or the first layer tells nothing.
    """
    root = names.unwrap(model)
    wanted, targets = _wanted(root)
    holding = [(name, module) for name, module in root.named_modules() if _torch.own_parameters(module)]
    layers = [(name, layer) for name, layer in holding if not list(layer.children()) or isinstance(layer, _LAYERS)]
    name, first = [*layers, *holding, ("", nn.Identity())][0]  # a parameter of a model itself tells nothing
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        return _token_feed(root, wanted, targets, first.num_embeddings, sequence)
    dtypes = (parameter.dtype for parameter in first.parameters(recurse=False))
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    shapes = _shapes(first, sequence)
    if targets or not shapes:
        raise ValueError(
            f"it cannot be told what {type(root).__name__} is fed with: its first layer, {name or 'itself'!r}, is a "
            f"{type(first).__name__}{' and forward wants ' + targets if targets else ''}; {HOW}"
        )
    shape = shapes[0] if len(shapes) == 1 else _fitting(model, shapes, dtype)
    long = shape[0] if len(shape) > 1 and isinstance(first, (nn.Linear, nn.MultiheadAttention)) else 1

    def batch(microbatch: int, sequence: int) -> Any:
        return torch.randn(microbatch, *((sequence, *shape[1:]) if long > 1 else shape), dtype=dtype)

    assumption = f"The batch is random numbers of shape (microbatch, {', '.join(map(str, shape))}), read off {name!r}"
    return Feed(batch, model_loss, long, (f"{assumption}; the loss is what forward returns, or its mean square.",))


def _wanted(root: nn.Module) -> tuple[str, str]:
    """Return the names of the one input of ``forward`` and of its targets ("" if it takes none)."""
    parameters = inspect.signature(root.forward).parameters.values()
    by_place = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}
    needed = [name for name, default in by_place.items() if default is inspect.Parameter.empty]
    inputs = [name for name in needed if name not in TARGETS] or [*by_place][:1]
    if len(inputs) > 1:
        raise ValueError(f"{type(root).__name__}.forward wants {', '.join(needed)}, and nothing says what: {HOW}")
    return next(iter(inputs), ""), next((name for name in by_place if name in TARGETS), "")


def _token_feed(root: nn.Module, wanted: str, targets: str, vocabulary: int, sequence: int | None) -> Feed:
    tables = [
        module.num_embeddings
        for name, module in root.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in name or "wpe" in name)
    ]
    length = sequence or min([*tables, 1024])

    def batch(microbatch: int, sequence: int) -> Any:
        ids = torch.randint(vocabulary, (microbatch, sequence))
        return (ids, ids.roll(-1, 1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ids, labels = batch
        output = model(ids, **{targets: labels}) if targets else model(ids)
        return _loss_of(output, labels)

    how = f"forward's own, from {targets}" if targets else "cross entropy of its logits in float32, or its scalar"
    assumption = f"The batch is token ids below {vocabulary} ({wanted}) with the next one as label; the loss is {how}."
    return Feed(batch, loss, length, (assumption,))


def _shapes(first: nn.Module, sequence: int | None) -> list[tuple[int, ...]]:
    """Return the shapes that a sample may have whose first layer is ``first``."""
    if isinstance(first, nn.Linear):
        return [(first.in_features,) if sequence is None else (sequence, first.in_features)]
    if isinstance(first, nn.MultiheadAttention):
        return [(sequence or 1024, first.embed_dim)]
    if isinstance(first, nn.Conv1d):
        return [(first.in_channels, sequence or 1024)]
    if isinstance(first, nn.Conv2d):
        return [(first.in_channels, side, side) for side in (224, 32, 28, 64, 96, 128, 256, 384, 512, 16)]
    return []


def _fitting(model: nn.Module, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> tuple[int, ...]:
    with quietly():
        for shape in shapes:
            try:
                model(torch.randn(2, *shape, dtype=dtype))
            except (RuntimeError, ValueError, AssertionError):
                continue
            return shape
    raise ValueError(f"it cannot be told how large an input {type(names.unwrap(model)).__name__} takes; {HOW}")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence logging: an error on fake tensors is raised as well."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _split(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return the input of ``forward``, and the target, which may be None."""
    parameters = inspect.signature(names.unwrap(model).forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if isinstance(batch, Mapping):
        target = next((batch[key] for key in TARGETS if key in batch), None)
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return batch, target
        return {key: value for key, value in batch.items() if key in parameters or key not in TARGETS}, target
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        second = list(parameters)[1:2]
        if not second or (second[0] not in TARGETS and parameters[second[0]].default is not inspect.Parameter.empty):
            return (batch[0],), batch[1]
    return batch, None


def _scalar(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.ndim == 0 else loss.mean()
    for item in output if isinstance(output, (tuple, list)) else [output]:
        if isinstance(item, torch.Tensor) and item.ndim == 0 and item.is_floating_point():
            return item
    return None


def output_of(output: Any) -> torch.Tensor:
    """Return the tensor with a gradient that a model returns: its logits, or the first of all."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    for tensor in _torch.tensors_in([logits, output]):
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor
    raise ValueError("the model's output holds no tensor with a gradient; give loss=, a function (model, batch)")


def _loss_of(outputs: Any, target: Any) -> torch.Tensor:
    if (scalar := _scalar(outputs)) is not None:
        return scalar
    output = output_of(outputs)
    if isinstance(target, torch.Tensor):
        if target.shape == output.shape and target.is_floating_point():
            return functional.mse_loss(output.float(), target.float())
        if not target.is_floating_point() and target.shape == output.shape[:-1]:
            return functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())
    return output.float().square().mean()
