"""Parts that the strategies for Lightning's ``Trainer`` and for ``Fabric`` have in common: axes, sharding, checkpoints.

A checkpoint is a folder that ``trueshard.save`` writes: models and optimizers, at any number of ranks. The rest of what
Lightning saves (loops, callbacks, schedulers) is pickled by torch, as Lightning does it, into a tensor of the folder:
it appears together with the weights or not at all.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import trueshard
from trueshard import _torch, distributed
from trueshard.axes import sizes_of
from trueshard.checkpoint.catalogue import is_url
from trueshard.options import options_of
from trueshard.sharding.hooks import runtime_of

ENTRY = "lightning"
"""Name of the entry of a checkpoint that holds what Lightning saves beside models and optimizers."""
BASE = ("cluster_environment", "process_group_backend", "timeout", "start_method")
"""Arguments of Lightning's ``DDPStrategy`` that ours take, too."""
SHARDED_WITH = "_trueshard_strategy"
"""Attribute of a module that a strategy sharded: the arguments of its ``shard()``."""


def installed(*packages: str) -> Any:
    """Import that one of two distributions of Lightning which the program has imported, or else that is installed."""
    first = [package for package in packages if package in sys.modules]
    for package in (*first, *packages):
        if importlib.util.find_spec(package.partition(".")[0]) and importlib.util.find_spec(package):
            return importlib.import_module(package)
    raise ModuleNotFoundError(
        f"{packages[-1]} is not installed; pip install {packages[-1].replace('_', '-')}", name=packages[-1]
    )


def made_on_cpu(precision: AbstractContextManager[Any], empty: bool | None) -> AbstractContextManager[Any]:
    """Return a context in which modules are made on the CPU, or, if ``empty``, without memory."""
    stack = ExitStack()
    if empty:
        stack.enter_context(torch.device("meta"))
    stack.enter_context(precision)
    return stack


class ShardsModules:
    """Mixin for a ``DDPStrategy`` of either: ``shard()`` in the place of DistributedDataParallel.

    The process group, its launcher and the collectives are those of the base class.
    """

    def __init__(
        self, *, plan: Any = None, mesh: Any = None, replicate: int = 1, weights_only: bool | None = None, **words: Any
    ) -> None:
        base = {name: words.pop(name) for name in BASE if name in words}
        options = options_of("shard", words)  # type: ignore[arg-type]
        options.check_alone(plan)
        if mesh is not None and replicate > 1:
            raise ValueError("mesh= says how many copies there are: leave out replicate")
        if options.offload == "cpu" and torch.cuda.is_available():  # what rests on the CPU is reduced there
            base.setdefault("process_group_backend", "cpu:gloo,cuda:nccl")
        super().__init__(**base)
        self._how, self._mesh, self._replicate, self._weights_only = (
            options if plan is None else plan,
            mesh,
            replicate,
            weights_only,
        )
        self._arguments: dict[str, Any] = {"plan": plan, **words}
        self._axes: Any = None

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        if type(self.checkpoint_io).__name__ != "TorchCheckpointIO":  # type: ignore[attr-defined]
            raise TypeError("a checkpoint is written by trueshard.save(): leave out the CheckpointIO")
        if self._axes is None:
            if self._replicate > 1:
                self._mesh = distributed.replicated_mesh(self._replicate, sizes_of(self._how))
            self._axes = distributed.ensure_axes(self._mesh, self._how)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return which part of the samples this rank reads: ranks that share matrices or sequences read the same."""
        if self._axes is None:
            return super().distributed_sampler_kwargs  # type: ignore[misc]
        number, count = self._axes.reader
        return {"num_replicas": count, "rank": number}

    def shard(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Shard ``module``, unless it is; optimizers that were made since are bound at their first step."""
        used = {**self._arguments, "replicate": self._replicate}
        if runtime_of(module) is None:
            trueshard.shard(module, *optimizers, mesh=self._axes.all, **self._arguments)
            module.__dict__[SHARDED_WITH] = used
        elif module.__dict__.get(SHARDED_WITH, used) != used:
            raise ValueError(
                f"this {type(module).__name__} was sharded before, by a strategy with other arguments: "
                "give both the same, or make the module anew"
            )


def save_folder(strategy: Any, path: str | os.PathLike[str], rest: Mapping[str, Any], **content: Any) -> None:
    """Save ``content``, models and optimizers, and pickle ``rest`` beside them, in the place of what is at ``path``.

    Collective. The rest is rank 0's. What was at ``path`` is removed once the new folder is complete.
    """
    path = str(strategy.broadcast(path))
    for key, value in rest.items():
        if any(isinstance(tensor, DTensor) for tensor in _torch.tensors_in(value)):
            raise TypeError(
                f"{key!r} holds a sharded tensor, which is of no use in a pickle: make it part of the module's own "
                "state_dict(), or gather it by full_tensor() on all ranks"
            )
    buffer = io.BytesIO()
    torch.save(dict(rest), buffer)
    content[ENTRY] = torch.frombuffer(bytearray(strategy.broadcast(buffer.getvalue())), dtype=torch.uint8)
    exists, new, before = False, f"{path}.new", f"{path}.old"
    if strategy.is_global_zero and is_url(path):
        strategy.checkpoint_io.remove_checkpoint(path)
    elif strategy.is_global_zero:
        exists = os.path.lexists(path)
        shutil.rmtree(new, ignore_errors=True)  # of a save that was killed
    exists = strategy.broadcast(exists)
    trueshard.save(new if exists else path, **content)
    if exists and strategy.is_global_zero:
        os.rename(path, before)
        os.rename(new, path)
        strategy.checkpoint_io.remove_checkpoint(before)
    strategy.barrier()


def unpack(path: str, content: Mapping[str, Any], weights_only: bool | None) -> dict[str, Any]:
    """Return what ``save_folder`` pickled."""
    if ENTRY not in content:
        raise ValueError(
            f"{path} holds no state of Lightning, only weights: load them by trueshard.load({path!r}, model=module), "
            "and leave out the path here"
        )
    data = io.BytesIO(content[ENTRY].numpy().tobytes())
    return dict(torch.load(data, map_location="cpu", weights_only=weights_only))
