"""transformers' own sharded loading: ``from_pretrained`` with a ``DistributedConfig``, by the plan of its model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.llama import blocks_of
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import Training


def prepare(recipe: Recipe) -> Training:
    """Builds and loads the model sharded; what it keeps gathered is its model's own plan, whatever the policy."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    layout = DistributedConfig(fsdp_size=dist.get_world_size())
    loaded: Any = AutoModelForCausalLM.from_pretrained(recipe.folder, distributed_config=layout)
    model = recipe.adapted(loaded)
    if recipe.compile:
        for block in blocks_of(model):
            block.compile()
    optimizer = recipe.optimizer(model)
    return Training(model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
