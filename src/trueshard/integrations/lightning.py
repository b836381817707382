"""A strategy for ``Trainer`` of PyTorch Lightning.

    from trueshard.integrations.lightning import TrueShardStrategy

    trainer = Trainer(devices=8, strategy=TrueShardStrategy(mixed_precision="bf16"))

The module is sharded with the optimizers of ``configure_optimizers``, in place, so it keeps its class and its names.
``[Note: Steps are passes]`` Under automatic optimization ``training_step`` is one pass of the model, whatever it calls;
under manual optimization it holds backwards and steps of optimizers itself, so each module that it calls is a pass. The
other methods that Lightning calls (``configure_optimizers``, ``on_train_batch_end``) are none, whatever they read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import trueshard
from trueshard.checkpoint.catalogue import Catalogue, is_url, open_catalogue
from trueshard.checkpoint.format import Manifest
from trueshard.files import replacing
from trueshard.integrations.lightning_strategies import ShardsModules, installed, made_on_cpu, save_folder, unpack
from trueshard.sharding.hooks import runtime_of
from trueshard.sharding.methods import NO_PASSES

pl: Any = installed("lightning.pytorch", "pytorch_lightning")
Base: Any = pl.strategies.DDPStrategy
STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})


class TrueShardStrategy(ShardsModules, Base):
    """Shards the module of a ``Trainer`` and its optimizers, and saves checkpoints that load at any number of ranks.

    Args:
        plan, mesh, options: as for ``trueshard.shard``.
        replicate: copies of the model, each sharded over the rest of the ranks.
        weights_only: of ``torch.load``, for what Lightning pickles; ``Trainer.fit`` does not pass its own. Objects in
            hyperparameters need False, which runs what is in them.
        cluster_environment, process_group_backend, timeout, start_method: as for Lightning's ``DDPStrategy``.
    """

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False
    """True if what was loaded is a file, which another strategy wrote."""
    _state: Mapping[str, Any] | None = None

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, fits = self.lightning_module, trainer.state.fn == "fit"
        if module._compiler_ctx is not None:
            raise ValueError("the module was compiled whole: give it as it is, and compile=True to the strategy")
        if runtime_of(module) is None:
            if fits and self._layer_sync is not None:
                module = self._layer_sync.apply(module)
            module = self.precision_plugin.convert_module(module)
        optimizers = []
        if fits:
            self.setup_optimizers(trainer)
            # Lightning's stand-in for no optimizer holds a tensor that is not the module's.
            optimizers = [o for o in self.optimizers if type(o).__name__ != "_MockOptimizer"]
        self._shard_module(module, optimizers)
        self.setup_precision_plugin()

    def _shard_module(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        steps = STEPS if module.automatic_optimization else STEPS - {"training_step"}
        module.__dict__[NO_PASSES] = frozenset(dir(pl.LightningModule)) - steps  # [Note: Steps are passes]
        self.shard(module, *optimizers)
        runtime = runtime_of(module)
        assert runtime is not None
        runtime.batch_trial = None  # it would call a step of a copy, which logs to this Trainer
        metrics: Any = sys.modules.get("torchmetrics")
        for part in module.modules():
            if isinstance(part, pl.LightningModule):
                part._device = self.root_device
            elif metrics and isinstance(part, metrics.Metric):  # whose states are no buffers
                part.to(self.root_device)

    def model_to_device(self) -> None:
        """Do nothing: ``shard()`` moves unit by unit, so that the whole module is never on one device."""

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make modules on the CPU, or with ``empty_init`` without memory, for a checkpoint to fill."""
        return made_on_cpu(self.precision_plugin.tensor_init_context(), empty_init)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        return trueshard.accumulate(self.lightning_module, last=False)

    def teardown(self) -> None:
        """Leave the module sharded and where it is: ``trainer.test(module)`` goes on with it."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Checkpoints

    def full_state_dict(self) -> dict[str, Any]:
        """Return the module's whole state dict in host memory on rank 0, and an empty one elsewhere. Collective."""
        whole: dict[str, Any] = {}
        for name, value in self.lightning_module.state_dict().items():
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            if self.is_global_zero:
                whole[name] = tensor.cpu() if isinstance(tensor, torch.Tensor) else tensor
        return whole

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the sharded state dict, as it goes into a checkpoint; ``full_state_dict`` gathers it."""
        state = self.lightning_module.state_dict()
        self._state = dict(state)
        return state

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return nothing: ``save_checkpoint`` saves the optimizer itself."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a folder; Lightning's own state is rank 0's, and is pickled in it. Collective."""
        if storage_options is not None:
            raise TypeError("storage_options: a checkpoint of TrueShardStrategy is written by trueshard.save()")
        rest = dict(checkpoint)
        state, before = rest.pop("state_dict"), self._state or {}
        if changed := [name for name in {**before, **state} if state.get(name) is not before.get(name)]:
            raise ValueError(
                f"on_save_checkpoint changed {changed[0]!r} in checkpoint['state_dict'], but the module is saved: "
                "override the module's state_dict(), or save the tensor under a key of its own"
            )
        self._state = None
        optimizers = self._named_optimizers() if rest.pop("optimizer_states", None) else None
        save_folder(self, filepath, rest, model=self.lightning_module, optimizer=optimizers)

    def _named_optimizers(self) -> Any:
        named = {str(number): optimizer for number, optimizer in enumerate(self.optimizers)}
        return named if len(named) > 1 else named.get("0")

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder into module and optimizers; of a file, which another strategy wrote, return all. Collective."""
        path, module = str(self.broadcast(checkpoint_path)), self.lightning_module
        weights_only = self._weights_only if weights_only is None else weights_only
        self.lightning_restore_optimizer = not is_url(path) and os.path.isfile(path)
        if self.lightning_restore_optimizer:
            return super().load_checkpoint(path, weights_only)
        fits = module.trainer.state.fn == "fit"
        optimizers = self._named_optimizers() if fits else None
        content = trueshard.load(path, model=module, optimizer=optimizers, strict=module.strict_loading, rng=fits)
        return unpack(path, content, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.lightning_restore_optimizer:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"] or ()  # a strategy may write none
        for optimizer, state in zip(self.optimizers, states, strict=bool(states)):
            optimizer.load_state_dict(state)


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str], weights_only: bool | None = None) -> None:
    """Write the folder that a strategy saved as the one file that Lightning's own strategies write and load.

    ``LightningModule.load_from_checkpoint(file)`` reads it, and ``Trainer.fit(ckpt_path=file)`` with any strategy.
    Takes one process, with memory for all of it.

    Args:
        folder: a checkpoint of ``TrueShardStrategy``.
        file: made or replaced.
        weights_only: as for ``torch.load``.

    Raises:
        DamagedCheckpoint: bytes are not those that were saved.
        ValueError: the folder was not saved by the strategy.
    """
    trueshard.check(folder)
    catalogue = open_catalogue(folder)
    manifest = catalogue.manifest or Manifest()
    entries = {key: catalogue.value(value) for key, value in manifest.more.items()}
    checkpoint = unpack(str(folder), entries, weights_only)
    state = checkpoint["state_dict"] = catalogue.value(manifest.models["model"]["extra"])
    for key, entry in manifest.tensors.items():
        if key.startswith("model/"):
            state |= dict.fromkeys(entry.names, catalogue.full_tensor(key))
    if manifest.optimizers:
        records = map(manifest.optimizers.__getitem__, sorted(manifest.optimizers, key=len))
        checkpoint["optimizer_states"] = [_as_torch(catalogue, record) for record in records]
    with replacing(Path(file)) as scratch:
        torch.save(checkpoint, scratch)


def _as_torch(catalogue: Catalogue, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved optimizer as its own ``state_dict()``: parameters are numbers, in the order of its groups."""
    number_of: dict[str, int] = {}
    groups = []
    for group in record["groups"]:
        members = [number_of.setdefault(name, len(number_of)) for name in group["params"]]
        groups.append({**catalogue.value(group["settings"]), "params": members})
    state = {number_of.get(name, name): catalogue.value(value) for name, value in record["state"].items()}
    return {"state": state, "param_groups": groups}
