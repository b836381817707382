"""TrueShard."""

from __future__ import annotations

import torch

from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import Training


def prepare(recipe: Recipe) -> Training:
    """``trueshard.shard`` of the model and its optimizer."""
    import trueshard

    model = recipe.build()
    optimizer = recipe.optimizer(model)
    trueshard.shard(model, optimizer, reshard_after_forward=recipe.policy, compile=recipe.compile)
    return Training(model, optimizer, lambda: trueshard.clip_grad_norm_(model.parameters(), 1.0))


def prepare_from_file(recipe: Recipe) -> Training:
    """The same, but that each rank reads its own weights from the recipe's folder into a model without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import trueshard

    with torch.device("meta"):
        model = recipe.adapted(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.folder)))
    optimizer = recipe.optimizer(model)
    trueshard.shard(model, optimizer, reshard_after_forward=recipe.policy, compile=recipe.compile)
    trueshard.load(recipe.folder, model=model)
    return Training(model, optimizer, lambda: trueshard.clip_grad_norm_(model.parameters(), 1.0))
