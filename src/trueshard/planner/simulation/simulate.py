"""One rank of a job in this process, on fake tensors: the real ``shard()``, the real step, and a record of both."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trueshard import _torch, engine, names
from trueshard.planner.events import Allocation, Free, Kernel, Phase, Place, Trace
from trueshard.planner.inputs.twins import twin
from trueshard.planner.simulation.compiling import compiled
from trueshard.planner.simulation.extend import KEPT, NotPeriodicError, extend
from trueshard.planner.simulation.following import following
from trueshard.planner.simulation.fused import attention_as_on_a_device
from trueshard.planner.simulation.labels import labelled
from trueshard.planner.simulation.offloading import offloaded
from trueshard.planner.simulation.peers import seeing_real_tensors
from trueshard.planner.simulation.randomness import watching_random_states
from trueshard.planner.simulation.recorder import Recorder
from trueshard.planner.simulation.repeats import Run, find_runs, shorten, shortened, with_counts
from trueshard.planner.simulation.step import run_step
from trueshard.planner.simulation.values import Following
from trueshard.planner.workload import Job
from trueshard.plans import Plan
from trueshard.policies import UNSAID


@dataclass
class Simulation:
    """What one rank does."""

    plan: Plan
    """With its units."""
    first: Trace
    """The first step, in which optimizer state and FSDP2's buffers are made."""
    steady: Trace
    """Any later step."""
    models: int = 1
    """How many models were run: more than one where blocks that repeat were extended."""
    whole_because: str = ""
    """Why blocks that repeat were all run, where they were."""
    warnings: list[str] = field(default_factory=list)
    """What ``shard()`` and the model warned of."""


def simulate(job: Job, *, whole: bool = False) -> Simulation:
    """Run two steps of ``job`` as its rank would.

    Blocks that repeat are run a few times and extended exactly, see ``extend``.

    Args:
        job: what is trained, on which ranks, by which plan or words.
        whole: run every block.

    Raises:
        ValueError: what ``shard()`` refuses.
        Exception: what the user's own functions raise.
    """
    world = math.prod(job.ranks)
    with warnings.catch_warnings(record=True) as told, _torch.simulated_world(job.rank, world):
        warnings.simplefilter("always")
        mesh = simulated_mesh("cpu", job.ranks)
        with _torch.fake_tensors(), _torch.one_chunk(), _torch.unseen_propagation():
            made = _simulated(job, mesh, whole)
    passing = (DeprecationWarning, FutureWarning)  # what libraries say of their own use of libraries
    made.warnings = sorted({str(each.message) for each in told if not issubclass(each.category, passing)})
    return made


def simulated_mesh(device_type: str, ranks: tuple[int, ...]) -> DeviceMesh:
    """A mesh of the simulated world. Its dimensions bear names of their own: DTensor remembers what it made on one
    mesh and gives it to every mesh that is equal, and a real one must not be given groups that are gone."""
    return init_device_mesh(
        device_type, ranks, mesh_dim_names=("simulated_replicas", "simulated_shards")[-len(ranks) :]
    )


def _simulated(job: Job, mesh: DeviceMesh, whole: bool) -> Simulation:
    model = job.workload.model()
    asked = engine.resolve(model, job.plan, {**UNSAID, **job.words}, job.ranks)
    plan = asked
    runs = [] if whole else find_runs(model, plan)
    try:
        made = _from_fewer(job, mesh, model, plan, runs) if runs else _run(job, mesh, model, plan)
    except NotPeriodicError as reason:
        made = _run(job, mesh, job.workload.model(), plan)
        made.whole_because = str(reason)
    made.plan = asked
    return made


def _from_fewer(job: Job, mesh: DeviceMesh, model: nn.Module, plan: Plan, runs: list[Run]) -> Simulation:
    kept = with_counts(runs, [KEPT] * len(runs))
    shortest = shortened(plan, shorten(model, runs, [KEPT] * len(runs)))
    variants = []
    for r in range(len(runs)):
        fewer = with_counts(runs, [KEPT - (i == r) for i in range(len(runs))])
        copied, _ = twin(model)
        less = shortened(shortest, shorten(copied, kept, [run.count for run in fewer]))
        variants.append((_run(job, mesh, copied, less), fewer))
    base = _run(job, mesh, model, shortest)
    traces = [
        extend(
            labelled(getattr(base, step), functools.partial(_label, kept)),
            [labelled(getattr(made, step), functools.partial(_label, fewer)) for made, fewer in variants],
            runs,
        )
        for step in ("first", "steady")
    ]
    return Simulation(plan, traces[0], traces[1], models=1 + len(variants))


def _label(runs: Sequence[Run], unit: str) -> tuple[int, int] | None:
    for r, run in enumerate(runs):
        if (block := run.block_of(unit.partition(" + ")[0])) is not None:
            return r, block
    return None


def _run(job: Job, mesh: DeviceMesh, model: nn.Module, plan: Plan) -> Simulation:
    workload = job.workload
    recorder = Recorder(job.on_cpu)
    with Following(recorder.values):
        optimizers = list(workload.optimizers(model))
        resolved = engine.shard(model, optimizers, dataclasses.replace(plan, compile=False), mesh, UNSAID)
    _adopt(recorder, model, resolved)
    recorder.adopt(_state(model, optimizers), "optimizer", "")
    traces = []
    attention = contextlib.nullcontext() if job.on_cpu else attention_as_on_a_device()
    with attention, following(recorder, model, resolved), seeing_real_tensors(), without_collection():
        for _ in range(2):
            resident = recorder.living()
            with recorder, _torch.watching_resizes(recorder.resized), watching_random_states(recorder.see_random_state):
                batches = [workload.batch(job.microbatch, workload.sequence) for _ in range(job.accumulation)]
                recorder.mark(_torch.tensors_in(batches), "inputs")
                run_step(workload, model, optimizers, batches, lambda phase: _enter(recorder, phase, model, optimizers))
                del batches
            _name_state(recorder, model, optimizers)
            events, marks = recorder.take()
            traces.append(_as_planned(_finished(Trace(events, resident), marks), job, plan, recorder.members))
    return Simulation(resolved, traces[0], traces[1])


def _adopt(recorder: Recorder, model: nn.Module, plan: Plan) -> None:
    """Tell the recorder what there is before the first step."""
    name_of = _names(model)
    for unit, (_, parameters) in zip(plan.units, engine.sharded(model).units, strict=True):
        recorder.members[unit.name] = [name_of[id(parameter)] for parameter in parameters]
        recorder.adopt(zip(recorder.members[unit.name], parameters, strict=True), "parameters", unit.name)
    recorder.adopt(((name_of[id(parameter)], parameter) for parameter in model.parameters()), "parameters", "")
    recorder.adopt(((name, tensor) for name, _, _, tensor in names.named_tensors(model, "buffers")), "parameters", "")


def _names(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, _, _, tensor in reversed(list(names.named_tensors(model, "parameters")))}


def _name_state(recorder: Recorder, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for name, tensor in _state(model, optimizers):
        recorder.mark([tensor], "optimizer", name)


def _state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that an optimizer keeps for a parameter, by the parameter's name and its own key."""
    name_of = _names(model)
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                for tensor in _torch.tensors_in(value):
                    yield f"{name_of.get(id(parameter), '?')}.{key}", tensor


def _enter(recorder: Recorder, phase: Phase, model: nn.Module, optimizers: Sequence[Any]) -> None:
    if phase == "clip":
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        recorder.mark(grads, "gradients")
    recorder.place = Place(phase, "")


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection at a time that nobody chose: it frees what cycles hold."""
    gc.collect()
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _finished(trace: Trace, marks: Mapping[int, str]) -> Trace:
    """Give every allocation its kind, now that its whole life is known."""
    for each in (*trace.resident, *(event for event in trace.events if isinstance(event, Allocation))):
        each.kind = marks.get(each.storage, each.kind)  # type: ignore[assignment]
    made: dict[int, Allocation] = {}
    for event in trace.events:
        if isinstance(event, Allocation):
            made[event.storage] = event
        elif isinstance(event, Free) and event.storage in made and event.place.phase == "backward":
            start = made[event.storage]
            if start.kind == "temporary" and start.place.phase == "forward":
                start.kind = "activations"
    return trace


def _as_planned(trace: Trace, job: Job, plan: Plan, members: Mapping[str, Sequence[str]]) -> Trace:
    """What no run on CPU tensors shows, put in: where memory is, and what a compiler leaves out."""
    if plan.offload == "cpu" and not job.on_cpu:
        trace = offloaded(trace, {name for names in members.values() for name in names})
    if plan.compile:
        trace = compiled(trace, plan)
    for event in trace.events:
        if isinstance(event, Kernel):
            event.reads = event.writes = ()
    return trace
