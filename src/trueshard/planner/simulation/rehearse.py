"""Run rank 0 of a job on one real device, and compare the forecast with the measurement.

Collectives do nothing (torch's ``fake`` backend), so one device stands for any number. Everything else is the job's
own: ``shard()``, the step, kernels, the allocator. The model is sharded on the meta device, so that only one rank's
shards ever need memory. Values are made up: random floats, integers 0, booleans True.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch
from trueshard.checkpoint.materialise import HOST, give_memory
from trueshard.model import names
from trueshard.planner.forecasting import MICROBATCHES
from trueshard.planner.hardware import Hardware
from trueshard.planner.inputs.fake_tensors import replace_plain
from trueshard.planner.report.summary import duration
from trueshard.planner.reserve import replay
from trueshard.planner.simulation.simulate import (
    Simulation,
    run_step,
    simulate,
    simulated_mesh,
    without_garbage_collection,
)
from trueshard.planner.timeline import schedule
from trueshard.planner.trace import Communication, Trace
from trueshard.planner.workload import Job, Study, Workload
from trueshard.sharding import engine
from trueshard.sharding.apply import SMALL
from trueshard.text import size, table

STEPS = 3
"""Steps that are run; the first one is unlike the others."""


@dataclass(frozen=True)
class Pair:
    """A forecast and a measured figure."""

    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error: forecast / measured - 1."""
        return self.forecast / self.measured - 1 if self.measured else math.nan


@dataclass(frozen=True)
class Rehearsal:
    """Forecast and measurement of one rank; ``str()`` gives a table."""

    model: str
    ranks: int
    device: str
    """Device of the measurement."""
    hardware: str
    """Device of the forecast."""
    steps: int
    allocated: Pair
    """Peak bytes of tensors, in the allocator's blocks."""
    reserved: Pair
    """Peak bytes reserved by the allocator."""
    seconds: Pair
    """Median step after the first, without communication."""

    def __str__(self) -> str:
        rows = [
            (what, formatted(pair.forecast), formatted(pair.measured), f"{pair.error:+.1%}")
            for what, pair, formatted in (
                ("peak allocated", self.allocated, size),
                ("peak reserved", self.reserved, size),
                ("step without communication", self.seconds, duration),
            )
        ]
        where = f"{self.model}: rank 0 of {self.ranks:,}, {self.steps} steps on {self.device}"
        lines = table(("", f"forecast ({self.hardware})", "measured", "error"), rows, right=(1, 2, 3))
        return "\n".join([where, *lines])


def require_gpu() -> None:
    """Raise ValueError if there is no CUDA GPU."""
    if not torch.cuda.is_available():
        raise ValueError(
            "a rehearsal needs a CUDA GPU, and this machine has none; leave it out, or run it where one is"
        )


def rehearse(job: Job, hardware: Hardware) -> Rehearsal:
    """Forecast one rank of a job, run it on the current GPU, which should hold nothing else, and return both.

    Args:
        job: with the rank; of more than three microbatches a step, three are simulated and run.
        hardware: device of the forecast; it is not compared with the device at hand.

    Raises:
        ValueError: there is no GPU, it has too little memory, or ``shard()`` refuses the job.
    """
    require_gpu()
    job = dataclasses.replace(job, accumulation=min(job.accumulation, MICROBATCHES), on_cpu=False)
    made = simulate(job)
    blocks = replay(made.first, made.steady, repeats=STEPS - 1, workspace_bytes=hardware.workspace_bytes)
    try:
        allocated, reserved, seconds = _measured(dataclasses.replace(job, plan=made.plan))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the rehearsal needs more memory than this GPU has; {size(blocks.reserved)} were forecast"
        ) from error
    return Rehearsal(
        model=job.workload.name,
        ranks=math.prod(job.ranks),
        device=torch.cuda.get_device_name(),
        hardware=hardware.name,
        steps=STEPS,
        allocated=Pair(blocks.peak_allocated, allocated),
        reserved=Pair(blocks.reserved, reserved),
        seconds=Pair(seconds_alone(made, hardware), seconds),
    )


def job_of(study: Study, workload: Workload) -> Job:
    """Return the job of a study, to be rehearsed; ``workload``: built like the study's."""
    forecast = study.forecast
    return Job(
        workload,
        study.plan.ranks,
        microbatch=forecast.microbatch,
        accumulation=forecast.accumulation,
        plan=study.plan,
        optimizer=forecast.optimizer,
    )


def seconds_alone(made: Simulation, hardware: Hardware) -> float:
    """Return the forecast seconds of a step in which collectives take no time."""
    alone = [
        dataclasses.replace(event, ranks=1, received=0) if isinstance(event, Communication) else event
        for event in made.steady.events
    ]
    trace = Trace(alone, made.steady.resident)
    return schedule(trace, hardware, 1, "compile" if made.plan.compile else "eager").seconds


# Measurement


def _measured(job: Job) -> tuple[int, int, float]:
    """Return peak bytes allocated, peak bytes reserved, and median seconds of a step after the first."""
    with world(job, "cuda") as mesh:
        step = ready(job, mesh, torch.device("cuda"))
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # memory that building the model needed
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        with without_garbage_collection():
            marks[0].record()
            for mark in marks[1:]:
                step()
                mark.record()
            torch.cuda.synchronize()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        later = [one.elapsed_time(two) / 1000 for one, two in itertools.pairwise(marks[1:])]
        del step
    gc.collect()
    torch.cuda.empty_cache()
    return *peaks, statistics.median(later)


@contextlib.contextmanager
def world(job: Job, kind: str) -> Iterator[DeviceMesh]:
    """Simulate the job's mesh in this process; random states and warning filters are restored afterwards."""
    gpus = [torch.cuda.current_device()] if kind == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(gpus), simulated_mesh(job, kind) as mesh:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield mesh


def ready(job: Job, mesh: DeviceMesh, device: torch.device) -> Callable[[], None]:
    """Shard model and optimizers on the meta device, then allocate; return a function that runs a step."""
    workload = job.workload
    with torch.device("meta"):
        model = workload.model()
    optimizers = list(workload.optimizers(model))
    engine.shard(model, optimizers, job.plan or job.choices, mesh)
    _materialise(names.unwrap(model), device)

    def step() -> None:
        with device:
            batches = [workload.batch(job.microbatch, workload.sequence) for _ in range(job.accumulation)]
        batches = _torch.to_device(batches, device)
        run_step(workload, model, optimizers, batches)

    return step


@torch.no_grad()
def _materialise(root: nn.Module, device: torch.device) -> None:
    """Allocate a model that was sharded on the meta device, and fill it; parameters stay the same objects."""
    offloaded = _torch.offloaded(root)
    for kind in ("parameters", "buffers"):
        for held in names.held_tensors(root, kind):
            if held.tensor.is_meta:
                give_memory(held.tensor, None, HOST if id(held.tensor) in offloaded else device)
                _fill(_torch.local(held.tensor), kind)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        _fill(made, "buffers")
        return made

    replace_plain(root, {}, lambda tensor: tensor.is_meta, real)
    assert isinstance(root, _torch.ShardedModule)
    _torch.initialise(root)
    _torch.join_shards(root, SMALL)  # as shard() does where there is memory


def _fill(tensor: torch.Tensor, kind: str) -> None:
    """Write values with which a step stays finite: small floats for parameters, positive ones for buffers."""
    if tensor.is_floating_point() or tensor.is_complex():
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        numbers.normal_(0.0, 0.02) if kind == "parameters" else numbers.uniform_(0.01, 1.0)
    else:
        tensor.fill_(tensor.dtype == torch.bool)
