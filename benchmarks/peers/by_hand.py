"""PyTorch alone: ``fully_shard`` on each block, then on the root."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.llama import blocks_of, shard_by_hand
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import Training


def prepare(recipe: Recipe) -> Training:
    """As PyTorch's documentation has it: compile blocks, shard them, then make the optimizer."""
    model = recipe.build()
    if recipe.compile:
        for block in blocks_of(model):
            block.compile()
    shard_by_hand(model, dist.get_world_size(), recipe.policy)
    optimizer = recipe.optimizer(model)
    return Training(model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
