"""Pipelines: what a rank of P stages takes and how long a step is, from simulations of the first and the last stage.

A stage is a slice of the model's blocks; the first has the embeddings, too, the last the head and the loss. Where P
does not divide the blocks, those in the middle have one more, and one of them is simulated as well. Each is simulated
as a job of its own on ranks / P ranks, with three microbatches one after another. Gradients are reduced at the last
one, and parameters stay gathered where the policy is ``default``, as in a stage of ``torch.distributed.pipelining``.
Each further microbatch takes the time and bytes of the second; each that is in flight beside it, the memory that its
forward leaves. What is modelled, not run:

- **In flight** on stage s, of M microbatches: all M (GPipe: Huang et al. 2018, arXiv 1811.06965); P - s (1F1B:
  PipeDream-Flush, Narayanan et al. 2020, arXiv 2006.09503); with V chunks of blocks a rank (interleaved 1F1B:
  Narayanan et al. 2021, arXiv 2104.04473, section 2.2) (2 (P - s - 1) + (V - 1) P + 1) / V, and never more than M.
- **Gradients** of several chunks are reduced as each chunk is done, so those of one may be all that is not, where
  microbatches are as few as stages (``Pipeline.backwards``). What is asked for is the backward with the most of both.
- **Time** of a step: the slowest stage's M microbatches, and 1 / V of one of each other stage while the pipeline fills
  and drains; so of a step with equal stages the part (P - 1) / (M V + P - 1) is a bubble (the same, sections 2.2.1 and
  2.2.2).
- **Bytes**: each stage but the first receives the activations of each microbatch, each but the last their gradients,
  once a chunk: microbatch × sequence × width in the compute dtype. Nothing hides a transfer. Buffers for all of them
  are there from the beginning, as in torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.planner import ledger
from trueshard.planner.forecasting import (
    MICROBATCHES,
    Cluster,
    added,
    assumptions_of,
    budget_on,
    compute_dtype,
    forecast_of,
    microbatch_sums,
    simulated,
    sums_of,
)
from trueshard.planner.inputs.batches import TARGETS, output_of, quietly
from trueshard.planner.schedules import Pipeline
from trueshard.planner.search.evaluator import Simulations
from trueshard.planner.simulation.simulate import Simulation, Simulator
from trueshard.planner.timeline import BASE_LATENCY, Timeline
from trueshard.planner.trace import Phase, Trace
from trueshard.planner.workload import Job, Study, Workload
from trueshard.plans import Forecast, Plan
from trueshard.sharding import engine

# A stage as a job


class _Received(nn.Module):
    """Stands for the embeddings on all stages but the first, and returns activations of the stage before."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding_dim, self.dtype = width, dtype  # the name of nn.Embedding, which says a model's width

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty((*ids.shape, self.embedding_dim), dtype=self.dtype, requires_grad=True)


def stage_workload(workload: Workload, plan: Plan, pipe: Pipeline, number: int, dtype: torch.dtype) -> Workload:
    """Return a stage of a workload, counted from 0; ``plan``: of the whole model; ``dtype``: of activations.

    Its ``loss`` is the workload's, or the sum of what the stage sends on.
    """
    blocks = [unit.name for unit in plan.units if unit.kind == "block"]
    start = sum(pipe.blocks(stage, len(blocks)) for stage in range(number))
    kept = blocks[start : start + pipe.blocks(number, len(blocks))]
    last = number == pipe.stages - 1

    def model() -> nn.Module:
        made = workload.model()
        root: Any = names.unwrap(made)
        above = _keep(root, kept)
        if number > 0:
            embedding = root.get_input_embeddings()
            _forget_style(root, embedding)
            root.set_input_embeddings(_Received(embedding.weight.shape[1], dtype))
        if last:
            return made
        for name, module in above.named_children():  # norms of what the last stage has
            if max((parameter.ndim for parameter in module.parameters()), default=0) == 1:
                _forget_style(root, module)
                setattr(above, name, nn.Identity())
        if (head := root.get_output_embeddings()) is not None:
            _forget_style(root, head)
            root.set_output_embeddings(nn.Identity())
        return made

    return dataclasses.replace(workload, model=model, loss=workload.loss if last else _sent_on, score=None)


def blocks_of(model: nn.Module, plan: Plan) -> int:
    """Return the number of a model's blocks; raise ValueError for one that the planner cannot cut into stages."""
    root: Any = names.unwrap(model)
    blocks = [unit.name for unit in plan.units if unit.kind == "block"]
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1 or not all(hasattr(root, f"get_{end}_embeddings") for end in ("input", "output")):
        raise ValueError(
            f"pipeline: {type(root).__name__} is not a model of transformers whose blocks are one list, and only such "
            "models does the planner cut into stages; give it a stage, as a model of its own, or leave out pipeline"
        )
    return len(blocks)


def _keep(root: nn.Module, blocks: list[str]) -> nn.Module:
    """Remove all other blocks of the list that holds ``blocks``, in place; return the module that has the list.

    The blocks that are left are counted anew.
    """
    modules = dict(names.named_modules(root))
    container = blocks[0].rpartition(".")[0]
    held = _torch.own_modules(modules[container])
    held.clear()
    held.update({str(number): modules[name] for number, name in enumerate(blocks)})
    return modules[container.rpartition(".")[0]]


def _forget_style(root: nn.Module, module: nn.Module) -> None:
    """Take a module that will be replaced out of the model's own plan for sharing matrices."""
    name = next((name for name, other in names.named_modules(root) if other is module), "")
    for above, holder in names.named_modules(root):
        if styles := vars(holder).get("_tp_plan"):
            start = f"{above}." if above else ""
            left = {glob: style for glob, style in styles.items() if not names.matching(start + glob, [name])}
            vars(holder)["_tp_plan"] = left


def _styles_left(plan: Plan, workload: Workload) -> Mapping[str, str]:
    """Return the styles for what a stage has parameters of."""
    if not plan.styles:
        return plan.styles
    with _torch.fake_tensors():
        stage = workload.model()
    owners = [name for name, module in names.named_modules(stage) if any(True for _ in module.parameters())]
    left = [*owners, *(name for held in names.held_tensors(stage, "parameters") for name in held.names)]
    return {glob: style for glob, style in plan.styles.items() if names.matching(glob, left)}


def _sent_on(model: nn.Module, batch: Any) -> torch.Tensor:
    if not isinstance(batch, Mapping):
        raise ValueError("pipeline: the batch must be a dict with input_ids, as the models of transformers take it")
    inputs = {key: value for key, value in batch.items() if key not in (*TARGETS, "shift_labels")}
    return output_of(model(**inputs)).sum()


# The study of a pipeline


@dataclass(frozen=True)
class Ends:
    """The stages of a model that are simulated, and the processes that do it, for several studies."""

    blocks: int
    """Blocks of the full model."""
    activation: int
    """Bytes of an activation for each token."""
    output: int
    """Bytes of the last stage's output for each token."""
    stages: Mapping[int, Simulations]
    """The first stage, the last, and one in the middle if some of those have more blocks, by number."""

    def like(self, number: int, pipe: Pipeline) -> int:
        """Return how many stages of the pipeline a simulated one stands for."""
        middle = pipe.middle(self.blocks)
        return {0: pipe.stages - 1 - middle, pipe.stages - 1: 1}.get(number, middle)


@contextlib.contextmanager
def ends_of(job: Job, pipe: Pipeline, workers: int | None = 0) -> Iterator[Ends]:
    """Cut a whole model's job into stages; ``workers``: as of ``search.choose``.

    Raises ValueError if the model cannot be cut.
    """
    if job.choices.units != "auto":
        raise ValueError("units: a stage of a pipeline has the units that shard() chooses; leave out units")
    with quietly(), _torch.fake_tensors():
        model = job.workload.model()
        plan = engine.resolve(names.Index(model), job.plan or job.choices, job.ranks)
        pipe.check(job.accumulation, blocks := blocks_of(model, plan))
        root = cast(Any, names.unwrap(model))
        width = int(root.get_input_embeddings().weight.shape[1])
        head = root.get_output_embeddings()
        outputs = width if head is None else int(head.weight.shape[0])
    dtype = getattr(torch, compute_dtype(plan))
    stages = {
        number: Simulations(stage_workload(job.workload, plan, pipe, number, dtype), workers)
        for number in (0, pipe.stages - 1, *([1] if pipe.middle(blocks) else []))
    }
    with contextlib.ExitStack() as running:
        with quietly():
            for simulations in stages.values():
                running.enter_context(simulations.running())
        yield Ends(blocks, width * dtype.itemsize, outputs * dtype.itemsize, stages)


@quietly()
def study_pipeline(
    job: Job, cluster: Cluster, pipe: Pipeline, ends: Ends, budget: int | None = None, *, must_fit: bool = False
) -> Study | None:
    """Return what a pipeline costs: memory of the stage that takes most, and the time of a step of all.

    Args:
        job: of the whole model, on the ranks of one stage, with the microbatches of a step as ``accumulation``.
        cluster: of all stages.
        pipe: stages and schedule.
        ends: of a job that differs in the choices for units alone.
        budget: as of ``forecasting.study_job``.
        must_fit: return None, perhaps after the first stage alone, if it does not fit.

    Raises:
        ValueError: as ``forecasting.study_job``.
    """
    budget = budget_on(cluster, budget)
    job = dataclasses.replace(job, on_cpu=not cluster.hardware.streams)
    tokens = job.microbatch * job.workload.sequence // cluster.along("context")
    activation, output = (tokens * bytes // pipe.parts for bytes in (ends.activation, ends.output))
    passed = Passed(activation, output if pipe.outputs else 0)
    stages: list[Stage] = []
    for number, simulations in ends.stages.items():
        stages.append(Stage.simulated(job, cluster, number, ends.like(number, pipe), simulations.simulator))
        forecasts = [stage.forecast(pipe, cluster, budget, passed, stages) for stage in stages]
        if must_fit and not all(forecast.fits for forecast in forecasts):
            return None
    heaviest = max(range(len(stages)), key=lambda number: forecasts[number].peak_reserved_bytes)
    stage, forecast = stages[heaviest], forecasts[heaviest]
    assumptions = (
        *assumptions_of(dataclasses.replace(job, accumulation=1), stage.made),
        f"Memory, bytes and units are those of stage {stage.number + 1} of {pipe.stages}, whose ranks take the most; "
        "the stage is simulated, the schedule modelled (planner/pipelining.py).",
        f"The memory curve and the time line show {MICROBATCHES} microbatches of {job.accumulation} on that stage, one "
        f"in flight of {forecast.in_flight:g}; the figures are for all.",
    )
    plan = dataclasses.replace(stage.made.plan, forecast=forecast)
    return Study(plan, forecast, stage.made.steady, stage.line, assumptions=assumptions)


@dataclass(frozen=True)
class Passed:
    """Bytes that stages hand on of a microbatch, on each rank."""

    activation: int
    output: int
    """Bytes of what the last stage keeps; 0: nothing."""


@dataclass(frozen=True)
class Stage:
    """A stage, simulated with ``MICROBATCHES`` microbatches, one after another."""

    number: int
    job: Job
    """The stage's job, with the microbatches of a step as ``accumulation``."""
    made: Simulation
    line: Timeline
    sums: dict[str, Any]
    """Sums over a step of all microbatches, by field of ``Forecast``."""
    seconds: float
    """Time of one microbatch between the first and the last."""
    activations: int
    """Bytes that a microbatch's forward leaves for its backward."""
    of_blocks: int
    """Part of ``activations`` that belongs to blocks: not to embeddings, logits and losses."""
    count: int = 1
    """Stages of the pipeline that this one stands for."""

    @classmethod
    def simulated(cls, full: Job, cluster: Cluster, number: int, count: int, simulator: Simulator) -> Stage:
        """Simulate a stage, from 0, of the job of a full model; it stands for ``count`` of them."""
        workload = simulator.workload
        plan = Plan.of(full.choices) if full.plan is None else full.plan
        plan = dataclasses.replace(
            plan, pipeline=True, units=(), replicated=(), resolved_for="", styles=_styles_left(plan, workload)
        )
        job = dataclasses.replace(full, workload=workload, plan=plan, in_flight=1)
        made, line = simulated(dataclasses.replace(job, accumulation=MICROBATCHES), cluster, simulator)
        begin, turn = span(made.steady, "forward", 2)
        sums = sums_of(made.steady, line)
        one = microbatch_sums(made, cluster, sums)
        live, outer = ledger.curve(made.steady), {unit.name for unit in made.plan.units if unit.kind == "root"}
        left = {unit: np.diff(series.at(np.array([begin - 1, turn - 1]))) for unit, series in live.by_unit.items()}
        kept = sum(int(more[0]) for more in left.values())
        blocks = sum(int(more[0]) for unit, more in left.items() if unit not in outer)
        sums = added(sums, one, full.accumulation - MICROBATCHES)
        return cls(number, job, made, line, sums, one["step_seconds"], max(0, kept), max(0, blocks), count)

    def forecast(
        self, pipe: Pipeline, cluster: Cluster, budget: int, passed: Passed, stages: Sequence[Stage]
    ) -> Forecast:
        """Return the forecast of the pipeline with this stage's memory."""
        microbatches = self.job.accumulation
        sums = self._step(pipe, cluster, passed.activation, stages)
        one = forecast_of(self.job, cluster, budget, self.made, sums)
        kinds = dict(one.peak_by_kind)
        # A rank of several chunks has many of them in flight, but one of them has the head.
        microbatch = self.of_blocks if self.number and pipe.virtual > 1 else self.activations
        # A stage was simulated with whole activations, of which a rank may be given a part.
        unsent = passed.activation * (pipe.parts - 1) if self.number else 0
        microbatch -= unsent if pipe.virtual == 1 else 0
        held, unreduced = max(
            pipe.backwards(self.number, microbatches), key=lambda at: at[0] * microbatch + at[1] * kinds["gradients"]
        )
        more = int((held - 1) * microbatch) - unsent
        outputs = passed.output * microbatches if self.number == pipe.stages - 1 else 0
        more += outputs
        buffers = pipe.received(self.number, microbatches) * passed.activation
        # Of the activations that a stage is given, those in flight were counted as what its first block reads.
        buffers -= int(held * passed.activation) if self.number else 0
        reduced = int((1 - unreduced) * kinds["gradients"])
        kinds["activations"] += more
        kinds["communication"] += buffers
        kinds["gradients"] -= reduced
        more += buffers - reduced
        # When a step ends, torch joins the outputs in one tensor: larger than any block that the allocator has free.
        reserved = one.peak_reserved_bytes + more + outputs
        flops = sum(stage.count * stage.sums["model_flops_per_step"] for stage in stages) / pipe.stages
        return dataclasses.replace(
            one,
            peak_live_bytes=one.peak_live_bytes + more,
            peak_by_kind=kinds,
            peak_reserved_bytes=reserved,
            fits=reserved <= budget and one.host_lack <= 0,
            mfu=one.mfu * flops / max(1, one.model_flops_per_step),
            pipeline=pipe.stages,
            schedule=pipe.schedule,
            virtual=pipe.virtual,
            in_flight=pipe.in_flight(self.number, microbatches),
            bubble_seconds=_bubble(pipe, stages),
        )

    def _step(self, pipe: Pipeline, cluster: Cluster, transfer: int, stages: Sequence[Stage]) -> dict[str, Any]:
        """Return the sums over a step: this stage's work and bytes, and the time of the slowest stage."""
        sums = dict(self.sums)
        count = pipe.received(self.number, self.job.accumulation)
        one = transfer_seconds(transfer, cluster)
        sent = 2 * (self.job.accumulation * pipe.virtual + pipe.stages - 1) * one
        waiting = _bubble(pipe, stages) + sent
        slowest = max(stage.sums["step_seconds"] for stage in stages)
        sums["step_seconds"] = slowest + waiting
        idle = slowest - self.sums["step_seconds"]
        for key, name, more in (
            ("received_by_collective", "send_receive", count * transfer),
            ("received_by_axis", "pipeline", count * transfer),
            ("exposed_by_axis", "pipeline", waiting + idle),
        ):
            sums[key] = {**sums[key], name: more}
        sums["exposed_communication_seconds"] += waiting + idle
        return sums


def _bubble(pipe: Pipeline, stages: Sequence[Stage]) -> float:
    """Return the seconds in which all stages but the slowest fill and drain the pipeline: 1 / V microbatches each."""
    total = sum(stage.count * stage.seconds for stage in stages)
    return (total - max(stage.seconds for stage in stages)) / pipe.virtual


def span(trace: Trace, phase: Phase, number: int) -> tuple[int, int]:
    """Return (start, end) of the events of the ``number``-th forward or backward of a step, counted from 1."""
    runs = itertools.groupby(range(len(trace.events)), lambda i: trace.events[i].place.phase)
    positions = [list(run) for phase_of_run, run in runs if phase_of_run == phase][number - 1]
    return positions[0], positions[-1] + 1


def transfer_seconds(size: int, cluster: Cluster) -> float:
    """Return the seconds in which activations reach the next stage, whose ranks are ranks / P behind."""
    hardware = cluster.hardware
    if cluster.ranks // cluster.along("pipeline") < cluster.ranks_per_node:
        rate, latency = hardware.link_rate(2), hardware.link_latency
    else:
        rate, latency = hardware.network_bandwidth * hardware.network_efficiency, hardware.network_latency
    return BASE_LATENCY + latency + size / rate
