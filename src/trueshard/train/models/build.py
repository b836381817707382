"""The model of a run, from a Hugging Face directory or configuration, never from the network.

- ``architecture`` is cheap and raises every ``UserError``; the launcher calls it before a process starts.
- ``build`` makes the model without memory; it is sharded so, and then ``fill`` gives each rank its own rows. No rank
  holds the whole model.
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from trueshard.errors import UserError, with_kind
from trueshard.train.config import Config
from trueshard.train.models.adapters import needs_values
from trueshard.train.models.filling import fill
from trueshard.train.models.making import empty, with_values
from trueshard.train.models.settings import key_of, settings_of

__all__ = ["architecture", "build", "fill", "plain_settings", "quiet_transformers", "reference"]


def architecture(config: Config, vocab_size: int, image_token: int | None = None) -> Any:
    """The transformers configuration of the model, for a tokenizer of `vocab_size` tokens.

    Args:
        config: what is asked for.
        vocab_size: of the tokenizer, special tokens included.
        image_token: with format "vision", the number of the tokenizer's token that stands for a part of an image.

    Raises:
        UserError: there is none, transformers does not know it, it is of another kind than the data's format needs, its
            fields do not go together, its vocabulary is smaller than the tokenizer's, or what is to be frozen,
            quantised or adapted is not there.
    """
    settings = settings_of(config, vocab_size, image_token)
    key = key_of(config.model)
    try:
        model: Any = empty(config, settings, checking=True)
    except UserError:
        raise
    except Exception as error:  # whatever the modelling code trips over
        raise UserError(
            f"{key}: no model can be built from it ({with_kind(error)}); correct its configuration"
        ) from None
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < vocab_size:
        raise UserError(
            f"{key}: its vocabulary of {rows} is smaller than the tokenizer's {vocab_size}; "
            f"use the model's own tokenizer, or tokenizer.vocab_size = {rows}"
        )
    return settings


def build(config: Config, settings: Any) -> nn.Module:
    """The model on the meta device, in `model.dtype`: quantised, with its adapter, and frozen as asked for.

    ``fill`` gives it memory and values, best after ``shard()``. A model with an adapter whose beginning is computed
    from the weights (`init_lora_weights = "pissa"`) is made whole on the CPU instead.

    Args:
        config: what is asked for.
        settings: from ``architecture``.

    Raises:
        UserError: its files cannot be read.
    """
    if config.adapter is not None and needs_values(config.adapter):
        return with_values(config, settings)
    return empty(config, settings)


def reference(config: Config, settings: Any) -> nn.Module | None:
    """The model before training, frozen, without memory: for preference tuning; to be sharded and filled like it.

    None with an adapter: there it is the model with its adapter off.
    """
    if config.adapter is not None:
        return None
    plain = config.model_copy(update={"model": config.model.model_copy(update={"freeze": []})})
    return empty(plain, settings).requires_grad_(False).eval()


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
