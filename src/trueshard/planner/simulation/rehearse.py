"""Rank 0 of a job, really run on one device: what was forecast beside what is measured.

Collectives do nothing (torch's ``fake`` backend), so one device stands for any number. Everything else is the job's
own: ``shard()``, the step, kernels, the allocator. The model is sharded before it has memory, so that one rank's shards
are all it ever needs; and its values are made up: random numbers in parameters, buffers and other tensors of modules,
where these hold whole numbers 0, and where they hold truth values true.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from trueshard import _torch, engine, names
from trueshard.planner.events import Communication, Trace
from trueshard.planner.forecasting import MICROBATCHES
from trueshard.planner.inputs.nests import mapped
from trueshard.planner.inputs.twins import plain_attributes
from trueshard.planner.memory import ledger
from trueshard.planner.memory.reserve import replay
from trueshard.planner.showing.report import duration
from trueshard.planner.simulation.simulate import simulate, simulated_mesh, without_collection
from trueshard.planner.simulation.step import run_step
from trueshard.planner.speed.hardware import Hardware, Mode
from trueshard.planner.speed.timeline import schedule
from trueshard.planner.study import Study
from trueshard.planner.workload import Job, Workload
from trueshard.policies import UNSAID
from trueshard.sharding import SMALL
from trueshard.tables import size, table


@dataclass(frozen=True)
class Pair:
    """A figure that was forecast, and what it is."""

    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """By what part of what was measured the forecast is too high (positive) or too low."""
        return self.forecast / self.measured - 1 if self.measured else math.nan


@dataclass(frozen=True)
class Rehearsal:
    """Forecast and measurement of one rank. ``str()`` is a table."""

    model: str
    ranks: int
    device: str
    """On which it ran."""
    hardware: str
    """Of which device the forecast is."""
    steps: int
    allocated: Pair
    """Peak bytes in tensors: in the allocator's blocks on a GPU, as asked for on a CPU."""
    reserved: Pair | None
    """Peak bytes that the allocator took from the device; a CPU's takes none in advance."""
    seconds: Pair
    """A step that is not the first, where communication takes no time."""

    def __str__(self) -> str:
        rows = [
            (what, shown(pair.forecast), shown(pair.measured), f"{pair.error:+.1%}")
            for what, pair, shown in (
                ("peak allocated", self.allocated, _bytes),
                ("peak reserved", self.reserved, _bytes),
                ("step without communication", self.seconds, duration),
            )
            if pair is not None
        ]
        where = f"{self.model}: rank 0 of {self.ranks:,}, {self.steps} steps on {self.device}"
        lines = table(("", f"forecast ({self.hardware})", "measured", "error"), rows, right=(1, 2, 3))
        return "\n".join([where, *lines])


def _bytes(count: float) -> str:
    return size(int(count))


def require(device: str) -> None:
    """Raise where a rehearsal on ``device`` is not possible.

    Raises:
        ValueError: it is neither ``"cuda"`` nor ``"cpu"``, or there is no CUDA GPU.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f'a rehearsal runs on "cuda" or "cpu", not on {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "a rehearsal needs a CUDA GPU, and this machine has none; leave it out, or run it where one is"
        )


def rehearse(job: Job, hardware: Hardware, *, device: str = "cuda", steps: int = 3) -> Rehearsal:
    """Forecast one rank of a job, run it, and put both side by side.

    Args:
        job: which rank is its own; of many microbatches a step three are run, in forecast and measurement.
        hardware: what is forecast; the device at hand is not compared with it.
        device: ``"cuda"``: the current GPU, which should hold nothing else; or ``"cpu"``.
        steps: at least 2.

    Raises:
        ValueError: no such device, it has too little memory, or what ``shard()`` refuses.
    """
    require(device)
    if steps < 2:
        raise ValueError(f"steps={steps} must be at least 2: the first one is unlike the others")
    on_cpu = device == "cpu"
    job = dataclasses.replace(job, accumulation=min(job.accumulation, MICROBATCHES), on_cpu=on_cpu)
    made = simulate(job)
    mode: Mode = "compile" if made.plan.compile else "eager"
    seconds = schedule(_without_communication(made.steady), hardware, 1, mode).seconds
    blocks = replay(made.first, made.steady, repeats=steps - 1, workspace_bytes=hardware.workspace_bytes)
    job = dataclasses.replace(job, plan=made.plan)
    try:
        measured = _on_cpu(job, steps) if on_cpu else _on_gpu(job, steps)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the rehearsal needs more memory than this GPU has; {size(blocks.peak_reserved)} were forecast"
        ) from error
    live = max(ledger.peak(made.first).bytes, ledger.peak(made.steady).bytes)
    return Rehearsal(
        model=job.workload.name,
        ranks=math.prod(job.ranks),
        device="CPU" if on_cpu else torch.cuda.get_device_name(),
        hardware=hardware.name,
        steps=steps,
        allocated=Pair(live if on_cpu else blocks.peak_allocated, measured.allocated),
        reserved=None if measured.reserved is None else Pair(blocks.peak_reserved, measured.reserved),
        seconds=Pair(seconds, measured.seconds),
    )


def job_of(study: Study, workload: Workload) -> Job:
    """The job that a study is of, to be rehearsed.

    Args:
        study: whose plan is run.
        workload: made as the study's was.
    """
    told = study.forecast
    return Job(
        workload,
        study.plan.ranks,
        microbatch=told.microbatch,
        accumulation=told.accumulation,
        plan=study.plan,
        optimizer=told.optimizer,
    )


def _without_communication(trace: Trace) -> Trace:
    """The trace as it is for a rank alone; positions stay."""
    alone = [
        dataclasses.replace(event, ranks=1, received=0) if isinstance(event, Communication) else event
        for event in trace.events
    ]
    return Trace(alone, trace.resident)


# The run


@dataclass(frozen=True)
class _Measured:
    allocated: int
    reserved: int | None
    seconds: float


def _on_gpu(job: Job, steps: int) -> _Measured:
    with _world(job, "cuda") as mesh:
        step = _ready(job, mesh, torch.device("cuda"))
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what making the model left
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        with without_collection():
            marks[0].record()
            for mark in marks[1:]:
                step()
                mark.record()
            torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        later = [one.elapsed_time(two) / 1000 for one, two in itertools.pairwise(marks[1:])]
        del step
    gc.collect()
    torch.cuda.empty_cache()
    return _Measured(*found, statistics.median(later))


def _on_cpu(job: Job, steps: int) -> _Measured:
    with _world(job, "cpu") as mesh:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step = _ready(job, mesh, torch.device("cpu"))
            with without_collection(), record_function(_STEPS):
                for _ in range(steps):
                    step()
        later = []
        for _ in range(steps - 1):  # beside the profiler, which takes time of its own
            start = time.perf_counter()
            step()
            later.append(time.perf_counter() - start)
    return _Measured(_peak(_traced(profiler)), None, statistics.median(later))


@contextlib.contextmanager
def _world(job: Job, kind: str) -> Iterator[DeviceMesh]:
    """The job's mesh in this process alone, with random states and warnings as they were afterwards."""
    gpus = [torch.cuda.current_device()] if kind == "cuda" else []
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(gpus),
        _torch.simulated_world(job.rank, math.prod(job.ranks)),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield simulated_mesh(kind, job.ranks)


def _ready(job: Job, mesh: DeviceMesh, device: torch.device) -> Callable[[], None]:
    """Model and optimizers, sharded without memory, then given it; the result does one step."""
    workload = job.workload
    with torch.device("meta"):
        model = workload.model()
    optimizers = list(workload.optimizers(model))
    engine.shard(model, optimizers, job.plan, mesh, {**UNSAID, **job.words})
    _materialise(names.unwrap(model), device)

    def step() -> None:
        with device:
            made = [workload.batch(job.microbatch, workload.sequence) for _ in range(job.accumulation)]
        batches = [
            mapped(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, each) for each in made
        ]
        del made
        run_step(workload, model, optimizers, batches)

    return step


@torch.no_grad()
def _materialise(root: nn.Module, device: torch.device) -> None:
    """Give memory on ``device``, and values, to a model that was sharded on the meta device.

    Parameters stay the objects that the optimizers hold. Shards that are to rest in host memory go there at the end.
    """
    for kind in ("parameters", "buffers"):
        for tensor in {id(tensor): tensor for _, _, _, tensor in names.named_tensors(root, kind)}.values():
            if tensor.is_meta:
                _give(tensor, device)
                _fill(_torch.local(tensor), kind)
    given: dict[int, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        if id(value) not in given:
            given[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            _fill(given[id(value)], "buffers")
        return given[id(value)]

    for module in root.modules():
        for key, value in plain_attributes(module).items():
            if any(each.is_meta for each in _torch.tensors_in(value)):
                vars(module)[key] = mapped(real, value)
    assert isinstance(root, _torch.ShardedModule)
    _torch.initialise(root)
    _torch.join_shards(root, SMALL)  # as shard() does where there is memory


def _give(tensor: torch.Tensor, device: torch.device) -> None:
    """Replace what a meta tensor has, not the object, by memory of the same shape."""
    if isinstance(tensor, DTensor):
        shard = _torch.local(tensor)
        memory = torch.empty(shard.shape, dtype=shard.dtype, device=device)
        new: torch.Tensor = _torch.dtensor_over(memory, tensor, tensor.shape, tensor.stride())
    else:
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    attributes = dict(tensor.__dict__)
    torch.utils.swap_tensors(tensor, new)
    tensor.__dict__.update({key: value for key, value in attributes.items() if key not in tensor.__dict__})


def _fill(tensor: torch.Tensor, kind: str) -> None:
    """Values with which a step runs and stays finite: small ones, and for buffers positive ones."""
    if tensor.is_floating_point() or tensor.is_complex():
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        numbers.normal_(0.0, 0.02) if kind == "parameters" else numbers.uniform_(0.01, 1.0)
    else:
        tensor.fill_(tensor.dtype == torch.bool)


# What the profiler saw

_STEPS = "rehearsed steps"


def _traced(profiler: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _peak(events: Iterable[dict[str, Any]]) -> int:
    """The highest sum, during the steps, of what was allocated since the profiler began."""
    told = [event for event in events if event.get("name") in (_STEPS, "[memory]")]
    start = min(event["ts"] for event in told if event["name"] == _STEPS)
    held: set[int] = set()
    live = peak = 0
    for event in sorted((event for event in told if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        count, address = event["args"]["Bytes"], event["args"]["Addr"]
        if count > 0:
            held.add(address)
        elif address not in held:  # from before
            continue
        else:
            held.remove(address)
        live += count
        peak = max(peak, live) if event["ts"] >= start else live
    return peak


__all__ = ["Pair", "Rehearsal", "job_of", "rehearse", "require"]
