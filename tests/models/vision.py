"""Image classifiers, and models that join images and text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from models.case import Batch, Case, features, generator, tokens
from models.hub import TEXT, hub_case

SIDE = 16
"""pixels; with patches of 8 an image is 4 tokens"""
IMAGE_TOKEN = 3
"""stands in the text where the image goes"""

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
}


def _images(samples: int, seed: int) -> Batch:
    labels = torch.randint(0, 2, (samples,), generator=generator(seed + 1))
    return {"pixel_values": features(samples, seed, 3, SIDE, SIDE), "labels": labels}


def _large_images(samples: int, seed: int) -> Batch:
    return _images(samples, seed) | {"pixel_values": features(samples, seed, 3, 32, 32)}


def _matched(samples: int, seed: int) -> Batch:
    """Text that ends in the end token, from which CLIP takes its sentence, and an image each."""
    ids = tokens(samples, seed)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": features(samples, seed, 3, SIDE, SIDE)}


def _matching(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean logit of each image with its own text. The contrastive loss would couple the samples of a batch."""
    return -model(**batch).logits_per_image.diagonal().mean()


def _prompt(samples: int, seed: int) -> Batch:
    """Four image tokens, then text; only the text is predicted."""
    ids = torch.cat([torch.full((samples, 4), IMAGE_TOKEN), tokens(samples, seed).clamp(min=4)], dim=1)
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": features(samples, seed, 3, SIDE, SIDE)}


def _grid_prompt(samples: int, seed: int) -> Batch:
    """As `_prompt`, with the image as 4 × 4 flat patches a sample, which the model merges 2 × 2 to 4 tokens."""
    batch = _prompt(samples, seed)
    ids = torch.cat([torch.full((samples, 1), 4), batch["input_ids"], torch.full((samples, 1), 5)], dim=1)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        "pixel_values": features(samples * 16, seed, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * samples),
    }


def _caption(samples: int, seed: int) -> Batch:
    return _matched(samples, seed) | {"labels": tokens(samples, seed + 1)}


def _classifier(name: str, batch: Any = _images, unused: tuple[str, ...] = (), **options: Any) -> Case:
    return hub_case(
        f"{name}ForImageClassification",
        f"{name}Config",
        {"num_labels": 2} | options,
        batch,
        unused=unused,
        kind="vision",
    )


CLASSIFIERS: dict[str, Case] = {
    "vit": _classifier("ViT", **_TOWER),
    "deit": _classifier("DeiT", **_TOWER),
    "beit": _classifier("Beit", **_TOWER),
    "dinov2": _classifier("Dinov2", unused=("*.mask_token",), **_TOWER),
    "swin": _classifier(
        "Swin", _large_images, image_size=32, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4
    ),
    "convnext": _classifier("ConvNext", _large_images, hidden_sizes=[8, 16], depths=[1, 2], num_stages=2),
    "segformer": _classifier(
        "Segformer",
        _large_images,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
}

VISION_LANGUAGE: dict[str, Case] = {
    "clip": hub_case(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": _TOWER, "projection_dim": 16},
        _matched,
        _matching,
        kind="vision-language",
    ),
    "siglip": hub_case(
        "SiglipModel",
        "SiglipConfig",
        {"text_config": TEXT | {"projection_size": 32}, "vision_config": _TOWER},
        _matched,
        _matching,
        kind="vision-language",
    ),
    "llava": hub_case(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": TEXT | {"model_type": "llama", "num_key_value_heads": 2},
            "vision_config": _TOWER | {"model_type": "clip_vision_model"},
            "image_token_id": IMAGE_TOKEN,
            "image_token_index": IMAGE_TOKEN,
        },
        _prompt,
        unused=("*vision_tower.encoder.layers.1.*", "*vision_tower.post_layernorm.*"),  # its features are from layer -2
        kind="vision-language",
    ),
    "qwen2_vl": hub_case(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": TEXT
            | {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            "image_token_id": IMAGE_TOKEN,
            "vision_start_token_id": 4,
            "vision_end_token_id": 5,
            "video_token_id": 6,
        },
        _grid_prompt,
        kind="vision-language",
    ),
    "blip": hub_case(
        "BlipForConditionalGeneration",
        "BlipConfig",
        {"text_config": TEXT | {"encoder_hidden_size": 32, "sep_token_id": 2}, "vision_config": _TOWER},
        _caption,
        kind="vision-language",
    ),
}
