"""Lightning Fabric: ``ModelParallelStrategy``, its way to FSDP2, and ``FSDPStrategy``, which is FSDP1."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.llama import blocks_of, shard_by_hand
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import Training


def fabric(strategy: Any) -> Any:
    """A ``Fabric`` over this process group, launched."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    environment = TorchElasticEnvironment()
    made = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=[environment])
    made.launch()
    return made


def parallel(policy: str, *, compile: bool = False) -> Any:
    """Its strategy for FSDP2; what is sharded is the user's to write, so it is as by hand."""
    from lightning_fabric.strategies import ModelParallelStrategy

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        if compile:
            for block in blocks_of(model):
                block.compile()
        shard_by_hand(model, dist.get_world_size(), policy, mesh=mesh["data_parallel"])
        return model

    return ModelParallelStrategy(parallelize, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


def prepare(recipe: Recipe) -> Training:
    """``setup_module``, then the optimizer over what is sharded, as its documentation has it."""
    return _set_up(fabric(parallel(recipe.policy, compile=recipe.compile)), recipe)


def prepare_fsdp1(recipe: Recipe) -> Training:
    """The same by its older strategy."""
    from lightning_fabric.strategies import FSDPStrategy

    return _set_up(fabric(FSDPStrategy()), recipe)


def _set_up(made: Any, recipe: Recipe) -> Training:
    model = made.setup_module(recipe.build())
    optimizer = made.setup_optimizers(recipe.optimizer(model))
    return Training(model, optimizer, lambda: made.clip_gradients(model, optimizer, max_norm=1.0), made.backward)
