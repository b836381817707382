"""Find the fastest plan that fits, of all that a space allows.

Settings (replicas, microbatch, offload) are searched in the order of their lower bounds: the time with nothing freed
early and nothing recomputed. A setting that could not be faster than the best plan so far is left out; so is one whose
most frugal plan does not fit, and with it all larger microbatches.

In one setting, time and memory of a plan are nearly sums over its blocks. Where sums are to be made small under one
limit, the best is a mixture of two choices for a block: one that alone is faster but does not fit, and one that fits.
So the uniform plans, of one choice for all blocks, tell which pairs are worth mixing, and how many blocks each gets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator

from trueshard.planner.search import reasons
from trueshard.planner.search.space import (
    RECOMPUTE,
    Candidate,
    Evaluator,
    Setting,
    Space,
    batches,
    cost,
    reshard_words,
    slack,
)
from trueshard.planner.workload import Alternative, Study
from trueshard.plans import Offload

WHOLE = 48
"""Candidates of one setting up to which each unit is chosen by itself, and all are evaluated."""

ENOUGH = 5e-3
"""Relative gain in speed below which the search stops."""


def choose(space: Space, progress: Callable[[str], object] = lambda line: None) -> Study:
    """Return the fastest plan of a space that fits; of equally fast ones that with the least memory.

    Where the units of the model have no more than ``WHOLE`` candidates a setting, it is what trying all of them would
    find, if a smaller microbatch is never faster. Interrupted by Ctrl-C, it is the best so far, if any.

    ``progress`` gets a line whenever a plan was evaluated.

    Raises:
        NothingFits: by how much, and the cheapest change that would.
        ValueError: the space contradicts itself, or what ``shard()`` refuses.
    """
    with _objects_frozen():
        evaluator = Evaluator(space, progress)
        reasons.check_largest_unit(evaluator)
        told: tuple[str, ...] = ()
        try:
            for offload in space.offloads:
                if evaluator.best is None:
                    _search(evaluator, offload)
            if evaluator.best is None:
                raise reasons.nothing_fits(evaluator)
            _evaluate_uniform(evaluator, evaluator.best.setting)
        except KeyboardInterrupt:
            if evaluator.best is None:
                raise
            told = (f"Interrupted: the best of the {len(evaluator.forecasts)} plans that were compared until then.",)
        best = evaluator.best
        others = [
            Alternative(reasons.described(evaluator.plan(each), each), forecast)
            for each, forecast in evaluator.forecasts.items()
            if each != best
        ]
        found = evaluator.studies[best]
        return dataclasses.replace(
            found,
            reasons=reasons.reasons(evaluator),
            assumptions=(*found.assumptions, *told),
            alternatives=others,
        )


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
        if bound >= _worth(evaluator):
            return
        _search_setting(evaluator, settings[0])
        push(settings[1:])


def _worth(evaluator: Evaluator) -> float:
    """Return the seconds a token below which another candidate is worth a look."""
    return evaluator.best_cost() * (1 - ENOUGH)


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


def _search_setting(evaluator: Evaluator, setting: Setting) -> None:
    if evaluator.evaluate(evaluator.uniform(setting, "never", "none")).fits:
        return
    options = evaluator.options(setting.replicate)
    if sum(math.prod(map(len, each)) for each in options.values()) <= WHOLE:
        for split, each in options.items():
            for values in itertools.product(*each):
                evaluator.evaluate(Candidate(setting, split, values))
        return
    lacking: list[Candidate] = []
    fitting: list[Candidate] = []
    for recompute in RECOMPUTE:
        for word in reshard_words(evaluator.space, setting.replicate):
            candidate = evaluator.uniform(setting, word, recompute)
            forecast = evaluator.evaluate(candidate)
            (fitting if forecast.fits else lacking).append(candidate)
            if forecast.fits or cost(forecast) >= _worth(evaluator):
                break  # those that free more are slower
    for fast, frugal in sorted(itertools.product(lacking, fitting), key=lambda pair: _expected(evaluator, *pair)):
        _mix(evaluator, fast, frugal)


def _expected(evaluator: Evaluator, fast: Candidate, frugal: Candidate) -> tuple[float, float]:
    """Return the seconds a token of the mixture of two that just fits, and the part, 0 to 1, that is the second."""
    lacks, spare = evaluator.excess(fast), -evaluator.excess(frugal)
    share = max(0, lacks) / max(1, lacks + spare)
    a, b = (cost(evaluator.forecasts[each]) for each in (fast, frugal))
    return a + share * (b - a), share


def _mix(evaluator: Evaluator, fast: Candidate, frugal: Candidate) -> None:
    """Find how few blocks need the frugal candidate's choice, by the false position of their memory."""
    blocks = sum(unit.kind == "block" for unit in evaluator.units(frugal))
    low, high = (0, fast), (blocks, frugal)
    while high[0] - low[0] > 1:
        seconds, share = _expected(evaluator, low[1], high[1])
        if seconds >= _worth(evaluator):
            return
        step = math.ceil((high[0] - low[0]) * share)
        count = min(low[0] + max(1, step), high[0] - 1)
        between = count, evaluator.mixed(fast, frugal, count)
        if evaluator.evaluate(between[1]).fits:
            high = between
        else:
            low = between


def _evaluate_uniform(evaluator: Evaluator, setting: Setting) -> None:
    """Evaluate the candidates that two words describe, for the reader to compare."""
    for word in reshard_words(evaluator.space, setting.replicate):
        for recompute in RECOMPUTE:
            evaluator.evaluate(evaluator.uniform(setting, word, recompute))
