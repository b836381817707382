"""One of ``SYSTEMS`` under a library: what is changed in it before its tests are imported."""

from __future__ import annotations

import functools
import os
from typing import Any

SYSTEMS = ("one", "ddp", "fsdp2", "ours")
"""One process as it is; two processes with DDP, with the library's own FSDP2, with TrueShard."""


def put_under(system: str, library: str) -> None:
    """Let ``library`` train with ``system`` in this process."""
    if library == "transformers":
        _stand_in()
    if system == "one":
        return
    if library == "lightning":
        _under_lightning(system)
        return
    if system == "fsdp2":
        _accelerate_fsdp2()
    elif system == "ours":
        {"accelerate": _accelerate_ours, "transformers": _transformers_ours}[library]()


def _stand_in() -> None:
    """Let files be imported whose tests are of an earlier release: what went since then fails where it is used."""
    import transformers

    for name in ("GlueDataset", "GlueDataTrainingArguments"):
        if not hasattr(transformers, name):
            setattr(transformers, name, None)


def _accelerate_ours() -> None:
    import accelerate.accelerator

    from trueshard.integrations.accelerate import Accelerator

    for module in (accelerate, accelerate.accelerator):
        module.Accelerator = Accelerator


def _accelerate_fsdp2() -> None:
    """Accelerate's plugin for FSDP quietly runs DDP on CPUs, so its state is told that they are another device."""
    import accelerate
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING="false")
    begin = accelerate.Accelerator.__init__

    @functools.wraps(begin)
    def begin_sharded(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin") or FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
        )
        begin(self, *args, **kwargs)
        self.state.fsdp_plugin = plugin
        if self.mixed_precision != "no":
            plugin.set_mixed_precision(self.mixed_precision)
        PartialState().distributed_type = self.state.distributed_type = DistributedType.FSDP

    accelerate.Accelerator.__init__ = begin_sharded


def _transformers_ours() -> None:
    import transformers.trainer

    from trueshard.integrations.transformers import ShardedTrainer

    plain = transformers.trainer.Trainer
    made = type("Trainer", (ShardedTrainer, plain), {"__module__": plain.__module__})
    transformers.trainer.Trainer = transformers.Trainer = made


# Lightning


def _under_lightning(system: str) -> None:
    """Let every ``Trainer`` that names no strategy and no device be one of two processes with a strategy."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    begin = pl.Trainer.__init__

    def strategy() -> Any:
        if system == "ddp":
            return DDPStrategy()
        if system == "fsdp2":
            return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        from trueshard.integrations.lightning import TrueShardStrategy

        return TrueShardStrategy()

    @functools.wraps(begin)
    def begin_sharded(self: Any, *args: Any, **kwargs: Any) -> None:
        fits = kwargs.get("accelerator", "auto") in ("auto", "cpu") and kwargs.get("devices", "auto") in ("auto", 1)
        if not args and fits and kwargs.get("strategy", "auto") == "auto" and not kwargs.get("barebones"):
            kwargs.update(accelerator="cpu", devices=2, strategy=strategy())
        begin(self, *args, **kwargs)

    pl.Trainer.__init__ = begin_sharded
    if system == "fsdp2":
        _configure_by_hand(pl.LightningModule)


def _configure_by_hand(module: Any) -> None:
    """``ModelParallelStrategy`` leaves it to the module's ``configure_model`` to call ``fully_shard``."""
    import lightning.pytorch.strategies.model_parallel as strategy
    from torch.distributed.fsdp import fully_shard

    strategy.is_overridden = lambda *_, **__: True  # it looks for a module's own
    configure = module.configure_model

    def configure_model(self: Any) -> None:
        configure(self)
        if self.device_mesh is not None and not getattr(self, "_is_fully_sharded", False):
            self._is_fully_sharded = True
            for child in self.children():
                if any(True for _ in child.parameters()):
                    fully_shard(child, mesh=self.device_mesh["data_parallel"])

    module.configure_model = configure_model
