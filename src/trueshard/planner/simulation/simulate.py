"""Simulate one rank of a job in this process, on fake tensors: the real ``shard()`` and the real step, recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch, distributed
from trueshard.checkpoint import state
from trueshard.checkpoint.snapshot_parts import place
from trueshard.model import names
from trueshard.optim.norms import clip_grad_norm_
from trueshard.options import Options
from trueshard.parallel import context
from trueshard.parallel.forward_trial import MaskTrial
from trueshard.parallel.tensor import resolve as resolve_tensor
from trueshard.planner import ledger
from trueshard.planner.simulation.environment import (
    attention_as_on_a_device,
    fake_tensors_look_real,
    without_garbage_collection,
)
from trueshard.planner.simulation.extension import KEPT, NotPeriodicError, extend
from trueshard.planner.simulation.offloading import offloaded
from trueshard.planner.simulation.recorder import Recorder, track_units
from trueshard.planner.simulation.recurrences import recurrences
from trueshard.planner.simulation.repeats import Repeats, Run, short_copy
from trueshard.planner.trace import EventPlace, Kernel, Phase, Trace
from trueshard.planner.workload import Job, Workload, mesh_axes
from trueshard.plans import Plan
from trueshard.sharding import engine
from trueshard.sharding.cut_dimensions import with_cut_dimensions
from trueshard.sharding.engine import accumulate
from trueshard.sharding.hooks import runtime_of
from trueshard.sharding.splitting import split_sequence


def run_step(
    workload: Workload,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[Any],
    enter: Callable[[Phase], None] = lambda phase: None,
    in_flight: int = 0,
) -> None:
    """Run forward and backward of each microbatch, clipping, the optimizers' step, ``zero_grad``.

    Gradients of several ``batches`` accumulate; ``enter`` is called with each phase as it begins. ``in_flight``: if not
    0, in the order of a pipeline's stage, which runs so many forwards before the first backward.
    """
    losses: deque[torch.Tensor] = deque()
    behind = max(in_flight - 1, 0)
    for i in range(len(batches) + behind):
        with _reducing(model, last=i == len(batches) + behind - 1, of_stage=in_flight > 0):
            if i < len(batches):
                enter("forward")
                loss = workload.loss(model, own_part(model, batches[i]))
                losses.append(loss / len(batches) if len(batches) > 1 and not in_flight else loss)
                del loss
            if i >= behind:
                enter("backward")
                losses.popleft().backward()
    enter("clip")
    if workload.clip is not None:
        clip_grad_norm_(model.parameters(), workload.clip)
    enter("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    enter("between")
    for optimizer in optimizers:
        optimizer.zero_grad()


@contextlib.contextmanager
def _reducing(model: nn.Module, *, last: bool, of_stage: bool) -> Iterator[None]:
    """Reduce gradients inside only if ``last``; a pipeline's stage keeps its parameters gathered until then, too."""
    if of_stage:  # as torch.distributed.pipelining's stages do
        root = engine.sharded(model).root
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last)
    with accumulate(model, last=last):
        yield


def own_part(model: nn.Module, batch: Any) -> Any:
    """Return what this rank computes of a microbatch: where ranks share sequences, its part of each.

    Raises ValueError if it cannot be told what of the batch is a sequence.
    """
    runtime = runtime_of(names.unwrap(model))
    if runtime is None or "context" not in runtime.axes.along:
        return batch
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"context: the batch is a {type(batch).__name__}, and of a dict alone, with input_ids of [batch, length], "
            "is it known what ranks may share: give such a batch, with its loss, or leave out context"
        )
    return split_sequence(model, batch)


def run_score(workload: Workload, model: nn.Module, batch: Any, enter: Callable[[Phase], None]) -> None:
    """Run the workload's ``score`` of a microbatch, without gradient."""
    assert workload.score is not None
    enter("forward")
    with torch.no_grad():
        workload.score(model, own_part(model, batch))
    enter("between")


@dataclass
class Simulation:
    """Traces of one rank's first and later steps."""

    plan: Plan
    """The plan with its units."""
    first: Trace
    """First step, in which optimizer state and FSDP2's buffers are made."""
    steady: Trace
    """Any later step."""
    score: Trace | None = None
    """Pass of ``Workload.score`` after these, if there is one."""
    models: int = 1
    """Models that were run; more than one if repeated blocks were extended."""
    whole_because: str = ""
    """Reason why repeated blocks were all run; "" if they were not, or if there are none."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of ``shard()`` and of the model."""


def simulate(job: Job, *, whole: bool = False) -> Simulation:
    """Run two steps of ``job`` as its rank would.

    Of many equal blocks a few are run and the others extended from them exactly, see ``extend``; ``whole``: run all.

    Raises:
        ValueError: ``shard()`` refuses the job.
        Exception: raised by the workload's own functions.
    """
    return Simulator(job.workload).simulate(job, whole=whole)


@dataclass
class Short:
    """A job on a model with few blocks, to be run."""

    job: Job
    plan: Plan
    """The plan of the full model, with its units."""
    runs: Sequence[Run]
    kept: Sequence[int]
    """Blocks of each run that are left."""

    def key(self) -> Hashable:
        """Return what tells it from others of its workload; equal ones differ in the place and length of runs alone."""
        job = self.job

        def labelled(name: str) -> Any:
            for r, run in enumerate(self.runs):
                if (place := run.place_of(name)) is not None and place[0] < self.kept[r]:
                    return r, place
            return name

        def is_left(name: str) -> bool:
            return all((run.block_of(name) or 0) < kept for run, kept in zip(self.runs, self.kept, strict=True))

        units = [
            (labelled(unit.name), unit.reshard_after_forward, unit.activation_checkpointing)
            for unit in self.plan.units
            if is_left(unit.name)
        ]
        fixed = dataclasses.replace(self.plan, units=(), cut_dimensions={}, padding=0, forecast=None)
        fixed = dataclasses.replace(fixed, reshard_after_forward=0, activation_checkpointing={}, resolved_for="")
        batch = job.microbatch, job.accumulation, job.workload.sequence, job.workload.score is None
        where = job.ranks, job.rank, job.on_cpu, job.recorder, job.imbalance, job.in_flight
        return repr((where, batch, units, fixed, [(run.container, run.period) for run in self.runs], self.kept))


class Simulator:
    """Simulates jobs of one workload: its model is built once, and what several jobs share is run once.

    Args:
        workload: of all jobs.
        run_all: runs several short models, perhaps side by side; None: ``run``, one after the other.
    """

    def __init__(self, workload: Workload, run_all: Callable[[list[Short]], list[Simulation]] | None = None) -> None:
        self.workload = workload
        self._run_all = run_all or (lambda shorts: [self.run(short) for short in shorts])
        self.mode = _torch.fake_tensors()
        """Makes the tensors of ``model``; what is made beside them is made by the same."""
        self._simulated: dict[Hashable, tuple[Simulation, Sequence[Run]]] = {}
        """Simulations of short models, with the runs of the model that was shortened, by ``Short.key``."""
        self._units: dict[str, Plan] = {}
        """Plans with the units that options mean, by these in words."""
        self._masks: MaskTrial | None = None
        """Result of the trial of the model for ranks that share sequences."""

    @functools.cached_property
    def model(self) -> nn.Module:
        """The whole, unsharded model, which stays as it is: copies of it are run."""
        with self.mode:
            return self.workload.model()

    def short_copy(self, plan: Plan, runs: Sequence[Run], kept: Sequence[int]) -> tuple[nn.Module, Plan]:
        """Return a copy of ``model`` with so many blocks of each run, and its plan; raises ValueError as ``refuse``."""
        copied, plan = short_copy(self.model, plan, runs, kept)
        if plan.context > 1:
            self._masks = self._masks or context.refuse(self._index, plan)
            context.hand_over(self._masks, names.Index(copied))
        return copied, plan

    @functools.cached_property
    def repeats(self) -> Repeats:
        """Equal blocks of ``model``."""
        return Repeats(self.model)

    @functools.cached_property
    def _index(self) -> names.Index:
        return names.Index(self.model)

    def resolve(self, how: Plan | Options, ranks: tuple[int, ...], memory: int | None = None) -> Plan:
        """Return a plan with its units; raise ValueError if ``shard()`` refuses it. ``memory``: bytes of a rank."""
        with self.mode:
            plan = self._on_ranks(how, ranks, memory)
            return with_cut_dimensions(self._index, resolve_tensor(self._index, plan, mesh_axes(ranks, how)))

    def _on_ranks(self, how: Plan | Options, ranks: tuple[int, ...], memory: int | None) -> Plan:
        """Return ``engine.resolve``'s plan; units that options mean do not depend on ranks, and are chosen once."""
        if isinstance(how, Plan):
            return engine.resolve(self._index, how, ranks, memory)
        if (plan := self._units.get(repr(how))) is not None:
            return engine.on_ranks(plan, ranks, memory)
        plan = self._units[repr(how)] = engine.resolve(self._index, how, ranks, memory)
        return plan

    def simulate(self, job: Job, *, whole: bool = False) -> Simulation:
        """Run two steps of a job; see ``simulate``."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = self.resolve(job.plan or job.choices, job.ranks)
            runs = [] if whole else self.repeats.runs(plan)
        try:
            made = self._extended(Short(job, plan, runs, [KEPT] * len(runs)))
        except NotPeriodicError as reason:
            made = self._extended(Short(job, plan, [], []))
            made.whole_because = str(reason)
        made.warnings = sorted({*made.warnings, *_messages(caught)})
        return made

    def _extended(self, short: Short) -> Simulation:
        """Run the model with ``KEPT`` blocks of each run, and once for each run with one block less; extend traces."""
        runs = short.runs
        less = ([KEPT - (r == other) for other in range(len(runs))] for r in range(len(runs)))
        shorts = {s.key(): s for s in (short, *(dataclasses.replace(short, kept=kept) for kept in less))}
        missing = [s for key, s in shorts.items() if key not in self._simulated]
        made = zip(missing, self._run_all(missing), strict=True)
        simulated = self._simulated | {s.key(): (simulation, s.runs) for s, simulation in made}
        (base, recorded), *others = (simulated[key] for key in shorts)
        fewer = [simulation for simulation, _ in others]
        base = dataclasses.replace(base, plan=short.plan, models=len(shorts))
        if not runs:  # nothing to share with other jobs, and its traces may be large
            return base
        self._simulated = simulated
        base.first = extend(base.first, [simulation.first for simulation in fewer], runs, recorded)
        base.steady = extend(base.steady, [simulation.steady for simulation in fewer], runs, recorded)
        if base.score is not None:
            base.score = extend(base.score, [s.score for s in fewer if s.score is not None], runs, recorded)
        base.warnings = sorted({*base.warnings, *(line for simulation in fewer for line in simulation.warnings)})
        return base

    def run(self, short: Short) -> Simulation:
        """Run two steps, and the score if there is one, of a short model."""
        with self._prepared(short) as (mesh, model, plan, messages):
            first, steady, *score = _run(short.job, mesh, model, plan)
        return Simulation(short.plan, first, steady, score[0] if score else None, warnings=sorted(messages))

    def probe(self, short: Short, *, steps: bool = True) -> Trace:
        """Run one step alone of a short model, whose optimizers have stepped before: less than half of ``run``.

        ``steps``: with clipping and the optimizers' step, else forward and backward alone.
        """
        with self._prepared(short) as (mesh, model, plan, _):
            return _run(short.job, mesh, model, plan, probe="step" if steps else "passes")[0]

    @contextlib.contextmanager
    def _prepared(self, short: Short) -> Iterator[tuple[DeviceMesh, nn.Module, Plan, set[str]]]:
        """Yield a mesh, a model of few blocks, its plan, and a set to which warnings are added at the end."""
        messages: set[str] = set()
        # Modules that torch.compile returned run eagerly: it would compile what follows the operators, too.
        eagerly = torch.compiler.set_stance("force_eager")
        with warnings.catch_warnings(record=True) as caught, simulated_mesh(short.job, "cpu") as mesh, eagerly:
            warnings.simplefilter("always")
            with self.mode, _torch.unseen_propagation():
                if short.runs:
                    yield mesh, *self.short_copy(short.plan, short.runs, short.kept), messages
                else:
                    yield mesh, self.workload.model(), short.plan, messages
        messages |= _messages(caught)


def _messages(caught: list[warnings.WarningMessage]) -> set[str]:
    of_libraries = (DeprecationWarning, FutureWarning)  # about their own use of other libraries
    return {str(warning.message) for warning in caught if not issubclass(warning.category, of_libraries)}


@contextlib.contextmanager
def simulated_mesh(job: Job, device_type: str) -> Iterator[DeviceMesh]:
    """Simulate the job's world as its rank, and yield its mesh."""
    sizes = job.axes
    with _torch.simulated_world(job.rank, math.prod(sizes.values())), _torch.one_chunk():
        yield distributed.simulated_mesh(device_type, sizes, (job.plan or job.choices).experts)


def _run(
    job: Job, mesh: DeviceMesh, model: nn.Module, plan: Plan, *, probe: Literal["step", "passes"] | None = None
) -> list[Trace]:
    """Return the traces of the first and the second step, and of the score if there is one; ``probe``: as ``probe``."""
    workload = job.workload
    recorder = (job.recorder or Recorder)()
    recorder.values.imbalance = job.imbalance
    with recorder.values:
        optimizers = list(workload.optimizers(model))
        # A compiled kernel would want memory: blocks run eagerly, and ``_as_planned`` rewrites the trace.
        resolved = engine.shard(model, optimizers, dataclasses.replace(plan, compile=False), mesh)
        if probe == "passes":
            workload, optimizers = dataclasses.replace(workload, clip=None), []
        elif probe == "step":
            _make_optimizer_state(model, optimizers)
    recorder.axes = engine.sharded(model).axes.groups
    recorder.apart = {unit.name for unit in resolved.units if set(unit.modules) & set(resolved.modules_apart)}
    _adopt(recorder, model, resolved)
    recorder.adopt(_optimizer_state(model, optimizers), "optimizer", "")

    def enter(phase: Phase) -> None:
        if phase == "clip":  # gradients are what is left in ``.grad`` now; before, nothing tells them from activations
            recorder.mark([p.grad for p in model.parameters() if p.grad is not None], "gradients")
        recorder.place = EventPlace(phase, "")

    traces = []
    attention = contextlib.nullcontext() if job.on_cpu else attention_as_on_a_device()
    layers = recurrences(model, recorder.values, on_cpu=job.on_cpu)
    with (
        attention,
        track_units(recorder, model, resolved),
        layers,
        fake_tensors_look_real(),
        without_garbage_collection(),
    ):
        for number, trains in enumerate((True,) if probe else (True, True, False)[: 3 if workload.score else 2]):
            resident = recorder.alive()
            with recorder, _torch.watching_resizes(recorder.resized):
                # Of a stage's first step, only what it makes for all further ones matters.
                count = job.accumulation if trains and not (job.in_flight == 1 and number == 0) else 1
                with recorder.values.drawing():
                    batches = [workload.batch(job.microbatch, workload.sequence) for _ in range(count)]
                recorder.mark(_torch.tensors_in(batches), "inputs")
                if trains:
                    run_step(workload, model, optimizers, batches, enter, job.in_flight)
                else:
                    run_score(workload, model, batches[0], enter)
                del batches
            for name, tensor in _optimizer_state(model, optimizers):
                recorder.mark([tensor], "optimizer", name)
            trace = _as_planned(Trace(recorder.take(), resident), job, plan, recorder.members)
            trace.largest_imbalance = recorder.values.largest_imbalance
            if number == 1:  # the steady step: its snapshot alone is read
                trace.snapshot_bytes = _snapshot_bytes(model, optimizers)
            ledger.mark_activations(trace)
            traces.append(trace)
    return traces


def _snapshot_bytes(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the size of the file that a snapshot makes of this rank's part, with this machine's random generators."""
    by_number = {str(number): optimizer for number, optimizer in enumerate(optimizers)}
    tensors, _ = state.collect(*state.by_prefix(model, by_number), {}, None)
    held = {key: _torch.local(tensor).detach() for key, tensor in tensors.items()}
    with _torch.real_tensors():  # generators are read byte by byte, of which torch would warn under the fake mode
        held["rng"] = state.random_state()[1]
    return place(held, dict.fromkeys(held, ()))[1]


def _adopt(recorder: Recorder, model: nn.Module, plan: Plan) -> None:
    name_of = _parameter_names(model)
    for unit, parameters in zip(plan.units, engine.sharded(model).units.values(), strict=True):
        recorder.members[unit.name] = [name_of[id(parameter)] for parameter in parameters]
        recorder.adopt(zip(recorder.members[unit.name], parameters, strict=True), "parameters", unit.name)
    recorder.adopt(((name_of[id(parameter)], parameter) for parameter in model.parameters()), "parameters", "")
    recorder.adopt(((name, tensor) for name, _, _, tensor in names.named_tensors(model, "buffers")), "parameters", "")


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, _, _, tensor in reversed(list(names.named_tensors(model, "parameters")))}


def _make_optimizer_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _optimizer_state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (parameter name.state key, tensor) for every tensor in the optimizers' state."""
    name_of = _parameter_names(model)
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                for tensor in _torch.tensors_in(value):
                    yield f"{name_of.get(id(parameter), '?')}.{key}", tensor


def _as_planned(trace: Trace, job: Job, plan: Plan, members: Mapping[str, Sequence[str]]) -> Trace:
    """Apply offloading and compilation, which no run on fake CPU tensors shows; drop ``reads`` and ``writes``."""
    if plan.offload == "cpu" and not job.on_cpu:
        trace = offloaded(trace, {name for names in members.values() for name in names})
    if plan.compile:
        from trueshard.planner.simulation.compiling import compiled  # with networkx, a tenth of a second

        trace = compiled(trace, plan)
    for event in trace.events:
        if isinstance(event, Kernel):
            event.reads = event.writes = ()
    return trace
