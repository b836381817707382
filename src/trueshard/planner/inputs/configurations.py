"""A model from a transformers ``config.json``: nothing is loaded from a hub, no weights, no foreign code."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch

from trueshard import _torch
from trueshard.errors import with_kind
from trueshard.model import names
from trueshard.planner.inputs.batches import HOW, Feed, model_loss
from trueshard.planner.inputs.factories import Parts
from trueshard.planner.inputs.fake_tensors import make_fake

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
"""Mappings of ``transformers`` from a configuration to a class."""
PAIRS = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
"""Mappings that come first for a model with an encoder and a decoder."""

# Ends of the names of classes with labels of shape (microbatch, sequence).
_BY_TOKEN = ("CausalLM", "MaskedLM", "LMHeadModel", "MTModel", "Generation", "ForPreTraining", "TokenClassification")


class Configuration:
    """Models of a configuration. Raises ValueError for a file that is not there or that transformers does not know."""

    def __init__(self, path: Path) -> None:
        file = path / "config.json" if path.is_dir() else path
        self.name = file.parent.resolve().name if file.name == "config.json" else file.stem
        self.settings = _settings(file)
        self.cls = _class(self.settings, file)
        self.assumptions: list[str] = []
        if not self.settings.architectures:
            self.assumptions.append(f"The class is {self.cls.__name__}: the configuration names none.")
        if getattr(self.settings, "quantization_config", None) is not None:
            self.assumptions.append("The configuration's quantization is left out: parameters are stored whole.")

    def build(self, dtype: torch.dtype | None = None) -> Parts:
        """Return a new model on fake tensors, stored in ``dtype``; None: float32, whatever the configuration says."""
        try:
            with _torch.real_tensors(), torch.device("meta"):
                model = self.cls._from_config(self.settings, dtype=dtype or torch.float32)
        except Exception as error:  # whatever the modelling code trips over
            raise ValueError(
                f"{self.name}: no {self.cls.__name__} can be built from it ({with_kind(error)}); "
                "correct its configuration"
            ) from error
        make_fake(model)
        return Parts(model)


def hub_feed(cls: type, settings: Any, sequence: int | None) -> Feed:
    """Return a feed for a class of transformers: text, images or sounds, with labels if it takes them."""
    takes = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
    text = settings.get_text_config()
    has_text, has_pixels = "input_ids" in takes, "pixel_values" in takes
    if not (has_text or has_pixels or "input_features" in takes):
        raise ValueError(f"it is not known what {cls.__name__} is fed with ({', '.join(list(takes)[1:4])}, …); {HOW}")
    limit = next((n for key in _LENGTHS if isinstance(n := getattr(text, key, None), int) and n > 0), 4096)
    length = (sequence or min(limit, 4096)) if has_text or "input_features" in takes else 1
    images = _image_tokens(cls, settings) if has_text and has_pixels else 0
    said = []
    optional = has_pixels and takes["pixel_values"].default is not inspect.Parameter.empty
    if has_text and optional and not images and "return_loss" not in takes:
        has_pixels = False
        said.append("The batch is text alone: the model's images are left out.")
    said.append(f"The batch is {'text' if has_text else 'images' if has_pixels else 'sounds'}")
    said[-1] += (f" with an image a sample ({images} tokens)" if images else "") + ", with labels where it takes them."

    def batch(microbatch: int, sequence: int) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        if "input_features" in takes:
            frames = 2 * int(getattr(settings, "max_source_positions", 1500))
            made["input_features"] = torch.randn(microbatch, int(getattr(settings, "num_mel_bins", 80)), frames)
        elif has_text:
            made |= _text(cls, settings, takes, microbatch, sequence, images)
        if has_pixels:
            made["pixel_values"] = _pixels(settings, microbatch)
        if "return_loss" in takes:
            made["return_loss"] = True  # type: ignore[assignment]
        return made | _labels(cls, settings, takes, microbatch, sequence)

    return Feed(batch, model_loss, length, tuple(said))


_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "max_sequence_length")


def _text(cls: type, settings: Any, takes: Any, microbatch: int, sequence: int, images: int) -> dict[str, torch.Tensor]:
    if images >= sequence:
        raise ValueError(f"{cls.__name__}: an image takes {images} tokens; ask for a sequence longer than that")
    vocabulary = int(settings.get_text_config().vocab_size)
    mark = getattr(settings, "image_token_id", getattr(settings, "image_token_index", None)) if images else None
    ids = torch.randint(min(vocabulary, mark) if mark else vocabulary, (microbatch, sequence))
    if mark is not None:
        ids[:, :images] = mark
    made = {"input_ids": ids}
    if takes.get("attention_mask") is not None and takes["attention_mask"].default is inspect.Parameter.empty:
        made["attention_mask"] = torch.ones_like(ids)
    if settings.is_encoder_decoder and "labels" not in takes:
        made["decoder_input_ids"] = ids
    return made


def _pixels(settings: Any, microbatch: int) -> torch.Tensor:
    vision = getattr(settings, "vision_config", settings)
    side = getattr(vision, "image_size", 224)
    height, width = side if isinstance(side, (tuple, list)) else (side, side)
    return torch.randn(microbatch, int(getattr(vision, "num_channels", 3)), int(height), int(width))


def _image_tokens(cls: type, settings: Any) -> int:
    """Return how many tokens of text an image stands for; 0 if the model's own preprocessing decides it."""
    vision = getattr(settings, "vision_config", None)
    if vision is None or settings.model_type not in ("llava", "vipllava"):
        return 0
    full = getattr(settings, "vision_feature_select_strategy", "default") == "full"
    return (int(vision.image_size) // int(vision.patch_size)) ** 2 + full


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
    if name.endswith("Classification"):
        return {"labels": torch.randn(microbatch) if classes == 1 else torch.randint(classes, (microbatch,))}
    if name.endswith("SemanticSegmentation"):
        return {"labels": torch.randint(classes, (microbatch, *_pixels(settings, 1).shape[2:]))}
    return {}


def _settings(file: Path) -> Any:
    """Read a configuration for training: no cache, attention as transformers chooses it."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{file.parent} has no config.json" if file.parent.is_dir() else f"{file.parent} does not exist"
        why = what if isinstance(error, FileNotFoundError) else f"{file} cannot be read ({error.strerror})"
        raise ValueError(f"{why}; give a folder with a config.json, that file, or file.py:factory") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise ValueError(f"{file} needs transformers; pip install 'trueshard[train]', or use file.py:factory") from None
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f'{file} is not a transformers configuration: it has no "model_type"')
    if kind not in CONFIG_MAPPING:
        own = " Its own code (auto_map) is not run; write file.py:factory." if "auto_map" in data else ""
        near = names.nearest(kind, list(CONFIG_MAPPING))
        raise ValueError(f"{file}: the model_type {kind!r} is unknown to transformers.{near}{own}")
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        data.pop(key, None)
    try:
        settings = CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:  # transformers validates in several ways
        raise ValueError(f"{file} is refused by transformers ({with_kind(error)}); correct it") from None
    for part in {id(each): each for each in (settings, settings.get_text_config())}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if settings.is_encoder_decoder and getattr(settings, "decoder_start_token_id", None) is None:
        settings.decoder_start_token_id = getattr(settings, "pad_token_id", None) or 0
    return settings


def _class(settings: Any, file: Path) -> Any:
    import transformers

    given = (settings.architectures or [None])[0]
    if given is not None:
        cls = getattr(transformers, given, None)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            known = [each for each in dir(transformers) if "For" in each or each.endswith("Model")]
            near = names.nearest(given, known)
            raise ValueError(f"{file}: the architecture {given!r} is unknown to transformers.{near}")
        return cls
    for mapping in (*PAIRS, *MAPPINGS) if settings.is_encoder_decoder else MAPPINGS:
        if type(settings) in (found := getattr(transformers, mapping, {})):
            cls = found[type(settings)]
            return cls[0] if isinstance(cls, tuple) else cls
    raise ValueError(f'{file}: no class is known for {settings.model_type!r}; add "architectures": ["…"]')
