"""``ShardedTrainer``: a mixin under which transformers' ``Trainer``, and every trainer of TRL, trains a sharded model.

    class Trainer(ShardedTrainer, SFTTrainer): pass

- The trainer stays as it is: its accelerator becomes ``trueshard.integrations.accelerate.Accelerator``, which shards
  what the trainer prepares, reference and reward models too.
- ``checkpoint-N`` is one ``trueshard.save``: a Hugging Face directory with the optimizer's state in it, which resumes
  at any number of ranks. The trainer's own files lie beside it. Of a PEFT model it has the adapters alone.
- A model is sharded when the trainer first trains, evaluates or predicts, and loads a checkpoint after that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard.checkpoint.catalogue import open_catalogue
from trueshard.checkpoint.format import MANIFEST
from trueshard.checkpoint.loading import load
from trueshard.errors import TrueShardValueError, own_errors, with_extra
from trueshard.integrations.accelerate import Accelerator, refuse_plugins, save_into
from trueshard.model import names
from trueshard.sharding.hooks import runtime_of
from trueshard.sharding.splitting import split_sequence

with with_extra():
    from transformers import __version__
    from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
if int(__version__.partition(".")[0]) < 5:
    raise ImportError(f"ShardedTrainer needs transformers 5, not {__version__}: pip install 'trueshard[accelerate]'")

_Trainer: Any = object
"""The trainer that a user's class names behind the mixin."""
_REFUSED = {
    "fsdp": "TrueShard shards in its place; leave it out, and give shard={…}",
    "fp16_full_eval": "a sharded model evaluates in its compute dtype; set fp16",
    "bf16_full_eval": "a sharded model evaluates in its compute dtype; set bf16",
    "save_on_each_node": "every rank writes its part of one directory; give all nodes the same one",
    "use_vllm": "TRL would send each rank's shards to vLLM; leave it out, and transformers generates",
    "use_transformers_continuous_batching": "it generates from whole weights; leave it out",
}
"""Key of ``TrainingArguments``, or of TRL's, that a sharded model cannot follow → why, and what to do."""


class ShardedTrainer(_Trainer):
    """Mixin for a ``Trainer``, before it among the bases: its model is sharded by TrueShard.

    Args:
        shard: options of ``trueshard.shard``, as for ``Accelerator``; or set it on the class.
        args, kwargs: the trainer's own.

    Raises:
        ValueError: a key of its arguments that a sharded model cannot follow; names it.
    """

    shard: Mapping[str, Any] = {}
    _parallelism: Any = None
    _writes_optimizer = False
    """True while the trainer writes a checkpoint to resume from."""

    def __init__(self, *args: Any, shard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if shard is not None:
            self.shard = shard
        super().__init__(*args, **kwargs)

    # What shards

    @own_errors()
    def create_accelerator_and_postprocess(self) -> None:
        for key, remedy in _REFUSED.items():
            if getattr(self.args, key, None):
                raise ValueError(f"{key}={getattr(self.args, key)!r}: {remedy}")
        if self.args.n_gpu > 1:
            raise ValueError(f"one process sees {self.args.n_gpu} devices: start one for each, with torchrun")
        super().create_accelerator_and_postprocess()
        Accelerator.of(self.accelerator, self.shard, self._parallelism)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        refuse_plugins(arguments)
        self._parallelism = arguments.pop("parallelism_config", None)  # accelerate knows one for FSDP2 and DDP alone
        return arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave a model where it is: ``shard()`` moves a rank's part."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training:
            self._shard_now()
        return model

    def _shard_now(self) -> None:
        """Shard the model without an optimizer, if it is not: one that is made later holds the sharded parameters."""
        if runtime_of(names.unwrap(self.model)) is None:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "ref_model", None) is None:
            self._shard_now()
        return super()._precompute_ref_logps(*args, **kwargs)

    # What a step calls

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the accelerator's norm is that over all meshes

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> tuple[Any, Any]:
        if self.get_cp_size() > 1:
            owner = next(cls for cls in type(self).__mro__ if "compute_loss" in vars(cls))
            if owner.__module__.startswith("trl.") and owner.__name__ != "SFTTrainer":
                raise TrueShardValueError(f"cp_size: {owner.__name__}'s loss is of whole sequences; set it to 1")
            own = {key: getattr(self, key, None) for key in ("label_smoother", "compute_loss_func")}
            if key := next((key for key, function in own.items() if function is not None), None):
                raise TrueShardValueError(f"{key}: it would shift labels that cp_size has shifted; leave one out")
            inputs = split_sequence(model, inputs)
        return nullcontext, inputs

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        if self.get_cp_size() > 1 and not prediction_loss_only:
            raise ValueError("prediction_loss_only: with context ranks each has a part of a sequence; set it to True")
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    # What is written

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model's Hugging Face directory. Collective."""
        is_checkpoint = _internal_call and output_dir is not None  # not for push_to_hub()
        self._writes_optimizer = is_checkpoint and not self.args.save_only_model
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._writes_optimizer = False

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        self._shard_now()
        content = {"optimizer": self.optimizer.optimizer} if self._writes_optimizer else {}
        save_into(folder, model=self.model, base=False, **content)
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:  # the optimizer is in the checkpoint already
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # What is read

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if runtime_of(names.unwrap(self.model)) is not None:
            load(resume_from_checkpoint, model=self.model, rng=False)
        elif not _is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # a plain trainer's; and what TRL keeps beside it
        if checkpoint is None or not _is_ours(checkpoint):
            return
        manifest = open_catalogue(checkpoint).manifest
        has_optimizer = manifest is not None and bool(manifest.optimizers)
        content = {"optimizer": self.optimizer.optimizer} if has_optimizer else {}
        load(checkpoint, model=self.model, rng=False, **content)
        schedule = Path(checkpoint, SCHEDULER_NAME)
        if has_optimizer and schedule.is_file():
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))

    def _load_best_model(self) -> None:
        load(self.state.best_model_checkpoint, model=self.model, rng=False)


def _is_ours(checkpoint: str) -> bool:
    return Path(checkpoint, MANIFEST).is_file()
