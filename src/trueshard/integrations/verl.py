"""verl's training engine for language models, on ``trueshard.shard``: its backend is called "trueshard".

It is verl's engine of FSDP2 with what shards, clips, saves, loads and hands on weights replaced. Batches, losses,
the optimizer and its schedule are verl's.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from trueshard import distributed
from trueshard.api import shard
from trueshard.checkpoint.loading import load
from trueshard.checkpoint.weights import weights
from trueshard.errors import own_errors, with_extra
from trueshard.integrations.accelerate import save_into
from trueshard.optim.norms import clip_grad_norm_
from trueshard.text import logger

with with_extra():
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.config import FSDPEngineConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

BACKEND = "trueshard"
_BY_OFFLOAD = "weights stay where they are; set offload_policy=True, which keeps them in the CPU's memory"
_REFUSED: dict[str, dict[str, str]] = {
    "engine_config": {
        "param_offload": _BY_OFFLOAD,
        "optimizer_offload": _BY_OFFLOAD,
        "wrap_policy": "name units by shard={units: [...]}",
    },
    "model_config": {"enable_activation_offload": "set enable_gradient_checkpointing"},
}
"""Configuration → key that this engine cannot follow → what to do instead."""


@dataclasses.dataclass
class EngineConfig(FSDPEngineConfig):
    """verl's ``FSDPEngineConfig`` with ``shard``: options of ``trueshard.shard``, which win over its own keys."""

    strategy: str = BACKEND
    shard: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.strategy != BACKEND:  # else the base, which knows its own words alone, would refuse it
            super().__post_init__()


@EngineRegistry.register(model_type="language_model", backend=BACKEND, device=["cuda", "npu", "cpu"])
class Engine(FSDPEngineWithLMHead):
    """A language model under verl, sharded by ``trueshard.shard``.

    Args:
        model_config, engine_config, optimizer_config, checkpoint_config: verl's; ``engine_config`` is a
            ``FSDPEngineConfig`` or the ``EngineConfig`` above.

    Raises:
        ValueError: a key that this engine cannot follow; names it.
    """

    @own_errors()
    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        configs = {"engine_config": engine_config, "model_config": model_config}
        for name, keys in _REFUSED.items():
            for key, remedy in keys.items():
                if value := getattr(configs[name], key, None):
                    raise ValueError(f"{key}={value!r}: {remedy}")
        if engine_config.ulysses_sequence_parallel_size > 1:
            raise ValueError("ulysses_sequence_parallel_size: a sequence is not split here; set it to 1")
        if engine_config.qat.enable:
            raise ValueError("qat.enable: quantized training is not covered; leave it out")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._saved: list[str] = []

    def initialize(self) -> None:
        self._build_model_optimizer()

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Shard the model; the optimizer that verl makes of it afterwards is bound at its first step."""
        config, world = self.engine_config, dist.get_world_size()
        for key, parameter in list(module.named_parameters()):
            if parameter.is_meta:  # verl reads files on the first rank alone: ranks take its values
                owner, _, name = key.rpartition(".")
                empty = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                empty.__dict__.update(parameter.__dict__)
                setattr(module.get_submodule(owner), name, empty)
        given = config.mixed_precision or {}
        compute, reduce = (
            PrecisionType.to_dtype(given.get(key, default))
            for key, default in (("param_dtype", "bf16"), ("reduce_dtype", "fp32"))
        )
        if compute == torch.float16:
            raise ValueError("mixed_precision.param_dtype: gradients are not scaled here; set it to bf16 or fp32")
        self._autocast_dtype = compute
        options: dict[str, Any] = {
            "reshard_after_forward": "default" if config.reshard_after_forward else "never",
            "offload": "cpu" if config.offload_policy or config.forward_only else "none",
        }
        if compute != torch.float32:
            options["mixed_precision"] = MixedPrecisionPolicy(compute, reduce)
        if 0 < config.fsdp_size < world:
            options["mesh"] = distributed.replicated_mesh(world // config.fsdp_size)
        shard(module, **(options | dict(getattr(config, "shard", {}))))
        return module

    def optimizer_step(self) -> float:
        """Clip gradients and step, unless their norm is not finite; return the norm before clipping."""
        norm = clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            logger.warning("the step is left out: the gradient norm is %s", norm.item())
            self.optimizer.zero_grad()
        return float(norm.item())

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Leave all where it is, as verl's engines do under ``offload_policy``."""

    @own_errors()
    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Return whole tensors one after the other, and the configuration of the adapter if they are its. Collective.

        An adapter is merged into its base with ``model.lora.merge``; else it comes alone. Names are those of Hugging
        Face's and PEFT's files. Tensors are in the dtype in which the model computes, valid until the iterator goes on.
        """
        adapters = {} if self.model_config.lora.get("merge") else getattr(self.module, "peft_config", {})
        adapter = adapters.get("default")
        if adapter is not None and not base_sync_done:
            raise ValueError(
                "lora_rank: the rollout has no base yet; set rollout.load_format to safetensors, or model.lora.merge"
            )
        units = weights(self.module, naming="hub") if adapter is None else weights(self.module, adapters="alone")
        pairs = (pair for names, tensors in units for pair in zip(names, tensors, strict=True))
        return pairs, None if adapter is None else adapter.to_dict()

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        raise NotImplementedError("deltas of shards are not covered: choose a checkpoint engine without them")

    get_per_tensor_param_delta_shard = get_per_tensor_param_shard

    def _content(self, contents: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = {"model": self.module}
        if self.optimizer is not None and "optimizer" in contents:
            chosen |= {"optimizer": self.optimizer, "schedule": self.lr_scheduler}
        return chosen

    @own_errors()
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one Hugging Face directory with the optimizer's state in it, for any number of ranks. Collective."""
        _refuse_hdfs(hdfs_path)
        content = self._content(self.checkpoint_config.save_contents)
        save_into(local_path, base=False, **content, progress={"step": global_step})
        self._saved = [path for path in self._saved if path != local_path] + [local_path]
        if self.rank == 0 and (processor := self.model_config.get_processor()) is not None:
            processor.save_pretrained(local_path)
        for old in self._saved[:-max_ckpt_to_keep] if max_ckpt_to_keep else ():
            self._saved.remove(old)
            if self.rank == 0:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()

    @own_errors()
    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False, **kwargs: Any
    ) -> None:
        """Load what ``save_checkpoint`` wrote, at any number of ranks. Collective."""
        _refuse_hdfs(hdfs_path)
        if local_path is None:
            return
        load(local_path, **self._content(self.checkpoint_config.load_contents))
        if del_local_after_load and self.rank == 0:
            shutil.rmtree(Path(local_path))
        dist.barrier()


def _refuse_hdfs(path: str | None) -> None:
    if path is not None:
        raise ValueError(f"hdfs_path={path!r}: nothing is copied there; let all ranks share local_path")
