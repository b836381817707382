"""TrueShard."""

from __future__ import annotations

from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import Training


def prepare(recipe: Recipe) -> Training:
    """``trueshard.shard`` of the model and its optimizer."""
    import trueshard

    model = recipe.build()
    optimizer = recipe.optimizer(model)
    trueshard.shard(model, optimizer, reshard_after_forward=recipe.policy, compile=recipe.compile)
    return Training(model, optimizer, lambda: trueshard.clip_grad_norm_(model.parameters(), 1.0))
