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
from torch import nn

from trueshard import _torch
from trueshard.checkpoint.state import random_state, set_random_state
from trueshard.errors import UserError, explained, one_line
from trueshard.machine import memory_of_process
from trueshard.model import names
from trueshard.sharding.activation_checkpointing import values_of_buffers, write_buffers
from trueshard.sharding.engine import sharded
from trueshard.sharding.gathering import plain_values, unsharded_copy
from trueshard.text import logger, size
from trueshard.train.callbacks import Callback
from trueshard.train.rl.ranks import awaited, on_first_rank
from trueshard.train.trainer import Trainer
from trueshard.verification import compare
from trueshard.verification.compare import FACTOR, FLOORS, Comparison, Named, TensorStore, Tolerances
from trueshard.verification.locating import distances, located_on, watch
from trueshard.verification.modules import Measure
from trueshard.verification.subjects import TrainingSetup


class StepVerifier(Callback):
    """Verifies every ``every``-th step before it is taken; adds what it finds to the step's record."""

    def __init__(self, every: int, folder: Path) -> None:
        self._every, self._folder, self._told, self._record = every, folder / "verify", False, dict[str, Any]()

    def on_start(self, trainer: Trainer) -> None:
        """Raise `UserError`, on every rank, for a model that one rank cannot hold or compute."""
        self._trainer, self._runtime = trainer, sharded(trainer.model)
        own = [part for part in getattr(trainer.loss, "__dict__", {}).values() if isinstance(part, nn.Module)]
        self._loss: Any = copy.deepcopy(trainer.loss, {id(part): part for part in own})
        if any(isinstance(module, nn.SyncBatchNorm) for module in trainer.model.modules()):
            raise UserError("train.verify_every computes on one rank alone, and nn.SyncBatchNorm on all; remove it")
        needed = sum(p.numel() * p.itemsize * (1 + 2 * p.requires_grad) for p in trainer.model.parameters())
        if needed > on_first_rank(lambda: min(psutil.virtual_memory().available, memory_of_process(1))):
            what = f"the whole model and its gradients take {size(needed)} of rank 0's main memory, which has less"
            raise UserError(f"train.verify_every: {what}; remove it, or run `trueshard verify` with --layers")
        with explained("train.verify_every", "remove it"):
            self._copied()

    def on_batch(self, trainer: Trainer, microbatches: list[Any]) -> None:
        if (trainer.step + 1) % self._every == 0:
            began, state = time.perf_counter(), random_state()
            batch = next((batch for batch in microbatches if self._loss.count(batch)), None)
            self._record = self._verified(on_first_rank(lambda: _torch.to_device(batch, "cpu")))
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
        if batch is None:
            return {"verify_failed": "no microbatch of rank 0 has a target"}
        plain = self._copied() if self._trainer.rank == 0 else None
        try:
            values, again = self._computed(plain, batch), self._computed(plain, batch, is_shaken=True)
        except Exception as error:  # on every rank, if rank 0 cannot compute
            record: dict[str, Any] = {"verify_failed": one_line(error)}
            message = f"one rank cannot compute it: {one_line(error)}"
        else:
            both = values.keys() & again.keys()  # a rounding error may send an expert no token
            noise = {("gradients", 1, name): compare.distance(again[name], values[name])[1] for name in both}
            compared = self._distances(batch, values, self._tolerances(noise))
            sizes = max((one.relative for one in compared), default=0.0), not all(one.held for one in compared)
            largest, wrong = on_first_rank(lambda: sizes)
            record = {"verified": not wrong, "verify_difference": largest}
            message = self._first(plain, batch, values) if wrong and not self._told else ""
        if message and not self._told:
            record["verify_first"], self._told = message, True
            if self._trainer.rank == 0:
                logger.warning("train.verify_every, step %d, said once: %s", self._trainer.step + 1, message)
        return record

    def _first(self, plain: nn.Module | None, batch: Any, expected: Named) -> str:
        """Return where the sharded model leaves the plain one first, in words. Collective."""
        compiles, store = self._runtime.plan.compile, TensorStore(self._folder)
        # Hooks of modules are not called in compiled code.
        with torch.compiler.set_stance("force_eager" if compiles else "default"):
            self._computed(plain, batch, lambda at, tensor: store.write(at.side, 1, at.key, tensor))
            noise = Measure(store, 1)
            self._computed(plain, batch, noise, is_shaken=True)
            tolerances = on_first_rank(lambda: self._tolerances(noise.noise))
            measure = Measure(store, 1, tolerances)
            sink = None if "context" in self._runtime.axes.along else measure  # its modules return parts
            compared = self._distances(batch, expected, tolerances, sink)
        source = f": {FACTOR:g} times what rounding errors change of it"
        result = located_on(measure, [one for one in compared if one.name], self._trainer.step + 1, source)
        shutil.rmtree(self._folder, ignore_errors=True)
        others = "and nothing does without compiling" if compiles else "and no module does, when run again"
        return str(result or f"the loss or a gradient differs, {others}")

    def _tolerances(self, noise: dict[tuple[str, int, str], float]) -> Tolerances:
        computed = {self._runtime.compute_dtype or p.dtype for p in self._trainer.model.parameters() if p.requires_grad}
        return Tolerances(noise, max(FLOORS.get(dtype, FLOORS[torch.float32]) for dtype in computed), {})

    def _distances(self, batch: Any, expected: Named, tolerances: Tolerances, sink: Any = None) -> list[Comparison]:
        """Compute sharded; return how far loss ("") and gradients are from those ``expected`` here. Collective."""
        with undisturbed(self._trainer.model):
            values = self._results(self._trainer.model, batch, sink)
            return distances(values, expected, expected.__getitem__, tolerances, 1)

    def _computed(self, plain: nn.Module | None, batch: Any, sink: Any = None, *, is_shaken: bool = False) -> Named:
        """Compute on rank 0; return loss ("") and gradients there. Collective.

        ``is_shaken``: from parameters a rounding error away from those of the call before.
        """
        result: Named = {}
        own = {} if plain is None else {name: tensor for name, *_, tensor in names.named_tensors(plain, "parameters")}
        parameters = dict(self._trainer.model.named_parameters())
        if is_shaken:
            random = torch.Generator().manual_seed(0)
            for parameter in [own[name] for name in parameters if name in own]:
                if parameter.requires_grad:
                    compare.shake(parameter, torch.promote_types(parameter.dtype, torch.float32), random)
        else:
            for name, value in compare.gathered_tensors(parameters):
                if name in own:
                    own[name].data.copy_(value)

        def compute() -> None:
            assert plain is not None
            is_host = self._trainer.device.type == "cpu"
            waiting = contextlib.nullcontext() if is_host else torch.autograd.graph.save_on_cpu()
            with undisturbed(plain), waiting:
                result.update(self._results(plain, batch, sink))

        on_first_rank(compute, awaited)
        return result

    def _results(self, model: nn.Module, batch: Any, sink: Any) -> Named:
        plan = self._runtime.plan if model is self._trainer.model else None
        setup = TrainingSetup(model, [], self._loss, self._trainer.scaler, plan)
        loss = torch.tensor(watch(setup, sink, [(0, 0, batch)], self._trainer.step, 0), dtype=torch.float64)
        return {"": loss} | compare.values_of("gradients", model)

    def _copied(self) -> nn.Module:
        """Return a copy whose weights, without values, rest on the host; a module fetches its own for its forward."""
        result = unsharded_copy(self._runtime, "cpu", trains=True)
        for module in result.modules():
            own: Any = _torch.own_parameters(module)
            resting = {name: parameter for name, parameter in own.items() if parameter is not None}
            module.register_forward_pre_hook(functools.partial(_fetch, own, resting, self._trainer.device))
            module.register_forward_hook(functools.partial(_fetch, own, resting, "cpu"), always_call=True)
        return result


def _fetch(own: Any, resting: Any, device: Any, *_: Any) -> None:
    own.update({name: parameter.to(device) for name, parameter in resting.items()})


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Begin without gradients; afterwards gradients, buffers and plain attributes are what they were."""
    modules = list(names.unwrap(model).modules())
    gradients, buffers = [(p, p.grad) for p in model.parameters()], values_of_buffers(modules[0])
    attributes = [(module, copy.deepcopy(plain_values(module))) for module in modules]
    model.zero_grad()
    try:
        yield
    finally:
        write_buffers(buffers)
        for module, values in attributes:
            module.__dict__.update(values)
        for parameter, gradient in gradients:
            parameter.grad = gradient
