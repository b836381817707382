"""Answer a request with a study: of the plan that was given, the one that the options mean, or the best of a search."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.axes import ranks_along, sizes_of
from trueshard.model import names
from trueshard.options import DEFAULTS, Options, is_free
from trueshard.planner import pipelining, process
from trueshard.planner.hardware import Hardware
from trueshard.planner.inputs.workloads import is_size, workload_of
from trueshard.planner.planning import Request
from trueshard.planner.search import axes
from trueshard.planner.search.evaluator import Simulations
from trueshard.planner.search.search import checked, choose, objects_frozen
from trueshard.planner.search.space import RECOMPUTE, Setting, Space
from trueshard.planner.simulation.preflight import preflight
from trueshard.planner.workers import Workers
from trueshard.planner.workload import Job, NothingFits, Study
from trueshard.plans import Plan
from trueshard.text import size

FREE = Options(reshard_after_forward="auto", activation_checkpointing="auto")
"""Defaults of ``trueshard.plan``."""


def solve(request: Request, progress: Callable[[str], object] = lambda line: None, *, workers: int | None = 0) -> Study:
    """Return the study of the best plan; raises as ``trueshard.plan``.

    ``progress`` gets a line for each plan; ``workers``: as of ``choose``, 0 except in the planner's process.
    """
    if request.axes:
        if request.plan is not None:
            raise ValueError("axes: a given plan has its axes; leave out axes, or the plan")
        return axes.choose(request, functools.partial(solve, progress=progress, workers=workers), progress)
    request.choices().replace(memory=None).check_alone(request.plan, defaults=FREE)
    space, is_open = space_of(request)
    check = functools.partial(_warnings, request, space)
    workers = None if process.is_planners() else workers
    if space.pipe.stages > 1:
        with Workers({"check": check}, workers) as side:
            study = checked(side, lambda: _of_pipeline(space, request.plan, workers))
    elif is_open and request.plan is None:
        study = choose(space, progress, workers=workers, check=check)
    else:
        study = _of_one_plan(space, request.plan, workers, check)
    return dataclasses.replace(study, assumptions=(*_left_out(request, space), *study.assumptions))


def _warnings(request: Request, space: Space) -> list[str]:
    """Return the warnings of ``_preflight``; an error that may come of what was assumed says so."""
    try:
        return _preflight(space, request.plan)
    except ValueError as error:
        of_dtypes = "dtype" in str(error) or "scalar type" in str(error)
        if not of_dtypes or request.mixed_precision != "auto" or space.choices.mixed_precision is None:
            raise
        raise ValueError(f"{error}; to compute in bfloat16 was assumed: try --param-dtype fp32") from None


def _left_out(request: Request, space: Space) -> list[str]:
    """Return what stands for options that were left out, each with the option that changes it."""
    sentences = []
    if request.mixed_precision == "auto" and request.plan is None:
        dtypes = "bfloat16 (--param-dtype), and gradients are reduced in float32 (--reduce-dtype)"
        stored = "the dtype that they are stored in (--param-dtype)"
        sentences.append(f"Units compute in {stored if space.choices.mixed_precision is None else dtypes}.")
    if space.optimizer == "adamw" and request.optimizer is None:
        sentences.append("The optimizer is AdamW (--optimizer).")
    if request.sequence is None and space.workload.sequence > 1:
        sentences.append(f"A sample has {space.workload.sequence:,} tokens (--sequence).")
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
    return choose(space, workers=None if process.is_planners() else 0).plan


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


def space_of(request: Request) -> tuple[Space, bool]:
    """Return the plans that are asked for, and whether there is anything to choose."""
    device, choices, optimizer, plan = request.device(), request.choices(), request.optimizer, request.plan
    workload = workload_of(
        request.model,
        sequence=request.sequence,
        optimizer=optimizer,
        batch=request.batch,
        loss=request.loss,
        clip=request.clip,
        storage_dtype=request.storage_dtype,
    )
    workload = dataclasses.replace(workload, score=request.score, beside=request.beside)
    microbatch = request.microbatch or _samples(request.batch)
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
        workload=workload,
        hardware=device,
        ranks=request.ranks,
        ranks_per_node=request.ranks_per_node or min(device.ranks_per_node, request.ranks),
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


def _preflight(space: Space, plan: Plan | None) -> list[str]:
    """Return warnings, one sentence each; raise ValueError for what would fail in the first step."""
    settled = {key: getattr(DEFAULTS, key) for key, value in vars(space.choices).items() if is_free(value)}
    choices = space.choices.replace(**settled)
    mesh = space.cluster(space.replicate or 1).mesh
    problems = preflight(Job(space.workload, mesh, microbatch=space.microbatch or 1, plan=plan, choices=choices))
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ValueError(f"{str(errors[0]).removeprefix('error: ')}{more}")
    return [str(problem).removeprefix("warning: ") for problem in problems]


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


def _of_one_plan(space: Space, plan: Plan | None, workers: int | None, check: Callable[[], list[str]]) -> Study:
    """Return the study of a plan; None: of the one that the options mean."""
    space = dataclasses.replace(space, microbatch=space.microbatch or 1, accumulation=space.accumulation or 1)
    (batch,) = space.batches()
    setting = Setting(space.replicate or 1, *batch, space.offloads[0])
    simulations = Simulations(space.workload, workers, check)
    with objects_frozen():
        simulations.prepare()
        with simulations.workers as side:
            return checked(side, lambda: space.study(plan, setting, space.budget, simulations.simulator))
