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
from trueshard.errors import UserError, one_line
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
from trueshard.verification.modules import Located, Measure, Writer
from trueshard.verification.runs import shake
from trueshard.verification.subjects import TrainingSetup


class StepVerifier(Callback):
    """Verifies every ``every``-th step before it is taken; adds what it finds to the step's record."""

    def __init__(self, every: int, folder: Path) -> None:
        self._every, self._folder, self._record = every, folder / "verify", dict[str, Any]()
        self._found = {"steps": 0, "held": 0, "told": ""}

    def on_start(self, trainer: Trainer) -> None:
        """Raise `UserError`, on every rank, for a model that one rank cannot hold or compute."""
        memo = {id(value): value for value in vars(trainer.loss).values() if isinstance(value, nn.Module)}
        self._loss = copy.deepcopy(trainer.loss, memo)  # one may keep what it sees
        if any(isinstance(module, nn.SyncBatchNorm) for module in trainer.model.modules()):
            raise UserError("train.verify_every: nn.SyncBatchNorm computes on all ranks; remove train.verify_every")
        needed = sum(p.numel() * p.itemsize * (1 + 2 * p.requires_grad) for p in trainer.model.parameters())
        free = min(psutil.virtual_memory().available, memory_of_process(1))
        if over_ranks([trainer.rank == 0 and needed > free], trainer.device)[0]:
            raise UserError(
                f"train.verify_every: the whole model and its gradients take {size(needed)} of rank 0's main memory, "
                "which has less; remove it, or run `trueshard verify` with --layers"
            )

    def on_batch(self, trainer: Trainer, microbatches: list[Any]) -> None:
        if (trainer.step + 1) % self._every == 0:
            began, state = time.perf_counter(), random_state()
            self._record = self._verified(trainer, _from_first(_torch.to_device(microbatches[0], "cpu")))
            set_random_state(*state)
            self._record["verify_seconds"] = time.perf_counter() - began

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        record |= self._record
        record["seconds"] -= self._record.get("verify_seconds", 0.0)
        self._record = {}

    def on_end(self, trainer: Trainer) -> None:
        if trainer.rank == 0:
            counts = "{held} of {steps} steps are what one rank computes without sharding. {told}".format(**self._found)
            print(f"train.verify_every: {counts}", flush=True)

    def state_dict(self) -> dict[str, Any]:
        return self._found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found = dict(state)

    def _verified(self, trainer: Trainer, batch: Any) -> dict[str, Any]:
        """Return what goes into the record of the step. Collective."""
        plain = _Plain(trainer, self._loss, batch)
        values, tolerances = plain.expected()
        found = self._distances(trainer, batch, values, tolerances)
        wrong = [name for name, (apart, allowed, _) in found.items() if not apart <= allowed]
        loss, gradients = found.pop("", (0.0,))[0], max((apart for apart, *_ in found.values()), default=0.0)
        failure, wrong, loss, gradients = _from_first((plain.failure, wrong, loss, gradients))
        self._found["steps"] += 1
        self._found["held"] += not (failure or wrong)
        record = {"verified": not wrong, "verify_loss": loss, "verify_gradients": gradients}
        record = {"verify_failed": failure} if failure else record
        if (failure or wrong) and not self._found["told"]:
            told = f"one rank cannot compute it: {failure}" if failure else self._first(trainer, batch, plain, values)
            self._found["told"] = record["verify_first"] = f"Step {trainer.step + 1}: {_from_first(told)}"
            if trainer.rank == 0:
                logger.warning("train.verify_every: %s (said once; metrics.jsonl has every step)", self._found["told"])
        return record

    def _distances(
        self, trainer: Trainer, batch: Any, expected: Named, tolerances: Tolerances, sink: Any = None
    ) -> Distances:
        """Compute ``batch`` sharded; return how far loss ("") and gradients are apart, on rank 0. Collective."""
        setup = TrainingSetup(trainer.model, [], self._loss, trainer.scaler, sharded(trainer.model).plan)
        with undisturbed(trainer.model):
            loss = watch(setup, sink, [(0, 0, batch)], trainer.step, 0)
            values = {"": torch.tensor(loss, dtype=torch.float64)} | compare.values_of("gradients", trainer.model)
            allowed = functools.partial(tolerances.of, "gradients", 1)
            return distances(values, expected, expected.__getitem__, allowed)

    def _first(self, trainer: Trainer, batch: Any, plain: _Plain, expected: Named) -> str:
        """Return where the sharded model leaves the plain one first, in words. Collective."""
        runtime, store = sharded(trainer.model), TensorStore(self._folder)
        # Hooks of modules are not called in compiled code.
        with torch.compiler.set_stance("force_eager" if runtime.plan.compile else "default"):
            plain.compute(Writer(store, 1))
            noise = Measure(store, 1)
            plain.compute(noise, shaken=True)
            tolerances = _from_first(plain.tolerances(noise.noise))
            measure = Measure(store, 1)
            sink = None if "context" in runtime.axes.along else measure  # modules return parts there
            found = self._distances(trainer, batch, expected, tolerances, sink)
        found.pop("", None)
        source = f": {FACTOR:g} times what rounding errors change of it"
        result = located_on(measure, tolerances, False, found, trainer.step + 1, source)
        dist.barrier()
        if trainer.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        cause = "without compiling nothing differs" if runtime.plan.compile else "no module, and no gradient, differs"
        return str(result) if isinstance(result, Located) else f"the loss or gradients differ; looked at again, {cause}"


class _Plain:
    """The copy of a run's model on rank 0, and its passes over one microbatch; elsewhere nothing."""

    def __init__(self, trainer: Trainer, loss: Any, batch: Any) -> None:
        self._trainer, self._batch, self.failure = trainer, batch, ""
        self._setup: Any = None
        if trainer.rank == 0:
            self._setup = TrainingSetup(_copied(trainer.model, trainer.device), [], loss, trainer.scaler)

    def expected(self) -> tuple[Named, Tolerances]:
        """Return loss ("") and gradients, and what they may be apart; nothing on other ranks. Collective."""
        first, second = self.compute(), self.compute(shaken=True)
        both = {name: compare.distance(second[name], first[name])[1] for name in first.keys() & second.keys()}
        return first, self.tolerances({("gradients", 1, name): noise for name, noise in both.items()})

    def tolerances(self, noise: dict[tuple[str, int, str], float]) -> Tolerances:
        dtypes = {p.dtype for p in self._setup.model.parameters() if p.requires_grad} if self._setup else set()
        return Tolerances(noise, max([FLOORS[torch.float32], *(FLOORS.get(dtype, 0.0) for dtype in dtypes)]), {})

    def compute(self, sink: Any = None, *, shaken: bool = False) -> Named:
        """Gather the values of now, ``shaken`` by rounding errors; return loss ("") and gradients. Collective."""
        own, random = {}, torch.Generator().manual_seed(0)
        if self._setup is not None:
            own = {name: tensor for name, *_, tensor in names.named_tensors(self._setup.model, "parameters")}
        for name, tensor in compare.gathered_tensors(dict(self._trainer.model.named_parameters())):
            if name in own:
                value = tensor.clone()
                if shaken and own[name].requires_grad:
                    shake(value, torch.promote_types(value.dtype, torch.float32), random)
                own[name].data.copy_(value)
        if not own:
            return {}
        is_host = self._trainer.device.type == "cpu"
        waiting = contextlib.nullcontext() if is_host else torch.autograd.graph.save_on_cpu()
        try:
            with undisturbed(self._setup.model), waiting:
                loss = watch(self._setup, sink, [(0, 0, self._batch)], self._trainer.step, 0)
                gradients = compare.values_of("gradients", self._setup.model)
                return {"": torch.tensor(loss, dtype=torch.float64)} | gradients
        except Exception as error:  # the other ranks wait for this one
            self.failure = f"{type(error).__name__}: {one_line(error)}"
            return {}


def _from_first(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Begin without gradients; afterwards gradients, buffers and plain attributes are what they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = values_of_buffers(names.unwrap(model))
    attributes = [(module, copy.deepcopy(plain_attributes(module))) for module in names.unwrap(model).modules()]
    model.zero_grad()
    try:
        yield
    finally:
        write_buffers(buffers)
        for module, values in attributes:
            module.__dict__.update(values)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _copied(model: nn.Module, device: torch.device, host: str = "cpu") -> nn.Module:
    """Return a copy as before sharding, in the compute dtype, whose weights, without values, rest on the host."""
    runtime = sharded(model)

    def made(parameter: torch.Tensor) -> nn.Parameter:
        dtype = runtime.compute_dtype if parameter.is_floating_point() else None
        empty = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=host)
        return nn.Parameter(empty, parameter.requires_grad)

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
