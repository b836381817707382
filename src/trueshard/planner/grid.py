"""The same plan at other numbers of ranks, lengths and microbatches: a study for each point, nothing in between."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from trueshard.planner.choose_plan import solve
from trueshard.planner.planning import Request
from trueshard.planner.workload import Study

FACTORS = (0.5, 1, 2)


def grid(request: Request, found: Study, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """Return the axes' values and the forecast of each point, or why it has none: plain data.

    The plan's words for resharding, activation checkpointing and offload hold at all points, so nothing is chosen
    anew. Each point is simulated.
    """
    forecast, plan = found.forecast, found.plan
    axes = {
        "ranks": _around(forecast.ranks),
        "sequence": _around(forecast.sequence),
        "microbatch": _around(forecast.microbatch),
    }
    fixed = dataclasses.replace(
        request,
        plan=None,
        reshard_after_forward=plan.reshard_after_forward,
        activation_checkpointing=plan.activation_checkpointing,
        offload=plan.offload,
        accumulation=forecast.accumulation,
        global_batch=None,
    )
    points = []
    every = list(itertools.product(*axes.values()))
    for number, values in enumerate(every):
        progress(f"Point {number + 1} of {len(every)} of the sliders")
        changed: dict[str, Any] = dict(zip(axes, values, strict=True))
        if changed == {key: getattr(forecast, key) for key in axes}:
            points.append(_figures(found))
            continue
        try:
            points.append(_figures(solve(dataclasses.replace(fixed, **changed))))
        except ValueError as error:
            points.append({"problem": str(error)})
    start = [values.index(getattr(forecast, key)) for key, values in axes.items()]
    return {"axes": [{"name": key, "values": values} for key, values in axes.items()], "start": start, "points": points}


def _around(value: int) -> list[int]:
    return sorted({max(1, int(value * factor)) for factor in FACTORS})


def _figures(study: Study) -> dict[str, Any]:
    forecast = study.forecast
    return {
        "live": forecast.peak_live_bytes,
        "reserved": forecast.peak_reserved_bytes,
        "budget": forecast.budget_bytes,
        "fits": forecast.fits,
        "kinds": list(forecast.peak_by_kind.items()),
        "seconds": forecast.step_seconds,
        "tokens": forecast.tokens_per_second_per_rank,
        "mfu": forecast.mfu,
        "waiting": forecast.exposed_communication_seconds,
    }
