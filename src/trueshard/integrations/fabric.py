"""A strategy for Lightning ``Fabric``: ``Fabric(devices=8, strategy=TrueShardFabricStrategy())``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import trueshard
from trueshard.integrations.lightning_strategies import ShardsModules, installed, made_on_cpu, save_folder, unpack

lf: Any = installed("lightning.fabric", "lightning_fabric")
Base: Any = lf.strategies.DDPStrategy


class TrueShardFabricStrategy(ShardsModules, Base):
    """Shards what ``Fabric.setup`` is given, and saves checkpoints that load at any number of ranks.

    The arguments are those of ``trueshard.integrations.lightning.TrueShardStrategy``.
    """

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self._backward_sync_control = _Accumulation()

    def setup_module(self, module: nn.Module) -> nn.Module:
        self.shard(module)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        self.shard(module, *optimizers)
        return module, optimizers, scheduler

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: ``shard()`` moves unit by unit, so that the whole module is never on one device."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make modules on the CPU, or with ``empty_init`` without memory, for a checkpoint to fill."""
        return made_on_cpu(self.precision.module_init_context(), empty_init)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a folder of the modules and optimizers in ``state``; the rest is rank 0's, and is pickled in it."""
        if storage_options is not None or filter is not None:
            raise TypeError("a checkpoint of TrueShardFabricStrategy takes neither storage_options nor filter")
        models, optimizers, rest = _sorted(state)
        rest = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in rest.items()}
        save_folder(self, path, rest, model=models or None, optimizer=optimizers or None)

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder into ``state``, as Fabric documents it; into a module alone, also published weights."""
        path = str(self.broadcast(path))
        weights_only = self._weights_only if weights_only is None else weights_only
        if isinstance(state, nn.Module):
            trueshard.load(path, model=state, strict=strict, rng=False)
            return {}
        models, optimizers, rest = _sorted(state or {})
        content = trueshard.load(path, model=models or None, optimizer=optimizers or None, strict=strict)
        saved = unpack(path, content, weights_only)
        if (missing := [key for key in rest if key not in saved]) and strict:
            raise KeyError(f"{path} has no {missing[0]!r}; leave it out of the state, or give strict=False")
        for key in rest.keys() & saved.keys():
            if hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(saved.pop(key))
            else:
                state[key] = saved.pop(key)
        return saved


def _sorted(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the modules, the optimizers and the rest of a state."""
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    optimizers = {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}
    return models, optimizers, {k: v for k, v in state.items() if k not in models and k not in optimizers}


class _Accumulation:
    """Fabric's interface of a strategy that need not reduce in each backward."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return trueshard.accumulate(module, last=False) if enabled else nullcontext()
