"""Answer a request with a study: of the plan that was given, the one that the options mean, or the best of a search.

- ``solve`` chooses the words for resharding, recomputation, offload, replicas and batch, as far as they are free.
- With ``Request.axes`` it also chooses how many ranks share experts, matrices, sequences and blocks, an axis at a time:
  an axis is doubled as long as the best plan with it is faster, or lacks less memory where none fits. Ranks that talk
  inside of every block stay inside a node, where links are fast; what ``shard()`` refuses (heads that do not divide, a
  model without experts) ends an axis. A pipeline needs several microbatches: it is tried where these are given, or
  where nothing else fits.
- ``grid`` forecasts one plan at other numbers of ranks, lengths and microbatches: a study for each point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.axes import AXES, Axis, ranks_along, sizes_of
from trueshard.model import names
from trueshard.options import DEFAULTS, Options, is_free
from trueshard.planner import pipelining, process
from trueshard.planner.hardware import Hardware
from trueshard.planner.inputs.batches import LONGER
from trueshard.planner.inputs.workloads import is_size, workload_of
from trueshard.planner.planning import Request
from trueshard.planner.search.evaluator import Evaluator, Simulations
from trueshard.planner.search.search import WORK, checked, choose
from trueshard.planner.search.space import RECOMPUTE, Setting, Space
from trueshard.planner.simulation.preflight import preflight
from trueshard.planner.simulation.simulate import Simulator
from trueshard.planner.workload import Job, NotFaster, NothingFits, Study
from trueshard.plans import Plan
from trueshard.text import parse_size, size

Progress = Callable[[str], object]

FREE = Options(reshard_after_forward="auto", activation_checkpointing="auto")
"""Defaults of ``trueshard.plan``."""


def solve(
    request: Request,
    progress: Progress = lambda line: None,
    *,
    workers: int | None = 0,
    shared: Simulations | None = None,
    faster_than: float | None = None,
) -> Study:
    """Return the study of the best plan; raises as ``trueshard.plan``.

    ``progress`` gets a line for each plan; ``workers``: processes that do the work, 0: this one does, None: one for
    each of at most two cores; ``shared``: some that run already and have the model; ``faster_than``: as of ``choose``.
    """
    if request.axes and request.plan is not None:
        raise ValueError("axes: a given plan has its axes; leave out axes, or the plan")
    request.choices().replace(memory=None).check_alone(request.plan, defaults=FREE)
    workers = None if process.is_planners() else workers
    if shared is None:
        with shared_simulations(request, workers) as shared:
            return checked(shared, lambda: solve(request, progress, workers=workers, shared=shared))
    if request.axes:
        search = functools.partial(solve, progress=progress, workers=workers, shared=shared)
        return on_best_axes(request, search, progress, functools.partial(_expect_search, shared=shared))
    space, is_open = space_of(request, shared)
    if space.pipe.stages > 1:
        study = _of_pipeline(space, request.plan, workers)
    elif is_open and request.plan is None:
        instead = functools.partial(_instead_of_offload, request, progress, workers, shared)
        work = math.inf if request.thorough else WORK
        study = choose(space, progress, simulations=shared, faster_than=faster_than, before_offload=instead, work=work)
    else:
        study = _of_one_plan(space, request.plan, shared)
    return dataclasses.replace(study, assumptions=(*_left_out(request, space), *study.assumptions))


def _expect_search(requests: Iterator[Request], shared: Simulations) -> None:
    """Let the probes of the first search that is not refused begin before it is asked for."""

    def start() -> None:
        for request in requests:
            with contextlib.suppress(ValueError):
                space, is_open = space_of(request, shared)
                if is_open and space.pipe.stages == 1:
                    Evaluator(space, simulations=shared).start_probes()
                return

    shared.expect(start)


def _instead_of_offload(
    request: Request, progress: Progress, workers: int | None, shared: Simulations, lack: str
) -> Study | None:
    """Return the study of what fits without offload, if any, of options that were left out.

    Tried are experts that a node's ranks share, then parameters that are stored in 16 bits.
    """
    node = min(request.ranks, request.ranks_per_node or request.device().ranks_per_node)
    changes: dict[str, Any] = {"experts": node} if request.experts == 1 else {}
    if request.storage_dtype is None and isinstance(request.model, (str, os.PathLike)):
        changes["storage_dtype"] = "bf16"
    for name, value in changes.items() if request.offload is None else ():
        progress(f"Nothing fits without offload; trying {name}={value}")
        less = dataclasses.replace(request, axes=False, offload="none", **{name: value})
        kept = shared if name == "experts" else None  # another dtype is another model
        with contextlib.suppress(ValueError):  # shard() refuses it, or nothing fits
            study = solve(less, progress, workers=workers, shared=kept, faster_than=0.0)
            reason = f"{name}={value}: without it, or offload, the most frugal plan lacks {lack}."
            return dataclasses.replace(study, reasons=(reason, *study.reasons))
    return None


@contextlib.contextmanager
def shared_simulations(request: Request, workers: int | None) -> Iterator[Simulations]:
    """Yield the running simulations of a model, for requests that differ in the rest; they check ``request``."""
    space, _ = space_of(request)
    simulations = Simulations(space.workload, workers, lambda: _warnings(request, space, simulations.simulator))
    with simulations.running():
        yield simulations


BF16 = "Units compute in bfloat16 (--param-dtype), and gradients are reduced in float32 (--reduce-dtype)."
LENGTH = "A sample has {:,} tokens (--sequence)."


def _left_out(request: Request, space: Space) -> list[str]:
    """Return what stands for options that were left out, each with the option that changes it."""
    sentences = []
    if request.mixed_precision == "auto" and request.plan is None:
        stored = "Units compute in the dtype that they are stored in (--param-dtype)."
        sentences.append(stored if space.choices.mixed_precision is None else BF16)
    if space.optimizer == "adamw" and request.optimizer is None:
        sentences.append("The optimizer is AdamW (--optimizer).")
    if request.sequence is None and space.workload.sequence > 1:
        sentences.append(LENGTH.format(space.workload.sequence))
    if space.microbatch is None and space.global_batch is None:
        sentences.append("A rank takes one sample in a forward (--microbatch).")
    return sentences


def best_plan(request: Request) -> Plan:
    """Return the plan of ``solve`` alone, which is small."""
    return solve(request).plan


def best_plan_for(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    device: Hardware,
    ranks: tuple[int, ...],
    choices: Options,
) -> Plan:
    """Return the fastest plan for the arguments of ``shard()``; ``ranks``: as ``Plan.ranks``."""
    name_of = {id(tensor): name for name, _, _, tensor in names.named_tensors(model, "parameters")}
    request = Request(
        model=model,
        hardware=device,
        ranks=math.prod(ranks) * ranks_along(choices, "tensor"),
        replicate=ranks[0] if len(ranks) == 2 else 1,
        microbatch=1,
        accumulation=1,
        optimizer=lambda copy: [_over(copy, optimizer, name_of) for optimizer in optimizers],
        **vars(choices),
    )
    space, _ = space_of(request)
    with Simulations(space.workload, None if process.is_planners() else 0).running() as simulations:
        return choose(space, simulations=simulations).plan


def _over(model: nn.Module, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` without state over the parameters of a copy of its model, of the same names."""
    parameters = {name: tensor for name, _, _, tensor in names.named_tensors(model, "parameters")}
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(made).update({key: value for key, value in vars(optimizer).items() if "_hooks" not in key})
    _torch.make_hookable(made)
    made.state, made.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        members = [parameters[name] for member in group["params"] if (name := name_of.get(id(member))) in parameters]
        if members:
            made.param_groups.append({**group, "params": members})
    return made


def space_of(request: Request, shared: Simulations | None = None) -> tuple[Space, bool]:
    """Return the plans that are asked for, and whether there is anything to choose; ``shared`` have the workload."""
    device, choices, optimizer, plan = request.device(), request.choices(), request.optimizer, request.plan
    workload = None if shared is None else shared.simulator.workload
    workload = workload or workload_of(
        request.model,
        sequence=request.sequence,
        optimizer=optimizer,
        batch=request.batch,
        loss=request.loss,
        clip=request.clip,
        storage_dtype=request.storage_dtype,
    )
    microbatch = request.microbatch or _samples(request.batch)
    ranks_per_node = request.ranks_per_node or min(device.ranks_per_node, request.ranks)
    if request.host_memory is not None:
        share = parse_size("host_memory", request.host_memory) // ranks_per_node
        device = dataclasses.replace(device, host_memory_bytes=share)
    is_open = is_free(choices.reshard_after_forward) or is_free(choices.activation_checkpointing)
    is_open |= choices.offload == "auto"
    is_open |= request.global_batch is not None and (microbatch is None or request.accumulation is None)
    if request.offload is None and is_open:
        choices = choices.replace(offload="auto")
    replicate = request.replicate
    if plan is not None:
        choices = choices.on(sizes_of(plan)).replace(experts=plan.experts)
        replicate = replicate or (plan.ranks[0] if len(plan.ranks) == 2 else None)
    space = Space(
        workload=dataclasses.replace(workload, score=request.score, beside=request.beside, snapshots=request.snapshots),
        hardware=device,
        ranks=request.ranks,
        ranks_per_node=ranks_per_node,
        budget=choices.budget(),
        choices=choices,
        replicate=replicate or (None if is_open else 1),
        microbatch=microbatch,
        accumulation=request.accumulation,
        global_batch=request.global_batch,
        optimizer="adamw" if optimizer is None else optimizer if isinstance(optimizer, str) else "own",
        imbalance=request.imbalance,
        pipe=request.pipe(),
    )
    return space, is_open


def _samples(batch: Any) -> int | None:
    """Return how many samples a batch, or its size, holds; None if it is neither."""
    if is_size(batch):
        return int(batch[0])
    return next((len(tensor) for tensor in _torch.tensors_in(batch) if tensor.ndim), None)


def _warnings(request: Request, space: Space, simulator: Simulator) -> list[str]:
    """Return warnings, one sentence each; raise ValueError for what would fail in the first step."""
    settled = {key: getattr(DEFAULTS, key) for key, value in vars(space.choices).items() if is_free(value)}
    choices, mesh = space.choices.replace(**settled), space.cluster(space.replicate or 1).mesh
    job = Job(space.workload, mesh, microbatch=space.microbatch or 1, plan=request.plan, choices=choices)
    problems = preflight(job, simulator)
    errors = [str(problem).removeprefix("error: ") for problem in problems if problem.severity == "error"]
    if not errors:
        return [str(problem).removeprefix("warning: ") for problem in problems]
    message = errors[0] + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")
    is_of_dtypes = "dtype" in message or "scalar type" in message
    if is_of_dtypes and request.mixed_precision == "auto" and choices.mixed_precision is not None:
        message += "; to compute in bfloat16 was assumed: try --param-dtype fp32"
    if "--sequence" not in message:  # a sequence that the model is not made for may be what fails
        longer = (sentence for sentence in space.workload.assumptions if sentence.startswith(LONGER))
        message = "; ".join([message, *longer])
    raise ValueError(message)


def _of_pipeline(space: Space, plan: Plan | None, workers: int | None) -> Study:
    """Return the study of a pipeline: with the least recomputation that fits, if that is free.

    Raises NothingFits if it is, and nothing does.
    """
    many = space.accumulation or (None if space.global_batch else 2 * space.pipe.stages)
    space = dataclasses.replace(space, microbatch=space.microbatch or 1, accumulation=many)
    (batch,) = space.batches()
    setting = Setting(space.replicate or 1, *batch, "cpu" if space.choices.offload == "cpu" else "none")
    free = plan is None and is_free(space.choices.activation_checkpointing)
    cluster = space.cluster(setting.replicate)
    jobs = []
    for word in RECOMPUTE if free else RECOMPUTE[:1]:
        settled = space.settled(reshard_after_forward="default", activation_checkpointing=word)
        chosen = dataclasses.replace(space, choices=settled.replace(offload=setting.offload))
        jobs.append(chosen.job(plan, setting))
    with pipelining.ends_of(jobs[0], space.pipe, workers) as ends:
        for job in jobs:
            must_fit = free and job is not jobs[-1]
            study = pipelining.study_pipeline(job, cluster, space.pipe, ends, space.budget, must_fit=must_fit)
            if study is not None and (study.forecast.fits or not free):
                return study
    assert study is not None
    forecast = study.forecast
    raise NothingFits(
        f"nothing fits: a stage of {space.pipe.stages} reserves {size(forecast.peak_reserved_bytes)} even if all is "
        f"recomputed, of {size(forecast.budget_bytes)}: give more ranks, or a smaller microbatch",
        study,
    )


def _of_one_plan(space: Space, plan: Plan | None, shared: Simulations) -> Study:
    """Return the study of a plan; None: of the one that the options mean."""
    space = dataclasses.replace(space, microbatch=space.microbatch or 1, accumulation=space.accumulation or 1)
    (batch,) = space.batches()
    setting = Setting(space.replicate or 1, *batch, space.offloads[0])
    cluster, simulator = space.cluster(setting.replicate), shared.simulator
    memory = space.budget or cluster.hardware.memory_bytes
    resolved = simulator.resolve(plan or space.choices, cluster.mesh, memory)
    return space.study(resolved, setting, space.budget, simulator)


# Axes

_TRIED = tuple(axis for axis in reversed(AXES) if axis.is_option or axis.place == "stages")
"""Axes in the order in which they are tried, from the innermost outwards."""


@dataclass(frozen=True)
class _Trial:
    """Axes with their best plan, or with the one that lacks the least."""

    request: Request
    study: Study
    error: NothingFits | None = None
    """None also where nothing was to be chosen: a given plan is forecast, whether it fits or not."""

    @property
    def lack(self) -> int:
        """Bytes by which it does not fit; 0 if it does."""
        return self.study.forecast.lacking_bytes

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller for better: the bytes that it lacks, then its speed."""
        return self.lack, -self.study.forecast.tokens_per_second_per_rank

    def __str__(self) -> str:
        forecast = self.study.forecast
        speed = f"{forecast.tokens_per_second_per_rank:,.0f} {forecast.counted}/s"
        return f"{_axes_text(self.request)} {f'lacks {size(self.lack)}' if self.lack else speed}"


def on_best_axes(
    request: Request,
    solve: Callable[..., Study],
    progress: Progress,
    expect: Callable[[Iterator[Request]], object] = lambda requests: None,
) -> Study:
    """Return the study of the fastest plan of all axes that were tried; Ctrl-C takes the best so far.

    ``solve``: (request, faster_than=tokens a second or None) → study, see ``choose``. ``expect``: gets, before a
    request is solved, those that come next if it is no better, of which the first that is not refused will be solved.

    Raises NothingFits, where plans are searched, if nothing does on any axes: that of those that lack the least.
    """

    def tried(request: Request, faster_than: float = 0.0) -> _Trial:
        try:
            return _Trial(request, solve(request, faster_than=faster_than))
        except NothingFits as error:
            return _Trial(request, error.study, error)

    request = dataclasses.replace(request, axes=False)
    expect(_larger(request, _TRIED))
    best = tried(request)
    others: list[_Trial | str] = []
    try:
        for a, axis in enumerate(_TRIED):
            for larger in _doubled(best.request, axis, fits=not best.lack):
                progress(f"{_axes_text(larger)}; the best so far: {best}")
                if not best.lack:
                    expect(_larger(best.request, _TRIED[a + 1 :]))
                forecast = best.study.forecast
                try:
                    trial = tried(larger, 0.0 if best.lack else forecast.tokens_per_second_per_rank)
                except NotFaster as slower:
                    others.append(f"{_axes_text(larger)} about {slower.args[0]:,.0f} {forecast.counted}/s")
                    break
                except ValueError:
                    break
                if trial.rank >= best.rank:
                    others.append(trial)
                    break
                others.append(best)
                best = trial
    except KeyboardInterrupt:
        if best.error is not None:
            raise
    if best.error is not None:
        return solve(best.request)  # raises with the cheapest change that would fit
    text = _axes_text(best.request)
    reason = f"{text[0].upper()}{text[1:]}: {'; '.join(map(str, others)) or 'no axis can be shared by more ranks'}."
    return dataclasses.replace(best.study, reasons=(reason, *best.study.reasons))


def _larger(request: Request, axes: Iterable[Axis]) -> Iterator[Request]:
    """Yield what ``_doubled`` yields, for some axes one after the other, of a request whose plan fits."""
    return itertools.chain.from_iterable(_doubled(request, axis, fits=True) for axis in axes)


def _doubled(request: Request, axis: Axis, *, fits: bool) -> Iterator[Request]:
    """Yield requests with 2, 4, … times as many ranks on an axis, up to what the ranks and a node allow.

    ``fits``: whether the plan of ``request`` does.
    """
    if axis.place == "stages" and fits and not (request.accumulation or request.global_batch):
        return
    node = request.ranks_per_node or request.device().ranks_per_node
    ranks = 2 * ranks_along(request, axis.name)
    while ranks <= (min(node, request.ranks) if axis.in_node else request.ranks):
        value: Any = {"ranks": ranks, "sequence": True} if axis.in_node else ranks
        yield dataclasses.replace(request, **{axis.name: value})
        ranks *= 2


def _axes_text(request: Request) -> str:
    shared = [f"{axis.name} {ranks}" for axis in _TRIED if (ranks := ranks_along(request, axis.name)) > 1]
    return ", ".join(shared) or "nothing but shards shared"


# Sliders of the page

FACTORS = (0.5, 1, 2)
SLIDERS = ("ranks", "sequence", "microbatch")


def grid(request: Request, study: Study, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Return the sliders' values and the forecast of each point, or why it has none: plain data.

    The plan's words for resharding, activation checkpointing and offload hold at all points, so nothing is chosen
    anew. Each point is simulated.
    """
    forecast, plan = study.forecast, study.plan
    start = tuple(getattr(forecast, axis) for axis in SLIDERS)
    values = [sorted({max(1, int(value * factor)) for factor in FACTORS}) for value in start]
    fixed = dataclasses.replace(
        request,
        plan=None,
        reshard_after_forward=plan.reshard_after_forward,
        activation_checkpointing=plan.activation_checkpointing,
        offload=plan.offload,
        accumulation=forecast.accumulation,
        global_batch=None,
    )
    points: list[dict[str, Any]] = []
    for point in itertools.product(*values):
        progress(f"Point {len(points) + 1} of {len(FACTORS) ** len(SLIDERS)} of the sliders")
        changed: dict[str, Any] = dict(zip(SLIDERS, point, strict=True))
        try:
            solved = study if point == start else solve(dataclasses.replace(fixed, **changed))
            points.append(dataclasses.asdict(solved.forecast))
        except ValueError as error:
            points.append({"problem": str(error)})
    return {
        "axes": [{"name": axis, "values": column} for axis, column in zip(SLIDERS, values, strict=True)],
        "start": [column.index(value) for column, value in zip(values, start, strict=True)],
        "points": points,
    }
