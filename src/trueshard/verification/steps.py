"""``train.verify_every``: a microbatch of a run computed by all ranks, sharded, and by one rank without sharding.

- Before a step, the first microbatch of rank 0 goes through the sharded model on every rank, so that the reduced
  gradient is its own; and on rank 0 through a copy as before sharding, with the same values, dtypes and random numbers.
- The copy computes again from parameters a rounding error away: so far loss and gradients may be apart.
- At the first difference both compute once more, and the first module that differs is found, as by ``verify``.
- Weights and gradients of the copy rest on the host; on an accelerator, what its backward needs waits there, too.
- The run has the bits that it has without: gradients, buffers, attributes and generators are put back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from trueshard import _torch
from trueshard.checkpoint.state import random_state, set_random_state
from trueshard.errors import UserError, explained, one_line
from trueshard.machine import memory_of_process
from trueshard.model import names
from trueshard.sharding.activation_checkpointing import values_of_buffers, write_buffers
from trueshard.sharding.copying import copy_modules
from trueshard.sharding.engine import sharded
from trueshard.sharding.gathering import cast_as_units_do, plain_attributes
from trueshard.text import logger, size
from trueshard.train.callbacks import Callback
from trueshard.train.reducing import over_ranks
from trueshard.train.trainer import Trainer
from trueshard.verification import compare
from trueshard.verification.compare import FACTOR, FLOORS, Named, TensorStore, Tolerances
from trueshard.verification.locating import Distances, distances, located_on, watch
from trueshard.verification.modules import Measure, Writer
from trueshard.verification.subjects import TrainingSetup


class StepVerifier(Callback):
    """Verifies every ``every``-th step before it is taken; adds what it finds to the step's record."""

    def __init__(self, every: int, folder: Path) -> None:
        self._every, self._folder, self._record = every, folder / "verify", dict[str, Any]()
        self._told = False

    def on_start(self, trainer: Trainer) -> None:
        """Raise `UserError`, on every rank, for a model that one rank cannot hold or compute."""
        self._trainer, own = trainer, getattr(trainer.loss, "__dict__", {}).values()
        self._loss: Any = copy.deepcopy(trainer.loss, {id(part): part for part in own if isinstance(part, nn.Module)})
        if any(isinstance(module, nn.SyncBatchNorm) for module in trainer.model.modules()):
            raise UserError("train.verify_every computes on one rank alone, and nn.SyncBatchNorm on all; remove it")
        with explained("train.verify_every", "remove it"):
            _copied(trainer.model, trainer.device)
        needed = sum(p.numel() * p.itemsize * (1 + 2 * p.requires_grad) for p in trainer.model.parameters())
        free = min(psutil.virtual_memory().available, memory_of_process(1))
        if over_ranks([trainer.rank == 0 and needed > free], trainer.device)[0]:
            what = f"the whole model and its gradients take {size(needed)} of rank 0's main memory, which has less"
            raise UserError(f"train.verify_every: {what}; remove it, or run `trueshard verify` with --layers")

    def on_batch(self, trainer: Trainer, microbatches: list[Any]) -> None:
        if (trainer.step + 1) % self._every == 0:
            began, state = time.perf_counter(), random_state()
            batch = next((batch for batch in microbatches if self._loss.count(batch)), None)
            batch = _from_first(_torch.to_device(batch, "cpu"))
            lacking: dict[str, Any] = {"verify_failed": "no microbatch of rank 0 has a target"}
            self._record = lacking if batch is None else self._verified(batch)
            set_random_state(*state)
            self._record["verify_seconds"] = time.perf_counter() - began

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        record |= self._record
        record["seconds"] -= self._record.get("verify_seconds", 0.0)
        self._record = {}

    def state_dict(self) -> dict[str, Any]:
        return {"told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._told = state["told"]

    def _verified(self, batch: Any) -> dict[str, Any]:
        """Return what goes into the record of the step. Collective."""
        trainer, self._failure = self._trainer, ""
        model = _copied(trainer.model, trainer.device) if trainer.rank == 0 else None
        self._plain = None if model is None else TrainingSetup(model, [], self._loss, trainer.scaler)
        values, again = self._computed(batch), self._computed(batch, is_shaken=True)
        both = values.keys() & again.keys()
        noise = {("gradients", 1, name): compare.distance(again[name], values[name])[1] for name in both}
        found = self._distances(batch, values, self._tolerances(noise))
        wrong = any(not apart <= allowed for apart, allowed, _ in found.values())
        loss, largest = found.pop("", (0.0,))[0], max((apart for apart, *_ in found.values()), default=0.0)
        failure, wrong, loss, largest = _from_first((self._failure, wrong, loss, largest))
        record = {"verified": not wrong, "verify_loss": loss, "verify_gradients": largest}
        record = {"verify_failed": failure} if failure else record
        if (failure or wrong) and not self._told:
            told = _from_first(f"one rank cannot compute it: {failure}" if failure else self._first(batch, values))
            record["verify_first"], self._told = told, True
            if trainer.rank == 0:
                logger.warning("train.verify_every, step %d, said once: %s", trainer.step + 1, told)
        self._plain = None
        return record

    def _first(self, batch: Any, expected: Named) -> str:
        """Return where the sharded model leaves the plain one first, in words. Collective."""
        runtime, store = sharded(self._trainer.model), TensorStore(self._folder)
        # Hooks of modules are not called in compiled code.
        with torch.compiler.set_stance("force_eager" if runtime.plan.compile else "default"):
            self._computed(batch, Writer(store, 1))
            noise = Measure(store, 1)
            self._computed(batch, noise, is_shaken=True)
            tolerances, measure = _from_first(self._tolerances(noise.noise)), Measure(store, 1)
            sink = None if "context" in runtime.axes.along else measure  # its modules return parts
            found = self._distances(batch, expected, tolerances, sink)
        found.pop("", None)
        source = f": {FACTOR:g} times what rounding errors change of it"
        result = located_on(measure, tolerances, False, found, self._trainer.step + 1, source)
        shutil.rmtree(self._folder, ignore_errors=True)
        others = "and nothing does without compiling" if runtime.plan.compile else "and no module does, when run again"
        return str(result or f"the loss or a gradient differs, {others}")

    def _tolerances(self, noise: dict[tuple[str, int, str], float]) -> Tolerances:
        parameters = [] if self._plain is None else self._plain.model.parameters()
        floors = [FLOORS.get(parameter.dtype, 0.0) for parameter in parameters if parameter.requires_grad]
        return Tolerances(noise, max(floors, default=FLOORS[torch.float32]), {})

    def _distances(self, batch: Any, expected: Named, tolerances: Tolerances, sink: Any = None) -> Distances:
        """Compute sharded; return how far loss ("") and gradients are from those ``expected`` here. Collective."""
        trainer = self._trainer
        setup = TrainingSetup(trainer.model, [], self._loss, trainer.scaler, sharded(trainer.model).plan)
        with undisturbed(trainer.model):
            values = self._results(setup, batch, sink)
            return distances(values, expected, expected.__getitem__, tolerances, 1)

    def _computed(self, batch: Any, sink: Any = None, *, is_shaken: bool = False) -> Named:
        """Compute on rank 0, perhaps a rounding error away; return loss ("") and gradients there. Collective."""
        plain, random = self._plain, torch.Generator().manual_seed(0)
        own = {name: t for name, *_, t in names.named_tensors(plain.model, "parameters")} if plain else {}
        for name, value in compare.gathered_tensors(dict(self._trainer.model.named_parameters())):
            if is_shaken and name in own and own[name].requires_grad:
                value = value.clone()
                compare.shake(value, torch.promote_types(value.dtype, torch.float32), random)
            if name in own:
                own[name].data.copy_(value)
        if plain is None:
            return {}
        is_host = self._trainer.device.type == "cpu"
        waiting = contextlib.nullcontext() if is_host else torch.autograd.graph.save_on_cpu()
        try:
            with undisturbed(plain.model), waiting:
                return self._results(plain, batch, sink)
        except Exception as error:  # the other ranks wait for this one
            self._failure = f"{type(error).__name__}: {one_line(error)}"
            return {}

    def _results(self, setup: TrainingSetup, batch: Any, sink: Any) -> Named:
        loss = torch.tensor(watch(setup, sink, [(0, 0, batch)], self._trainer.step, 0), dtype=torch.float64)
        return {"": loss} | compare.values_of("gradients", setup.model)


def _from_first(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Begin without gradients; afterwards gradients, buffers and plain attributes are what they were."""
    modules = list(names.unwrap(model).modules())
    gradients, buffers = [(p, p.grad) for p in model.parameters()], values_of_buffers(modules[0])
    attributes = [(module, copy.deepcopy(plain_attributes(module))) for module in modules]
    model.zero_grad()
    try:
        yield
    finally:
        write_buffers(buffers)
        for module, values in attributes:
            module.__dict__.update(values)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _copied(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy as before sharding, in the compute dtype, whose weights, without values, rest on the host."""
    runtime = sharded(model)

    def made(parameter: torch.Tensor) -> nn.Parameter:
        dtype = runtime.compute_dtype if parameter.is_floating_point() else None
        return nn.Parameter(torch.empty(parameter.shape, dtype=dtype or parameter.dtype), parameter.requires_grad)

    result: nn.Module = copy_modules(runtime, runtime.root, made, {})
    modules = dict(names.named_modules(result))
    for module in modules.values():
        own: Any = _torch.own_parameters(module)
        resting = {name: parameter for name, parameter in own.items() if parameter is not None}
        module.register_forward_pre_hook(functools.partial(_fetch, own, resting, device))
        module.register_forward_hook(functools.partial(_fetch, own, resting, "cpu"), always_call=True)
    cast_as_units_do(runtime, modules)
    return result


def _fetch(own: Any, resting: Any, device: Any, *_: Any) -> None:
    own.update({name: parameter.to(device) for name, parameter in resting.items()})
