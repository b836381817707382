"""One plan at other numbers of ranks, lengths and microbatches: a study for each point, nothing in between."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from trueshard.planner.choose_plan import solve
from trueshard.planner.planning import Request
from trueshard.planner.workload import Study

FACTORS = (0.5, 1, 2)
AXES = ("ranks", "sequence", "microbatch")


def grid(request: Request, study: Study, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """Return the axes' values and the forecast of each point, or why it has none: plain data.

    The plan's words for resharding, activation checkpointing and offload hold at all points, so nothing is chosen
    anew. Each point is simulated.
    """
    forecast, plan = study.forecast, study.plan
    start = tuple(getattr(forecast, axis) for axis in AXES)
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
        progress(f"Point {len(points) + 1} of {len(FACTORS) ** len(AXES)} of the sliders")
        changed: dict[str, Any] = dict(zip(AXES, point, strict=True))
        try:
            points.append(_figures(study if point == start else solve(dataclasses.replace(fixed, **changed))))
        except ValueError as error:
            points.append({"problem": str(error)})
    return {
        "axes": [{"name": axis, "values": column} for axis, column in zip(AXES, values, strict=True)],
        "start": [column.index(value) for column, value in zip(values, start, strict=True)],
        "points": points,
    }


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
