"""Accelerate's FSDP2 path.

On CPUs, Accelerate's plugin for FSDP quietly runs DDP. So its state is told that it is the distributed type of an
accelerator; from there on, ``prepare`` and the others do what they do on one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from benchmarks.peers.environment import environment
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import Training


def launched(*, ram_efficient: bool) -> AbstractContextManager[None]:
    """Inside, the environment is what ``accelerate launch`` makes it."""
    efficient = str(ram_efficient).lower()
    return environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING=efficient)


def accelerators(*, ram_efficient: bool, always: bool = True) -> tuple[Any, Any]:
    """Accelerate's accelerator and its plugin for FSDP2; its state is one for the process.

    Args:
        ram_efficient: rank 0 loads the weights and broadcasts them.
        always: every unit is freed after forward, which is Accelerate's default; else none is.
    """
    from accelerate import Accelerator

    with launched(ram_efficient=ram_efficient):
        accelerator = Accelerator(cpu=True)
    return accelerator, use_fsdp2(accelerator, ram_efficient=ram_efficient, always=always)


def use_fsdp2(accelerator: Any, *, ram_efficient: bool, always: bool) -> Any:
    """Tell an accelerator that has prepared nothing that it has FSDP2; return its plugin."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    with launched(ram_efficient=ram_efficient):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=ram_efficient,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=always,
        )
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState().distributed_type = DistributedType.FSDP  # from which prepare makes the state anew
    return plugin


def prepare(recipe: Recipe) -> Training:
    """``Accelerator.prepare`` of the model and its optimizer, and its ``backward`` and ``clip_grad_norm_``.

    Raises:
        ValueError: policies are one for all units here.
    """
    if recipe.policy not in ("always", "never"):
        raise ValueError(f"reshard_after_forward is one for all units, which {recipe.policy!r} is not")
    accelerator, _ = accelerators(ram_efficient=False, always=recipe.policy == "always")
    if recipe.compile:
        from accelerate.utils import TorchDynamoPlugin

        accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    model = recipe.build()
    model, optimizer = accelerator.prepare(model, recipe.optimizer(model))
    return Training(
        model, optimizer, lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0), backward=accelerator.backward
    )
