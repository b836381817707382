"""From `[model]` to a transformers configuration, with every error that can be found without building the model."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from trueshard.errors import UserError, with_kind
from trueshard.train.config import Config, ModelSection

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def settings_of(config: Config, vocab_size: int, image_token: int | None = None) -> Any:
    """The transformers configuration of the model.

    Args:
        config: what is asked for.
        vocab_size: of the tokenizer.
        image_token: with format "vision", the number of the token that stands for a part of an image.

    Raises:
        UserError: there is none, transformers does not know it, it is of another kind, or its fields do not fit.
    """
    section, kind = config.model, Kind.of(config)
    settings = _from_fields(section, kind, vocab_size) if section.architecture else _from_files(section, kind)
    if image_token is not None:
        _set_image_token(section, settings, image_token)
    return settings


class Kind:
    """Which of transformers' families of models is built."""

    def __init__(self, auto: str, mapping: str, word: str, example: str) -> None:
        self._auto, self._mapping, self.word, self.example = auto, mapping, word, example

    @classmethod
    def of(cls, config: Config) -> Kind:
        """That for the format of the data."""
        if config.data.format == "vision":
            mapping = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
            return cls("AutoModelForImageTextToText", mapping, "model of images and text", "llava")
        return cls("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal language model", "llama")

    @property
    def auto(self) -> Any:
        """The class that makes one."""
        import transformers

        return getattr(transformers, self._auto)

    @property
    def known(self) -> Mapping[str, Any]:
        """Its ``model_type`` names."""
        from transformers.models.auto import modeling_auto

        names: Mapping[str, Any] = getattr(modeling_auto, self._mapping)
        return names


def key_of(section: ModelSection) -> str:
    """Which key says what the model is."""
    return next(f"model.{name}" for name in ("path", "config", "architecture") if getattr(section, name) is not None)


def _from_fields(section: ModelSection, kind: Kind, vocab_size: int) -> Any:
    from transformers import AutoConfig

    assert section.architecture is not None
    _check_known(section.architecture, "model.architecture", kind)
    default = AutoConfig.for_model(section.architecture)
    _check_fields(section.fields, default, "model.fields", section.architecture)
    fields = dict(section.fields)
    nested = getattr(default, "text_config", None)
    if nested is None:
        fields["vocab_size"] = vocab_size
    else:
        kind_of_text = {"model_type": nested.model_type} | dict(fields.get("text_config", {}))
        fields["text_config"] = kind_of_text | {"vocab_size": vocab_size}
        if getattr(default, "vision_config", None) is not None and "vision_config" in fields:
            fields["vision_config"] = {"model_type": default.vision_config.model_type} | dict(fields["vision_config"])
    try:
        return AutoConfig.for_model(section.architecture, **fields)
    except Exception as error:  # transformers validates in several ways
        raise UserError(
            f"model.fields: {section.architecture} refuses them ({with_kind(error)}); correct them"
        ) from None


def _check_fields(fields: Mapping[str, Any], default: Any, where: str, what: str) -> None:
    """Hold the names of ``fields`` against those of a configuration, and of those inside it."""
    from transformers import AutoConfig

    if "vocab_size" in fields:
        raise UserError(f"{where}.vocab_size: the vocabulary size is the tokenizer's; remove it")
    valid = default.to_dict()
    for name, value in fields.items():
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
            hint = f"nearest valid one: {where}.{near[0]}" if near else "see its transformers configuration"
            raise UserError(f"unknown key {where}.{name} for the architecture {what!r}; {hint}")
        if name in ("text_config", "vision_config") and valid[name] is not None:
            if not isinstance(value, Mapping):
                raise UserError(f"{where}.{name}: wanted a table, found {value!r}")
            inner = getattr(default, name)
            if (other := value.get("model_type", inner.model_type)) != inner.model_type:
                try:
                    inner = AutoConfig.for_model(other)
                except ValueError:
                    raise UserError(f"{where}.{name}.model_type: {other!r} is unknown to transformers") from None
            _check_fields({k: v for k, v in value.items() if k != "model_type"}, inner, f"{where}.{name}", other)


def _from_files(section: ModelSection, kind: Kind) -> Any:
    from transformers import AutoConfig

    key, path = key_of(section), section.place()
    file = path / "config.json" if path.is_dir() or section.path else path
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist; give a Hugging Face model directory on this machine")
    if not file.is_file():
        raise UserError(f"{key}: {path} is not a model directory: it has no config.json; give one that has")
    try:
        model_type = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f'{key}: {file} is not a transformers configuration ({with_kind(error)}); it needs a "model_type"'
        ) from None
    _check_known(model_type, f"{key}: {file}", kind)
    if section.path and (path / "adapter" / "adapter_config.json").exists():
        raise UserError(
            f"model.path: {path} is a checkpoint of an adapter and its base; make one model of them first: "
            f"trueshard export {path} OUT --to merged"
        )
    if section.path and not any(found for pattern in WEIGHTS for found in path.glob(pattern)):
        raise UserError(
            f"model.path: {path} has no weights ({', '.join(WEIGHTS)}); to train from scratch use model.config instead"
        )
    try:
        settings = AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:  # transformers validates in several ways
        raise UserError(f"{key}: {file} is refused by transformers ({with_kind(error)}); correct it") from None
    settings._name_or_path = str(file.parent.absolute()) if section.path else ""  # where PEFT says that the base is
    return settings


def _check_known(model_type: Any, where: str, kind: Kind) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type in kind.known:
        return
    state = f"is not a {kind.word}" if model_type in CONFIG_MAPPING_NAMES else "is unknown to transformers"
    near = difflib.get_close_matches(str(model_type), kind.known, n=3, cutoff=0.5)
    remedy = f"near matches: {', '.join(near)}" if near else f"give a model_type it knows, such as {kind.example!r}"
    raise UserError(f"{where}: the architecture {model_type!r} {state}; {remedy}")


def _set_image_token(section: ModelSection, settings: Any, image_token: int) -> None:
    """The model finds an image's places by this token, so tokenizer and model must mean the same."""
    keys = [key for key in ("image_token_id", "image_token_index") if hasattr(settings, key)]
    for key in keys:
        if section.architecture is not None and key not in section.fields:
            setattr(settings, key, image_token)
        elif getattr(settings, key) != image_token:
            raise UserError(
                f"{key_of(section)}: the model's {key} is {getattr(settings, key)}, the tokenizer's image token is "
                f"{image_token}; use the model's own tokenizer"
            )
