"""Builds tiny transformers models from configurations; nothing is downloaded.

Classes are named by strings and imported when built, so that a worker imports only the architectures it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.case import VOCABULARY, Batch, Case, language, own_loss, seeded

Options = dict[str, Any]

TEXT: Options = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""the sizes of every text model, in the words that most configurations share"""


def hub_case(
    model: str,
    config: str,
    options: Options,
    batch: Callable[[int, int], Batch] = language,
    loss: Callable[[nn.Module, Batch], torch.Tensor] = own_loss,
    unused: tuple[str, ...] = (),
    kind: str = "",
) -> Case:
    """A case around `transformers.<model>(transformers.<config>(**options))`: fp32, eager attention, no dropout."""

    def build(seed: int) -> nn.Module:
        import transformers

        settings = quiet(getattr(transformers, config)(**options))
        return seeded(seed, lambda: getattr(transformers, model)(settings))

    return Case(build, batch, loss, unused, kind)


def quiet(config: Any) -> Any:
    """The configuration with all that is random or couples samples switched off, in its parts too."""
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in key or "mask_time_prob" in key or "mask_feature_prob" in key):
            setattr(config, key, 0.0)
        elif hasattr(value, "to_dict"):
            quiet(value)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if hasattr(config, "router_aux_loss_coef"):
        config.router_aux_loss_coef = 0.0
    return config
