"""Batches and losses that nobody gave: read off ``forward`` and the first layer, or off transformers' settings.

The values of a batch are valid, so that it also serves where the model really runs. A model with several inputs, or of
a rare modality, is not guessed at: its batch is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trueshard import _torch
from trueshard.model import names

MakeBatch = Callable[[int, int], Any]
Loss = Callable[[nn.Module, Any], torch.Tensor]

TARGETS = ("labels", "targets", "target", "label")
"""Names of targets among the arguments of ``forward``."""

_SMALL = 256 << 10
"""Bytes of the largest tensor of a batch whose values matter."""

_LAYERS = (nn.Embedding, nn.Linear, nn.MultiheadAttention, nn.Conv2d)
"""First layers that tell what a model takes."""

_SIDES = (224, 32, 28, 64, 96, 128, 256, 384, 512, 16)
"""Sides of images that are tried, in this order."""

LONGER = "Samples are longer than"
"""Begin of an assumption, which an error of the model may come from."""
HOW = (
    "give batch=, a batch of example tensors or a function (microbatch, sequence) → batch; in a file, define "
    "batch(microbatch, sequence)"
)


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

        return _torch.mapped(like_example, example)

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
    if isinstance(first, nn.Embedding):
        return _token_feed(root, wanted, targets, first.num_embeddings, sequence)
    shape = None if targets else _shape(model, first, sequence)
    if shape is None:
        raise ValueError(
            f"it cannot be told what {type(root).__name__} is fed with: its first layer, {name or 'itself'!r}, is a "
            f"{type(first).__name__}{' and forward wants ' + targets if targets else ''}; {HOW}"
        )
    is_sequence = len(shape) == 2
    dtype = _dtype(first)

    def batch(microbatch: int, sequence: int) -> Any:
        return torch.randn(microbatch, *((sequence, *shape[1:]) if is_sequence else shape), dtype=dtype)

    assumption = f"The batch is random numbers of shape (microbatch, {', '.join(map(str, shape))}), read off {name!r}"
    assumption += "; the loss is what forward returns, or its mean square."
    return Feed(batch, model_loss, shape[0] if is_sequence else 1, (assumption,))


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

    def batch(microbatch: int, sequence: int) -> Any:
        ids = torch.randint(vocabulary, (microbatch, sequence))
        return (ids, ids.roll(-1, 1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ids, labels = batch
        output = model(ids, **{targets: labels}) if targets else model(ids)
        return _loss_of(output, labels)

    how = f"forward's own, from {targets}" if targets else "cross entropy of its logits in float32, or its scalar"
    assumption = f"The batch is token ids below {vocabulary} ({wanted}) with the next one as label; the loss is {how}."
    return Feed(batch, loss, sequence or min([*tables, 1024]), (assumption,))


def _dtype(layer: nn.Module) -> torch.dtype:
    dtypes = (parameter.dtype for parameter in layer.parameters(recurse=False))
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _shape(model: nn.Module, first: nn.Module, sequence: int | None) -> tuple[int, ...] | None:
    """Return the shape of a sample whose first layer is ``first``; None if that does not tell it."""
    if isinstance(first, nn.Linear):
        return (first.in_features,) if sequence is None else (sequence, first.in_features)
    if isinstance(first, nn.MultiheadAttention):
        return (sequence or 1024, first.embed_dim)
    if not isinstance(first, nn.Conv2d):
        return None
    with quietly():
        for side in _SIDES:
            shape = (first.in_channels, side, side)
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # it may not fit later layers
                model(torch.randn(2, *shape, dtype=_dtype(first)))
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


# Models of transformers

# Ends of the names of classes with labels of shape (microbatch, sequence).
_BY_TOKEN = ("CausalLM", "MaskedLM", "LMHeadModel", "MTModel", "Generation", "ForPreTraining", "TokenClassification")
_INPUTS = ("input_features", "input_ids", "input_values", "pixel_values")
"""Main inputs, of which the first that a class takes counts: spectrograms, text, waves, images."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_FRAMES = 500
"""Frames of a sound whose length is not said: ten seconds, as wav2vec2 has it."""
_IMAGE_TOKENS = 256
"""Tokens of an image where its size is free: 448 × 448 pixels, as Qwen2-VL has it."""


def model_feed(model: nn.Module, sequence: int | None) -> Feed:
    """Return a feed by the configuration of a model of transformers (PEFT's wrappers taken off), else by the code."""
    hub = sys.modules.get("transformers.modeling_utils")
    base: Any = names.unwrap(model)
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    if hub is not None and isinstance(base, hub.PreTrainedModel):
        return hub_feed(type(base), base.config, sequence)
    return module_feed(model, sequence)


def hub_feed(cls: type, settings: Any, sequence: int | None) -> Feed:
    """Return a feed for a class of transformers: text, images or sounds, with labels if it takes them."""
    takes = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
    main = next((key for key in _INPUTS if key in takes), None)
    if main is None:
        raise ValueError(f"it is not known what {cls.__name__} is fed with ({', '.join(list(takes)[1:4])}, …); {HOW}")
    length, limit = _length(settings, main, sequence), _limit(settings, main)
    has_pixels = "pixel_values" in takes
    images = _image_tokens(settings, takes, length) if "input_ids" in takes and has_pixels else 0
    assumptions = []
    if limit is not None and length > limit:
        assumptions.append(f"{LONGER} {limit:,}, for which the model is made: {length:,} tokens (--sequence).")
    is_optional = has_pixels and takes["pixel_values"].default is not inspect.Parameter.empty
    if "input_ids" in takes and is_optional and not images and "return_loss" not in takes:
        has_pixels = False
        assumptions.append("The batch is text alone: the model's images are left out.")
    what = {"input_ids": "text", "pixel_values": "images"}.get(main, "sounds")
    what += f" with an image a sample ({images} tokens)" if images else ""
    has_loss = bool({"labels", "start_positions", "return_loss"} & set(takes))
    loss = "the model's own, by labels" if has_loss else "the mean square of its first output"
    assumptions.append(f"The batch is {what}, and the loss {loss} (batch and loss of file.py:factory).")

    def batch(microbatch: int, sequence: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if main == "input_ids":
            made |= _text(cls, settings, takes, microbatch, sequence, images)
        elif main != "pixel_values":
            made |= _sound(cls, settings, main, microbatch, sequence)
        if has_pixels:
            made |= _pixels(settings, takes, microbatch, images)
        if "return_loss" in takes:
            made["return_loss"] = True
        return made | _labels(cls, settings, takes, microbatch, sequence)

    return Feed(batch, model_loss, length, tuple(assumptions))


def _length(settings: Any, main: str, sequence: int | None) -> int:
    """Return the tokens of a sample: those asked for, else what the model takes, at most 4,096; 1 for images alone."""
    if main == "input_values":
        return sequence or _FRAMES
    return 1 if main == "pixel_values" else sequence or min(_limit(settings, main) or 4096, 4096)


def _limit(settings: Any, main: str) -> int | None:
    """Return for how many tokens a sample the model is made; None if the configuration does not say it."""
    text = settings.get_text_config()
    decoded = getattr(settings, "max_target_positions", None) if main == "input_features" else None
    limits = (decoded, *(getattr(text, key, None) for key in _LENGTHS))
    return next((n for n in limits if isinstance(n, int) and n > 0 and main != "input_values"), None)


def _text(
    cls: type, settings: Any, takes: Mapping[str, Any], microbatch: int, sequence: int, images: int
) -> dict[str, torch.Tensor]:
    if images >= sequence:
        raise ValueError(f"{cls.__name__}: an image takes {images} tokens; ask for a sequence longer than that")
    vocabulary = int(settings.get_text_config().vocab_size)
    mark = _image_token(settings) if images else None
    ids = torch.randint(min(vocabulary, mark) if mark else vocabulary, (microbatch, sequence))
    if mark is not None:
        ids[:, :images] = mark
    made = {"input_ids": ids}
    if "attention_mask" in takes and takes["attention_mask"].default is inspect.Parameter.empty:
        made["attention_mask"] = torch.ones_like(ids)
    if settings.is_encoder_decoder and "labels" not in takes:
        made["decoder_input_ids"] = ids
    kinds = next((key for key in ("mm_token_type_ids", "token_type_ids") if key in takes), None)
    if mark is not None and kinds is not None:
        made[kinds] = (ids == mark).long()
    return made


def _image_token(settings: Any) -> int | None:
    """Return the id of the token that an image's features replace."""
    ids = (getattr(settings, key, None) for key in ("image_token_id", "image_token_index"))
    return next((mark for mark in ids if mark is not None), None)


def _image_tokens(settings: Any, takes: Mapping[str, Any], length: int) -> int:
    """Return how many tokens of text an image stands for; 0 if the model's own preprocessing decides it."""
    vision = getattr(settings, "vision_config", None)
    if vision is None or _image_token(settings) is None:
        return 0
    if "image_grid_thw" in takes:  # of any size: at most half of the sequence
        return math.isqrt(min(_IMAGE_TOKENS, length // 2)) ** 2
    if (count := getattr(settings, "mm_tokens_per_image", None)) is not None:
        return int(count)
    if settings.model_type not in ("llava", "vipllava", "paligemma"):
        return 0
    has_class_token = getattr(settings, "vision_feature_select_strategy", "default") == "full"
    return (int(vision.image_size) // int(vision.patch_size)) ** 2 + has_class_token


def _sound(cls: type, settings: Any, main: str, microbatch: int, sequence: int) -> dict[str, torch.Tensor]:
    if main == "input_features" and hasattr(settings, "max_source_positions") and hasattr(settings, "num_mel_bins"):
        return {main: torch.randn(microbatch, int(settings.num_mel_bins), 2 * int(settings.max_source_positions))}
    if main == "input_values" and (strides := getattr(settings, "conv_stride", None)) is not None:
        return {main: torch.randn(microbatch, math.prod(strides) * (sequence + 1))}
    raise ValueError(f"it is not known what sounds {cls.__name__} takes; {HOW}")


def _pixels(settings: Any, takes: Mapping[str, Any], microbatch: int, images: int) -> dict[str, torch.Tensor]:
    """Return an image a sample; with ``image_grid_thw`` as rows of patches, of which several make a token."""
    vision = getattr(settings, "vision_config", settings)
    if "image_grid_thw" not in takes:
        side = getattr(vision, "image_size", 224)
        height, width = side if isinstance(side, (tuple, list)) else (side, side)
        channels = int(getattr(vision, "num_channels", 3))
        return {"pixel_values": torch.randn(microbatch, channels, int(height), int(width))}
    channels = int(getattr(vision, "in_channels", getattr(vision, "in_chans", 3)))
    patch = channels * int(getattr(vision, "temporal_patch_size", 1)) * int(vision.patch_size) ** 2
    side = math.isqrt(images) * int(getattr(vision, "spatial_merge_size", 2))
    return {
        "pixel_values": torch.randn(microbatch * side * side, patch),
        "image_grid_thw": torch.tensor([[1, side, side]] * microbatch),
    }


def _labels(cls: type, settings: Any, takes: Any, microbatch: int, sequence: int) -> dict[str, torch.Tensor]:
    name = cls.__name__
    if "start_positions" in takes:
        return {key: torch.zeros(microbatch, dtype=torch.long) for key in ("start_positions", "end_positions")}
    if "labels" not in takes:
        return {}
    classes = int(getattr(settings, "num_labels", 2) or 2)
    if name.endswith(_BY_TOKEN):
        high = classes if "Classification" in name else int(settings.get_text_config().vocab_size)
        made = {"labels": torch.randint(high, (microbatch, sequence))}
        if "next_sentence_label" in takes:
            made["next_sentence_label"] = torch.zeros(microbatch, dtype=torch.long)
        return made
    if name.endswith("ForCTC"):
        return {"labels": torch.randint(1, int(settings.vocab_size), (microbatch, max(1, sequence // 10)))}
    if name.endswith("Classification"):
        return {"labels": torch.randn(microbatch) if classes == 1 else torch.randint(classes, (microbatch,))}
    return {}
