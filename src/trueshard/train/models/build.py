"""The model of a run, from a Hugging Face directory or configuration, never from the network.

`architecture()` is cheap and raises every `UserError`; the launcher calls it before a process starts. `build()` then
makes the parameters.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard.errors import UserError
from trueshard.train.config import Config, ModelSection

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def architecture(config: Config, vocab_size: int) -> Any:
    """The transformers configuration of the model, for a tokenizer of `vocab_size` tokens.

    Raises `UserError` if there is none, transformers does not know it, it is not a causal language model, its fields
    do not go together, or its vocabulary is smaller than the tokenizer's.
    """
    section = config.model
    settings = _from_fields(section, vocab_size) if section.architecture else _from_files(section)
    _check_fits(settings, _key(section), vocab_size)
    return settings


def build(config: Config, settings: Any) -> nn.Module:
    """The model on the CPU, in `model.dtype`: with its weights for `model.path`, else initialised from `train.seed`."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, config.model.dtype)
    torch.manual_seed(config.train.seed)
    if config.model.path is None:
        return AutoModelForCausalLM.from_config(settings, dtype=dtype)
    path = Path(config.model.path).expanduser()
    try:
        return AutoModelForCausalLM.from_pretrained(str(path), config=settings, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.path: the weights in {path} cannot be loaded ({_line(error)}); check the files"
        ) from error


def quiet_transformers() -> None:
    """Leave the terminal to the trainer: no advice and no progress bars from transformers, whose errors are raised."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def plain_settings(settings: Any) -> dict[str, Any]:
    """The architecture as JSON values, without what does not change the model: to compare a resumed run with."""
    passing = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    return {
        key: value for key, value in json.loads(settings.to_json_string(use_diff=False)).items() if key not in passing
    }


def _key(section: ModelSection) -> str:
    return next(f"model.{name}" for name in ("path", "config", "architecture") if getattr(section, name) is not None)


def _from_fields(section: ModelSection, vocab_size: int) -> Any:
    from transformers import AutoConfig

    assert section.architecture is not None
    _check_known(section.architecture, "model.architecture")
    if "vocab_size" in section.fields:
        raise UserError("model.fields.vocab_size: the vocabulary size is the tokenizer's; remove it")
    valid = AutoConfig.for_model(section.architecture).to_dict()
    for name in section.fields:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
            hint = f"nearest valid one: model.fields.{near[0]}" if near else "see its transformers configuration"
            raise UserError(f"unknown key model.fields.{name} for the architecture {section.architecture!r}; {hint}")
    try:
        return AutoConfig.for_model(section.architecture, vocab_size=vocab_size, **section.fields)
    except Exception as error:  # transformers validates in several ways
        raise UserError(f"model.fields: {section.architecture} refuses them ({_line(error)}); correct them") from None


def _from_files(section: ModelSection) -> Any:
    from transformers import AutoConfig

    key, path = _key(section), Path(section.path or section.config or "").expanduser()
    file = path / "config.json" if path.is_dir() or section.path else path
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist; give a Hugging Face model directory on this machine")
    if not file.is_file():
        raise UserError(f"{key}: {path} is not a model directory: it has no config.json; give one that has")
    try:
        model_type = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f'{key}: {file} is not a transformers configuration ({_line(error)}); it needs a "model_type"'
        ) from None
    _check_known(model_type, f"{key}: {file}")
    if section.path and not any(found for pattern in WEIGHTS for found in path.glob(pattern)):
        raise UserError(
            f"model.path: {path} has no weights ({', '.join(WEIGHTS)}); to train from scratch use model.config instead"
        )
    try:
        return AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:  # transformers validates in several ways
        raise UserError(f"{key}: {file} is refused by transformers ({_line(error)}); correct it") from None


def _check_known(model_type: Any, where: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    state = "is not a causal language model" if model_type in CONFIG_MAPPING_NAMES else "is unknown to transformers"
    near = difflib.get_close_matches(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3, cutoff=0.5)
    remedy = f"near matches: {', '.join(near)}" if near else 'give a model_type it knows, such as "llama"'
    raise UserError(f"{where}: the architecture {model_type!r} {state}; {remedy}")


def _check_fits(settings: Any, key: str, vocab_size: int) -> None:
    """Build the model without memory, so that fields which do not go together are found here."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # whatever the modelling code trips over
        raise UserError(f"{key}: no model can be built from it ({_line(error)}); correct its configuration") from None
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < vocab_size:
        raise UserError(
            f"{key}: its vocabulary of {rows} is smaller than the tokenizer's {vocab_size}; "
            f"use the model's own tokenizer, or tokenizer.vocab_size = {rows}"
        )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
