"""Find the fastest plan that fits, of all that a space allows.

Settings (replicas, microbatch, offload) are searched in the order of their lower bounds: the time with nothing freed
early and nothing recomputed. A setting that could not be faster than the best plan so far is left out; so is one whose
most frugal plan does not fit, and with it all larger microbatches. ``grid`` searches the candidates of one setting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import heapq
from bisect import bisect_left
from collections.abc import Iterator

from trueshard.planner.search import reasons
from trueshard.planner.search.grid import EXACT, branch_and_bound, count_grid, whole_grids
from trueshard.planner.search.space import RECOMPUTE, Evaluator, Setting, Space, batches, cost, node_size, slack
from trueshard.planner.workload import Alternative, Study
from trueshard.plans import Offload

STUDIES = 40
"""Candidates evaluated for each way to offload where blocks are counted; the uniform ones come on top."""


def choose(space: Space) -> Study:
    """Return the fastest plan of a space that fits; of equally fast ones that with the least memory.

    Where the units of the model have no more than ``grid.WHOLE`` candidates a setting, it is what trying all of them
    would find, if a smaller microbatch is never faster, and a plan that frees or recomputes more is never faster, nor
    larger by more than ``slack``. Where there are more, candidates are numbers of blocks, and gains below
    ``grid.ENOUGH`` are not searched for.

    Raises:
        NothingFits: by how much, and the cheapest change that would.
        ValueError: the space contradicts itself, or what ``shard()`` refuses.
    """
    with _objects_frozen():
        evaluator = Evaluator(space)
        reasons.check_largest_unit(evaluator)
        for offload in space.offloads:
            if evaluator.best is None:
                _search(evaluator, offload)
        if evaluator.best is None:
            raise reasons.nothing_fits(evaluator)
        _evaluate_uniform(evaluator, evaluator.best.setting)
        best = evaluator.best
        others = [
            Alternative(reasons.described(evaluator.plan(each), each), forecast)
            for each, forecast in evaluator.forecasts.items()
            if each != best
        ]
        found = evaluator.studies[best]
        return dataclasses.replace(found, reasons=reasons.reasons(evaluator), alternatives=others)


@contextlib.contextmanager
def _objects_frozen() -> Iterator[None]:
    """Exempt objects that exist now from the garbage collection before each simulation."""
    if gc.get_freeze_count():  # the user's own
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _search(evaluator: Evaluator, offload: Offload) -> None:
    limit = len(evaluator.forecasts) + STUDIES
    queue: list[tuple[float, list[Setting]]] = []

    def push(settings: list[Setting]) -> None:
        if settings:
            bound = cost(evaluator.evaluate(evaluator.uniform(settings[0], "never", "none")))
            heapq.heappush(queue, (bound, settings))

    for replicate in evaluator.replicas:
        settings = [Setting(replicate, size, times, offload) for size, times in batches(evaluator.space)]
        push(_that_may_fit(evaluator, settings))
    while queue:
        bound, settings = heapq.heappop(queue)
        if bound >= evaluator.best_cost() * (1 - EXACT):
            return
        _search_setting(evaluator, settings[0], limit)
        push(settings[1:])


def _that_may_fit(evaluator: Evaluator, settings: list[Setting]) -> list[Setting]:
    """Return the settings whose microbatch is not too large.

    A single microbatch stands apart: where gradients are accumulated they stay whole until the last.
    """

    def may_fit(setting: Setting) -> bool:
        forecast = evaluator.evaluate(evaluator.uniform(setting, "always", "full"))
        budget = forecast.budget_bytes
        return forecast.peak_live_bytes <= budget and forecast.peak_reserved_bytes <= budget + slack(forecast)

    single = [each for each in settings if each.accumulation == 1 and may_fit(each)]
    several = [each for each in settings if each.accumulation > 1]
    return single + several[bisect_left(several, True, key=may_fit) :]


def _search_setting(evaluator: Evaluator, setting: Setting, limit: int) -> None:
    if evaluator.evaluate(evaluator.uniform(setting, "never", "none")).fits:
        return
    grids = whole_grids(evaluator, setting)
    for grid in grids:
        branch_and_bound(grid, evaluator.evaluate, evaluator.best_cost)
    if grids:
        return

    def may_continue() -> bool:
        return len(evaluator.forecasts) < limit

    grid = count_grid(evaluator, setting)
    found = branch_and_bound(grid, evaluator.evaluate, evaluator.best_cost, may_continue)
    if found is not None and grid.is_coarse:
        grid = count_grid(evaluator, setting, around=found)
        branch_and_bound(grid, evaluator.evaluate, evaluator.best_cost, may_continue)


def _evaluate_uniform(evaluator: Evaluator, setting: Setting) -> None:
    """Evaluate the candidates that two words describe, for the reader to compare."""
    node = node_size(evaluator.space, setting.replicate)
    words: list[str | int] = ["default", "always", "never"]
    for word in words if node is None else [*words, node]:
        for recompute in RECOMPUTE:
            evaluator.evaluate(evaluator.uniform(setting, word, recompute))
