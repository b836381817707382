"""Forecasts of a plan by imbalance of experts, each simulated, up to the largest that is possible.

Then all tokens go to the experts of one rank, or, where a token has more experts than a rank, as many of each token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

from trueshard.planner.choose_plan import Progress, shared_simulations, solve, space_of
from trueshard.planner.planning import Request
from trueshard.planner.search.evaluator import Simulations
from trueshard.planner.search.search import checked
from trueshard.planner.search.space import Setting
from trueshard.planner.simulation.simulate import Short
from trueshard.planner.workload import Study
from trueshard.text import size

STEPS = (1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0)

NEAR = 1.1
"""Ratio of an imbalance that does not fit to one that does at which the latter is near enough to the largest."""


def solve_with_imbalances(
    request: Request, progress: Progress = lambda line: None, *, whole: bool = True, workers: int | None = 0
) -> Study:
    """Return ``choose_plan.solve``'s study with its imbalances, made in the same processes; see ``with_imbalances``."""
    with shared_simulations(request, workers) as shared:
        shared.run_ahead = functools.partial(_at_largest, shared)
        study = checked(shared, lambda: solve(request, progress, workers=workers, shared=shared))
        return with_imbalances(request, study, progress, whole=whole, workers=workers, shared=shared)


def _at_largest(shared: Simulations, shorts: Sequence[Short]) -> Sequence[Short]:
    """Return the models of a search's first study, which is mostly that of the best plan, at the largest imbalance."""
    probes = (task() for tasks, _ in shared.probes.values() for task in tasks.values())
    largest = max((probe.largest_imbalance for probe in probes), default=1.0)
    jobs = (dataclasses.replace(short.job, imbalance=largest) for short in shorts)
    changed = (dataclasses.replace(short, job=job) for short, job in zip(shorts, jobs, strict=True))
    return [short for short in changed if short.plan.experts > 1 and largest > 1]


def with_imbalances(
    request: Request,
    study: Study,
    progress: Progress,
    *,
    whole: bool = True,
    workers: int | None = 0,
    shared: Simulations | None = None,
) -> Study:
    """Return a study of ``request`` with its plan's forecasts by imbalance, where ranks share experts (no pipeline's).

    ``whole``: at all ``STEPS``; else at the ends, and where the largest does not fit, at those between.
    ``workers``, ``shared``: as of ``choose_plan.solve``.
    """
    plan, forecast, largest = study.plan, study.forecast, study.trace.largest_imbalance
    if plan.experts == 1 or forecast.pipeline > 1:
        return study
    is_bf16 = {unit.dtype for unit in plan.units} == {"bfloat16"}  # perhaps chosen, where nothing else fits
    dtype = request.storage_dtype or ("bf16" if is_bf16 else None)
    if dtype != request.storage_dtype:
        shared = None  # another model
    space, _ = space_of(dataclasses.replace(request, plan=plan, axes=False, storage_dtype=dtype), shared)
    setting = Setting(space.replicate or 1, forecast.microbatch, forecast.accumulation, space.offloads[0])
    points = {space.imbalance: forecast}
    wanted = [*(step for step in STEPS if step < largest and (whole or step == 1)), largest]
    fits = fails = 0.0
    own = contextlib.nullcontext(shared) if shared is not None else Simulations(space.workload, workers).running()
    with own as simulations:
        while wanted:
            if (imbalance := wanted.pop(0)) not in points:
                progress(f"Imbalance {imbalance:g} of experts")
                changed = dataclasses.replace(space, imbalance=imbalance)
                points[imbalance] = changed.study(plan, setting, space.budget, simulations.simulator).forecast
            fails = min((at for at, point in points.items() if not point.fits), default=0.0)
            fits = max((at for at in points if not fails or at < fails), default=0.0)
            if not wanted and fits and fails > NEAR * fits:
                wanted = [round((fits + fails) / 2, 2)]
    edge = f"it does up to an imbalance of {fits:g}, and at {fails:g} no more" if fits else "it does at no imbalance"
    reason = (
        f"With the most tokens that can go to its experts, {largest:g} times the mean, the plan reserves "
        f"{size(points[largest].peak_reserved_bytes)} and {f'does not fit; {edge}' if fails else 'fits'}."
    )
    every = tuple(sorted(points.items()))
    return dataclasses.replace(study, imbalances=every, reasons=(*study.reasons, reason))
