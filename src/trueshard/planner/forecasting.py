"""Study a job on a cluster: simulate it, reserve its memory, lay it on a time line, and put the figures together."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trueshard.axes import AXES, FOLDED, SHARED
from trueshard.machine import garbage_collection_paused
from trueshard.optim.local_params import LARGE
from trueshard.planner import ledger
from trueshard.planner.failures import failure_cost
from trueshard.planner.hardware import Hardware, Mode
from trueshard.planner.inputs.batches import quietly
from trueshard.planner.reserve import replay
from trueshard.planner.simulation.simulate import Simulation, Simulator
from trueshard.planner.timeline import Timeline, schedule
from trueshard.planner.trace import KINDS, Allocation, Communication, EventPlace, Free, Kernel, Trace
from trueshard.planner.workload import Job, Study
from trueshard.plans import Forecast, MixedPrecision, Plan
from trueshard.text import size

MICROBATCHES = 3
"""Microbatches of a step that are simulated at most: the first, the last, and one for those between."""


@dataclass(frozen=True)
class Cluster:
    """Devices, nodes, and how many ranks lie along each axis."""

    hardware: Hardware
    ranks: int
    ranks_per_node: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Ranks along an axis, by its name in ``trueshard.axes``; 1 for those left out, and the rest shards."""

    def __post_init__(self) -> None:
        ranks, copies, stages = self.ranks, self.along("replicate"), self.along("pipeline")
        if ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            raise ValueError(f"ranks={ranks} is not a whole number of nodes of {self.ranks_per_node} ranks")
        if ranks % copies:
            raise ValueError(f"ranks={ranks} cannot be divided into {copies} replicas")
        if ranks % (stages * copies):
            raise ValueError(f"ranks={ranks} cannot be divided into {stages} stages (pipeline)")
        for axes in (tuple(reversed(SHARED)), *((name,) for name in FOLDED)):
            if self.ranks_of_copy % math.prod(map(self.along, axes)):
                words = " × ".join(f"{name}={self.along(name)}" for name in axes if self.along(name) > 1)
                copy = f"{self.ranks_of_copy} ranks" + (" of a replica" if copies > 1 else "")
                copy += " of a stage" if stages > 1 else ""
                raise ValueError(f"{words} does not divide the {copy}: choose a divisor, or other ranks")

    def along(self, axis: str) -> int:
        """Return the ranks along an axis."""
        return self.sizes.get(axis, 1)

    @property
    def ranks_of_copy(self) -> int:
        """Ranks that hold one copy of the model or, with a pipeline, of a stage."""
        return self.ranks // self.along("pipeline") // self.along("replicate")

    @property
    def mesh(self) -> tuple[int, ...]:
        """Ranks over which gradients are averaged, as ``Plan.ranks``: (shard,) or (replicate, shard), of a stage."""
        separate = [axis.name for axis in AXES if axis.place == "mesh" and axis.gradients == "apart"]
        shard = self.ranks_of_copy // math.prod(map(self.along, separate))
        return (shard,) if self.along("replicate") == 1 else (self.along("replicate"), shard)

    @property
    def readers_share(self) -> int:
        """Ranks that have the same samples, and so share their tokens."""
        return math.prod(self.along(axis.name) for axis in AXES if axis.same_samples)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of a device outside of torch's allocator: the context, and a communicator for each mesh dimension."""
        dimensions = [*self.mesh, *map(self.along, SHARED), self.along("pipeline")]
        for name in FOLDED:
            if (size := self.along(name)) > 1:  # a mesh of its own, whose other dimensions hold the same part
                dimensions += [size, self.ranks_of_copy // size, self.along("replicate")]
        communicators = sum(size > 1 for size in dimensions)
        return self.hardware.context_bytes + communicators * self.hardware.communicator_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that torch's allocator can have."""
        return self.hardware.memory_bytes - self.overhead_bytes


@quietly()
@garbage_collection_paused()
def study_job(job: Job, cluster: Cluster, budget: int | None = None, simulator: Simulator | None = None) -> Study:
    """Return what a job costs on a cluster, whose mesh is the job's.

    Args:
        budget: bytes that torch's allocator may reserve on each rank; None: all that the device has.
        simulator: of the job's workload, if it simulates other jobs, too.

    Raises:
        ValueError: the budget is more than the device has, or ``shard()`` refuses the job.
    """
    budget = budget_on(cluster, budget)
    job = dataclasses.replace(job, on_cpu=not cluster.hardware.streams)
    short = dataclasses.replace(job, accumulation=min(job.accumulation, MICROBATCHES))
    made, line = simulated(short, cluster, simulator)
    sums = sums_of(made.steady, line)
    if (more := job.accumulation - MICROBATCHES) > 0:
        sums = added(sums, microbatch_sums(made, cluster, sums), more)
    forecast = forecast_of(job, cluster, budget, made, sums)
    plan = dataclasses.replace(made.plan, forecast=forecast)
    kept = job.workload.snapshots
    failures = failure_cost(plan, cluster.hardware, *kept) if cluster.ranks > 1 and cluster.hardware.streams else None
    assumptions = assumptions_of(job, made)
    return Study(plan, forecast, made.steady, line, assumptions=assumptions, score=made.score, failures=failures)


def budget_on(cluster: Cluster, budget: int | None) -> int:
    """Return the bytes that torch's allocator may reserve on each rank; None: all that the device has.

    Raises ValueError if it has less.
    """
    if budget is not None and budget > cluster.available_bytes:
        raise ValueError(
            f"memory={budget:,} bytes is more than the {cluster.available_bytes:,} that torch can have on "
            f"{cluster.hardware.name}: {cluster.hardware.memory_bytes:,} less context and communicators"
        )
    return cluster.available_bytes if budget is None else budget


def simulated(job: Job, cluster: Cluster, simulator: Simulator | None = None) -> tuple[Simulation, Timeline]:
    """Return a job's simulation, with what lies beside the model, and the time line of its steady step."""
    made = (simulator or Simulator(job.workload)).simulate(job)
    for trace in (made.first, made.steady, made.score):
        if trace is not None:
            trace.resident += _beside(job, trace)
    return made, _line(cluster, made.plan, made.steady)


def _line(cluster: Cluster, plan: Plan, trace: Trace) -> Timeline:
    mode: Mode = "compile" if plan.compile else "eager"
    return schedule(trace, cluster.hardware, cluster.ranks_per_node, mode)


def forecast_of(job: Job, cluster: Cluster, budget: int, made: Simulation, sums: Mapping[str, Any]) -> Forecast:
    """Return the forecast of a job; ``sums``: what adds up over its step, see ``sums_of``."""
    reserved = replay(made.first, made.steady, workspace_bytes=cluster.hardware.workspace_bytes).reserved
    peak = peak_of(made)
    seconds = sums["step_seconds"]
    # Ranks of one context, one tensor axis and one pipeline have the same samples.
    tokens = job.microbatch * job.accumulation * job.workload.sequence / cluster.readers_share
    rate = cluster.hardware.peak(compute_dtype(made.plan))
    on_host, of_host = max(made.first.host_bytes, made.steady.host_bytes), cluster.hardware.host_memory_bytes
    if cluster.hardware.streams:  # a CPU's memory is that of the device
        on_host += job.workload.snapshots[0] * made.steady.snapshot_bytes
    return Forecast(
        model=job.workload.name,
        hardware=cluster.hardware.name,
        ranks=cluster.ranks,
        ranks_per_node=cluster.ranks_per_node,
        sequence=job.workload.sequence,
        microbatch=job.microbatch,
        accumulation=job.accumulation,
        optimizer=job.optimizer,
        fits=reserved <= budget and (of_host is None or on_host <= of_host),
        budget_bytes=budget,
        host_bytes=on_host,
        host_budget_bytes=of_host,
        snapshot_bytes=made.steady.snapshot_bytes,
        peak_live_bytes=peak.bytes,
        peak_reserved_bytes=reserved,
        overhead_bytes=cluster.overhead_bytes,
        peak_phase=peak.phase,
        peak_unit=peak.unit,
        peak_by_kind={kind: peak.by_kind.get(kind, 0) for kind in KINDS},
        bytes_received_per_step=sum(sums["received_by_collective"].values()),
        tokens_per_second_per_rank=tokens / seconds if seconds else 0.0,
        mfu=sums["model_flops_per_step"] / seconds / rate if seconds else 0.0,
        **sums,
    )


def peak_of(made: Simulation) -> ledger.Peak:
    """Return the larger peak of the first and of a later step."""
    return max((ledger.peak(made.first), ledger.peak(made.steady)), key=lambda peak: peak.bytes)


def _beside(job: Job, trace: Trace) -> list[Allocation]:
    """Return what lies beside the model, as allocations; ``None`` bytes are those of the model's shards and buffers."""
    of_model = sum(held.bytes for held in trace.resident if held.kind == "parameters")
    return [
        Allocation(
            EventPlace("between", name), -1 - i, of_model if size is None else size, kind="parameters", unit=name
        )
        for i, (name, size) in enumerate(job.workload.beside)
    ]


def sums_of(trace: Trace, line: Timeline) -> dict[str, Any]:
    """Return what adds up over a step, by field of ``Forecast``."""
    return {
        "flops_per_step": ledger.flops(trace),
        "model_flops_per_step": ledger.flops(trace, recomputed=False),
        "step_seconds": line.seconds,
        "compute_seconds": line.compute_seconds,
        "exposed_communication_seconds": line.exposed_seconds,
        "received_by_collective": ledger.received(trace),
        "received_by_axis": ledger.received(trace, by="axis"),
        "exposed_by_axis": line.exposed_by_axis,
    }


def microbatch_sums(made: Simulation, cluster: Cluster, sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``sums``, over a step of several microbatches, that the second of them adds."""
    trace = _without_second_microbatch(made.steady)
    less = sums_of(trace, _line(cluster, made.plan, trace))
    return _combined(sums, less, operator.sub)


def _without_second_microbatch(trace: Trace) -> Trace:
    """Return a step without its second microbatch; its memory is not right."""
    phases = [event.place.phase for event in trace.events]
    starts = [i for i, phase in enumerate(phases) if phase == "forward" and (i == 0 or phases[i - 1] != "forward")]
    begin, end = starts[1], starts[2]
    events = list(trace.events[:begin])
    for event in trace.events[end:]:
        if isinstance(event, (Kernel, Communication)) and event.after:
            kept = (i if i < begin else i - (end - begin) for i in event.after if not begin <= i < end)
            event = dataclasses.replace(event, after=tuple(kept))
        events.append(event)
    return Trace(events)


def added(sums: Mapping[str, Any], one: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Return the sums with ``times`` microbatches more, of which each is ``one``."""
    return _combined(sums, one, lambda value, more: value + times * more)


def _combined(sums: Mapping[str, Any], other: Mapping[str, Any], function: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return ``function`` of each number of ``sums`` and its like in ``other``; some are in mappings by name."""
    return {
        key: _combined(value, other.get(key, {}), function)
        if isinstance(value, Mapping)
        else function(value, other.get(key, 0))
        for key, value in sums.items()
    }


def compute_dtype(plan: Plan) -> str:
    """Return the dtype in which most of a plan's parameters compute."""
    mixed = plan.mixed_precision or MixedPrecision()
    if mixed.compute is not None:
        return mixed.compute
    return max(plan.units, key=lambda unit: unit.parameters).dtype.partition("+")[0]


def assumptions_of(job: Job, made: Simulation) -> tuple[str, ...]:
    """Return what a forecast takes for granted, one sentence each."""
    sentences = list(job.workload.assumptions)
    if made.plan.experts > 1:
        more = "as many tokens as to any other" if job.imbalance == 1 else f"{job.imbalance:g} times the mean of tokens"
        sentences.append(f"To the experts of this rank go {more} (imbalance).")
    if made.whole_because:
        sentences.append(f"Every block was simulated, since blocks could not be extended: {made.whole_because}.")
    if (taken := _taken_by_parts(made.steady)) is not None:
        sentences.append(
            "The optimizer's foreach step takes large shards one after the other, so its intermediate results are "
            f"{size(taken)} at most, not a copy of all shards."
        )
    if job.accumulation > MICROBATCHES:
        sentences.append(
            f"The memory curve and the time line show {MICROBATCHES} microbatches of {job.accumulation}; "
            "the figures are for all."
        )
    return tuple(sentences + made.warnings)


def _taken_by_parts(trace: Trace) -> int | None:
    """Return the most bytes of intermediate results in an optimizer's step by units; None if it is one for all."""
    step = [event for event in trace if event.place.phase == "optimizer"]
    kernels = [event for event in step if isinstance(event, Kernel) and event.op.startswith("aten._foreach")]
    units = {kernel.place.unit for kernel in kernels if kernel.read >= LARGE}
    taken = most = 0
    made: set[int] = set()
    for event in step:
        if isinstance(event, Allocation) and event.kind == "temporary":
            made.add(event.storage)
            taken += event.bytes
        elif isinstance(event, Free) and event.storage in made:
            taken -= event.bytes
        most = max(most, taken)
    return most if len(units) > 1 and most else None  # where the host steps, no device holds them
