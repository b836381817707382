"""Which loss a configuration means, ready to be used on its model."""

from __future__ import annotations

from typing import Any

from torch import nn

import trueshard
from trueshard import names
from trueshard.distributed import device_of
from trueshard.runtime import runtime_of
from trueshard.train.config import Config
from trueshard.train.losses.causal import CausalLoss
from trueshard.train.losses.packing import check_apart
from trueshard.train.losses.preference import PreferenceLoss
from trueshard.train.models.build import fill, reference
from trueshard.train.trainer import Loss


def choose_loss(config: Config, settings: Any, model: nn.Module) -> Loss:
    """The loss of a run. Collective.

    Args:
        config: of the run.
        settings: the transformers configuration of the model.
        model: sharded, with its values. A reference for preferences is made beside it, and sharded by the same plan.

    Raises:
        UserError: documents are packed and the model mixes them; on every rank.
    """
    runtime = runtime_of(names.unwrap(model))
    assert runtime is not None, "the loss is chosen after shard()"
    whole_logits = config.train.whole_logits
    if config.data.format == "preference":
        other = reference(config, settings)
        if other is not None:
            trueshard.shard(other, plan=runtime.plan, mesh=runtime.mesh)
            fill(config, other)
        return PreferenceLoss(other, config.preference.beta, config.preference.label_smoothing, whole_logits)
    if config.data.format == "chat" and config.data.packing:
        check_apart(model, device_of(runtime.mesh))
    return CausalLoss(whole_logits)
