"""Batches of the models of transformers: text, images and sounds, from the settings of a configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from trueshard.planner.inputs.batches import HOW, Feed, model_loss

# Ends of the names of classes with labels of shape (microbatch, sequence).
_BY_TOKEN = ("CausalLM", "MaskedLM", "LMHeadModel", "MTModel", "Generation", "ForPreTraining", "TokenClassification")
_MEDIA = ("pixel_values", "input_features", "input_values")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_FRAMES = 500
"""Frames of a sound whose length is not said: ten seconds, as wav2vec2 has it."""
_IMAGE_TOKENS = 256
"""Tokens of an image where its size is free: 448 × 448 pixels, as Qwen2-VL has it."""


def hub_feed(cls: type, settings: Any, sequence: int | None) -> Feed:
    """Return a feed for a class of transformers: text, images or sounds, with labels if it takes them."""
    takes = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
    has_text, has_pixels = "input_ids" in takes, "pixel_values" in takes
    if not has_text and not set(_MEDIA) & set(takes):
        raise ValueError(f"it is not known what {cls.__name__} is fed with ({', '.join(list(takes)[1:4])}, …); {HOW}")
    length = _length(settings, takes, sequence)
    images = _image_tokens(settings, takes, length) if has_text and has_pixels else 0
    assumptions = []
    optional = has_pixels and takes["pixel_values"].default is not inspect.Parameter.empty
    if has_text and optional and not images and "return_loss" not in takes:
        has_pixels = False
        assumptions.append("The batch is text alone: the model's images are left out.")
    has_sound = bool({"input_features", "input_values"} & set(takes)) and ("input_features" in takes or not has_text)
    has_loss = bool({"labels", "start_positions", "return_loss"} & set(takes))
    loss = "the model's own, by labels" if has_loss else "the mean square of its first output"
    assumptions.append(f"The batch is {'sounds' if has_sound else 'text' if has_text else 'images'}")
    assumptions[-1] += f" with an image a sample ({images} tokens)" if images else ""
    assumptions[-1] += f", and the loss {loss} (batch and loss of file.py:factory)."

    def batch(microbatch: int, sequence: int) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        if has_sound:
            made |= _sound(cls, settings, takes, microbatch, sequence)
        elif has_text:
            made |= _text(cls, settings, takes, microbatch, sequence, images)
        if has_pixels:
            made |= _pixels_of(settings, takes, microbatch, images)
        if "return_loss" in takes:
            made["return_loss"] = True  # type: ignore[assignment]
        return made | _labels(cls, settings, takes, microbatch, sequence)

    return Feed(batch, model_loss, length, tuple(assumptions))


def _length(settings: Any, takes: Mapping[str, Any], sequence: int | None) -> int:
    """Return the tokens of a sample: those asked for, else what the model takes, at most 4,096; 1 for images alone."""
    if "input_values" in takes and "input_ids" not in takes:
        return sequence or _FRAMES
    if "input_ids" not in takes and "input_features" not in takes:
        return 1
    text = settings.get_text_config()
    decoded = [("max_target_positions", settings)] if "input_features" in takes else []
    limits = (getattr(part, key, None) for key, part in [*decoded, *((key, text) for key in _LENGTHS)])
    limit = next((n for n in limits if isinstance(n, int) and n > 0), 4096)
    return sequence or min(limit, 4096)


def _text(
    cls: type, settings: Any, takes: Mapping[str, Any], microbatch: int, sequence: int, images: int
) -> dict[str, torch.Tensor]:
    if images >= sequence:
        raise ValueError(f"{cls.__name__}: an image takes {images} tokens; ask for a sequence longer than that")
    vocabulary = int(settings.get_text_config().vocab_size)
    mark = _mark(settings) if images else None
    ids = torch.randint(min(vocabulary, mark) if mark else vocabulary, (microbatch, sequence))
    if mark is not None:
        ids[:, :images] = mark
    made = {"input_ids": ids}
    if takes.get("attention_mask") is not None and takes["attention_mask"].default is inspect.Parameter.empty:
        made["attention_mask"] = torch.ones_like(ids)
    if settings.is_encoder_decoder and "labels" not in takes:
        made["decoder_input_ids"] = ids
    kinds = next((key for key in ("mm_token_type_ids", "token_type_ids") if key in takes), None)
    if mark is not None and kinds is not None:
        made[kinds] = (ids == mark).long()
    return made


def _mark(settings: Any) -> int | None:
    """Return the id of the token that an image's features replace."""
    ids = (getattr(settings, key, None) for key in ("image_token_id", "image_token_index"))
    return next((mark for mark in ids if mark is not None), None)


def _sound(
    cls: type, settings: Any, takes: Mapping[str, Any], microbatch: int, sequence: int
) -> dict[str, torch.Tensor]:
    if "input_features" in takes:
        frames, bins = 2 * int(getattr(settings, "max_source_positions", 1500)), getattr(settings, "num_mel_bins", 80)
        if (channels := getattr(settings, "input_feat_per_channel", None)) is not None:
            return {"input_features": torch.randn(microbatch, frames // 2, int(channels))}
        return {"input_features": torch.randn(microbatch, int(bins), frames)}
    if (strides := getattr(settings, "conv_stride", None)) is not None:  # the wave itself
        return {"input_values": torch.randn(microbatch, math.prod(strides) * (sequence + 1))}
    if hasattr(settings, "num_mel_bins") and hasattr(settings, "max_length"):
        return {"input_values": torch.randn(microbatch, int(settings.max_length), int(settings.num_mel_bins))}
    raise ValueError(f"it is not known what sounds {cls.__name__} takes; {HOW}")


def _pixels_of(settings: Any, takes: Mapping[str, Any], microbatch: int, images: int) -> dict[str, torch.Tensor]:
    """Return an image a sample; with ``image_grid_thw`` as rows of patches, of which several make a token."""
    if "image_grid_thw" not in takes:
        pixels = _pixels(settings, microbatch)
        return {"pixel_values": pixels[:, None] if _has_several_images(settings) else pixels}
    vision = settings.vision_config
    merged = int(getattr(vision, "spatial_merge_size", 2))
    channels = int(getattr(vision, "in_channels", getattr(vision, "in_chans", 3)))
    patch = channels * int(getattr(vision, "temporal_patch_size", 1)) * int(vision.patch_size) ** 2
    side = math.isqrt(images) * merged
    return {
        "pixel_values": torch.randn(microbatch * side * side, patch),
        "image_grid_thw": torch.tensor([[1, side, side]] * microbatch),
    }


def _pixels(settings: Any, microbatch: int) -> torch.Tensor:
    vision = getattr(settings, "vision_config", settings)
    side = getattr(vision, "image_size", 224)
    height, width = side if isinstance(side, (tuple, list)) else (side, side)
    return torch.randn(microbatch, int(getattr(vision, "num_channels", 3)), int(height), int(width))


def _has_several_images(settings: Any) -> bool:
    """True if pixel values have a dimension for the images of a sample."""
    return settings.model_type in ("idefics3", "smolvlm")


def _image_tokens(settings: Any, takes: Mapping[str, Any], length: int) -> int:
    """Return how many tokens of text an image stands for; 0 if the model's own preprocessing decides it."""
    vision, kind = getattr(settings, "vision_config", None), settings.model_type
    if vision is None or _mark(settings) is None:
        return 0
    if "image_grid_thw" in takes:  # of any size: at most half of the sequence
        return math.isqrt(min(_IMAGE_TOKENS, length // 2)) ** 2
    if (count := getattr(settings, "mm_tokens_per_image", None)) is not None:
        return int(count)
    if kind == "internvl":
        return int(settings.image_seq_length)
    if kind not in ("llava", "vipllava", "paligemma", "idefics3", "smolvlm"):
        return 0
    patches = (int(vision.image_size) // int(vision.patch_size)) ** 2
    full = kind in ("llava", "vipllava") and getattr(settings, "vision_feature_select_strategy", "default") == "full"
    return (patches + full) // int(getattr(settings, "scale_factor", 1)) ** 2


def _labels(cls: type, settings: Any, takes: Any, microbatch: int, sequence: int) -> dict[str, torch.Tensor]:
    name = cls.__name__
    if "start_positions" in takes:
        where = torch.zeros(microbatch, dtype=torch.long)
        return {"start_positions": where, "end_positions": where.clone()}
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
    if name.endswith("SemanticSegmentation"):
        return {"labels": torch.randint(classes, (microbatch, *_pixels(settings, 1).shape[2:]))}
    return {}
