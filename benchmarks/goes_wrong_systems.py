"""The systems of ``benchmarks.goes_wrong``: each shards, saves and resumes in its own public way.

- Whether the optimizer is made before sharding or after, and how momenta that it already has get into the sharded one,
  is as each system documents it. Units, and what is freed after forward, are each system's defaults.
- One process that shards nothing is a system, too: the others' results are held against its.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from benchmarks.llama import loss_of, shard_by_hand
from benchmarks.peers import OURS
from benchmarks.peers.accelerated import accelerators
from benchmarks.peers.fabric import fabric, parallel


@dataclass(frozen=True)
class Job:
    """A model and its optimizer, as a user has them on one device."""

    build: Callable[[], Any]
    """A new whole model of transformers, the same at every call."""
    optimizer: Callable[[Any], Optimizer]
    """An optimizer for the model, sharded or not."""
    adapt: Callable[[Any], object] = lambda model: None
    """Changes the model in place after it is built, or, where it is loaded sharded, after that: freezes a part."""
    begin: Callable[[Any, Optimizer], object] | None = None
    """Trains model and optimizer on one device before they are sharded."""

    def model(self) -> Any:
        """The whole model, built and adapted."""
        model = self.build()
        self.adapt(model)
        return model

    def begun(self) -> tuple[Any, Optimizer]:
        """The whole model and its optimizer, trained on one device if the job says so."""
        model = self.model()
        optimizer = self.optimizer(model)
        if self.begin is not None:
            self.begin(model, optimizer)
        return model, optimizer


class System(ABC):
    """Holds a job's model and optimizer once ``start`` or ``resume`` returned. Every method is collective."""

    model: Any
    """To be called: what the system made of the module."""
    optimizer: Any

    @property
    def module(self) -> Any:
        """The user's own module."""
        return self.model

    @abstractmethod
    def start(self, job: Job, folder: Path) -> None:
        """Shard what the job makes; ``folder``, the same on all ranks, takes files that are needed on the way."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Save model and optimizer."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Load what ``save`` wrote into model and optimizer."""

    def resume(self, job: Job, folder: Path, path: Path) -> None:
        """Shard what the job makes, and load what ``save`` wrote."""
        self.start(job, folder)
        self.load(path)

    def differentiate(self, batch: torch.Tensor, share: float = 1.0) -> None:
        """Add the gradient of ``share`` of the mean loss over ``batch``, int64 ``[sequences, tokens]``."""
        self.backward(loss_of(self.model, batch) * share)

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate ``loss``, a scalar."""
        loss.backward()

    def clip(self, largest: float, kind: float) -> torch.Tensor:
        """Clip gradients to a norm of ``largest``, of the ``kind`` 2 or infinity; return the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest, kind)


class OneProcess(System):
    """Nothing is sharded."""

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts
        """Microbatches that each batch is cut into: the same sums in another order."""

    def start(self, job: Job, folder: Path) -> None:
        self.model, self.optimizer = job.begun()

    def save(self, path: Path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def differentiate(self, batch: torch.Tensor, share: float = 1.0) -> None:
        for part in batch.chunk(self.parts):
            super().differentiate(part, share * len(part) / len(batch))


class TrueShard(System):
    """``trueshard.shard`` of a model and its optimizer, ``trueshard.save`` and ``trueshard.load``."""

    def start(self, job: Job, folder: Path) -> None:
        import trueshard

        self.model, self.optimizer = job.begun()
        trueshard.shard(self.model, self.optimizer)

    def save(self, path: Path) -> None:
        import trueshard

        trueshard.save(path, model=self.model, optimizer=self.optimizer)

    def load(self, path: Path) -> None:
        import trueshard

        trueshard.load(path, model=self.model, optimizer=self.optimizer)

    def clip(self, largest: float, kind: float) -> torch.Tensor:
        import trueshard

        return trueshard.clip_grad_norm_(self.model.parameters(), largest, kind)


class ByHand(System):
    """``fully_shard``, then a new optimizer, into which DCP's functions put momenta; DCP saves and loads."""

    def start(self, job: Job, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        whole, before = job.begun()
        momenta = get_optimizer_state_dict(whole, before) if job.begin is not None else None
        self.model = self.shard(whole, job, folder)
        self.optimizer = job.optimizer(self.model)
        if momenta is not None:
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(self.model, self.optimizer, momenta, options=options)

    def shard(self, whole: Any, job: Job, folder: Path) -> Any:
        """A sharded model with the values of ``whole``."""
        shard_by_hand(whole, dist.get_world_size())
        return whole

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=path)
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class Transformers(ByHand):
    """``from_pretrained`` with ``DistributedConfig``, and its own functions to save and load."""

    def shard(self, whole: Any, job: Job, folder: Path) -> Any:
        if dist.get_rank() == 0:
            whole.save_pretrained(folder / "pretrained")
        dist.barrier()
        return self._loaded(type(whole), folder / "pretrained", job)

    def _loaded(self, kind: Any, folder: Path, job: Job) -> Any:
        from transformers.distributed import DistributedConfig

        layout = DistributedConfig(fsdp_size=dist.get_world_size())
        model = kind.from_pretrained(folder, distributed_config=layout, dtype="auto").train()
        job.adapt(model)
        return model

    def save(self, path: Path) -> None:
        from transformers.distributed import save_optimizer_distributed

        self.model.save_pretrained(path / "model", distributed_checkpoint=True)
        save_optimizer_distributed(self.model, self.optimizer, str(path / "optimizer"))

    def resume(self, job: Job, folder: Path, path: Path) -> None:
        from transformers.distributed import load_optimizer_distributed

        self.model = self._loaded(type(job.build()), path / "model", job)
        self.optimizer = job.optimizer(self.model)
        load_optimizer_distributed(self.model, self.optimizer, str(path / "optimizer"))


class Accelerate(System):
    """``Accelerator.prepare`` of a model and its optimizer, ``save_state`` and ``load_state``."""

    def start(self, job: Job, folder: Path) -> None:
        self._accelerator, _ = accelerators(ram_efficient=False)
        self.model, self.optimizer = self._accelerator.prepare(*job.begun())

    def save(self, path: Path) -> None:
        self._accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self._accelerator.load_state(str(path))

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def clip(self, largest: float, kind: float) -> torch.Tensor:
        norm: torch.Tensor = self._accelerator.clip_grad_norm_(self.model.parameters(), largest, kind)
        return norm


class Fabric(System):
    """Lightning Fabric's ``ModelParallelStrategy``, then a new optimizer; ``load`` takes a whole checkpoint, too."""

    def start(self, job: Job, folder: Path) -> None:
        self._fabric = fabric(parallel("default"))
        whole, before = job.begun()
        if job.begin is not None:
            if dist.get_rank() == 0:
                torch.save({"model": whole.state_dict(), "optimizer": before.state_dict()}, folder / "whole")
            dist.barrier()
        self.model = self._fabric.setup_module(whole)
        self.optimizer = self._fabric.setup_optimizers(job.optimizer(self.model))
        if job.begin is not None:
            self.load(folder / "whole")

    @property
    def module(self) -> Any:
        return self.model.module

    def save(self, path: Path) -> None:
        self._fabric.save(path, {"model": self.model, "optimizer": self.optimizer})

    def load(self, path: Path) -> None:
        self._fabric.load(path, {"model": self.model, "optimizer": self.optimizer})

    def backward(self, loss: torch.Tensor) -> None:
        self._fabric.backward(loss)

    def clip(self, largest: float, kind: float) -> torch.Tensor:
        norm: torch.Tensor = self._fabric.clip_gradients(
            self.model, self.optimizer, max_norm=largest, norm_type=kind, error_if_nonfinite=False
        )
        return norm


SYSTEMS: Mapping[str, Callable[[], System]] = {
    OURS: TrueShard,
    "by hand": ByHand,
    "Accelerate": Accelerate,
    "transformers": Transformers,
    "Lightning Fabric": Fabric,
}
"""Each of a sharded run."""

ALONE: Mapping[str, Callable[[], System]] = {
    "one process": OneProcess,
    "one process, microbatches": lambda: OneProcess(parts=2),
}
"""What they are held against, and how far off that is what adds up the same in another order."""
