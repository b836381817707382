"""Find the fastest plan that fits, of all that a space allows.

Probes tell what each unit costs (see ``costs``); from that every plan's time and memory is predicted, and the one that
is expected to be the fastest of those that fit is studied exactly. What the study tells corrects the prediction (what
the allocator reserves above what is live is not predicted at all), and the next one is chosen. The search ends when no
other plan is expected to be faster by more than ``ENOUGH``, or when its time is over and something fits. What it
returns was studied.

[Note: mixtures of two] Plans are compared that say the same for all blocks. On their lower convex hull of time over
memory, the first that fits is followed by a faster one that does not. Between the two, blocks go over one after the
other, the first ones first: their activations live longest. Time and memory are nearly sums over units, so a mixture of
more than two would be no better than a point of the hull.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator

from trueshard.options import Offload
from trueshard.planner.process import Workers
from trueshard.planner.search import explain
from trueshard.planner.search.evaluator import MARGIN, Evaluator
from trueshard.planner.search.space import Candidate, Setting, Space
from trueshard.planner.workload import Alternative, Study

ENOUGH = 5e-3
"""Relative gain in speed for which another plan is worth a study, and a mixture of two is worth it."""

UNCERTAIN = 0.02
"""Part of its memory by which a plan that is expected not to fit is still studied where no other fits."""

SECONDS = 5.5
"""Seconds after which no further study begins once a plan fits: with the start of Python, ten for the command."""


def choose(
    space: Space,
    progress: Callable[[str], object] = lambda line: None,
    *,
    workers: int | None = 0,
    check: Callable[[], list[str]] = list,
) -> Study:
    """Return the fastest plan of a space that fits; of equally fast ones that with the least memory.

    Interrupted by Ctrl-C, it is the best so far, if any.

    Args:
        progress: gets a line whenever a plan was studied.
        workers: processes that do the work; 0: this one does, None: one for each of at most two cores.
        check: runs beside the search; returns assumptions, and its error comes before one of the search.

    Raises:
        NothingFits: by how much, and the cheapest change that would.
        ValueError: the space contradicts itself, or what ``shard()`` refuses.
    """
    with objects_frozen():
        try:
            evaluator = Evaluator(space, progress, workers, check)
        except Exception:
            check()
            raise
        with evaluator.workers:
            return checked(evaluator.workers, lambda: _best_study(evaluator, time.perf_counter() + SECONDS))


def checked(workers: Workers, make: Callable[[], Study]) -> Study:
    """Return a study with the assumptions that the task ``check`` returns, which runs beside it.

    An error of the check is raised in the place of one of the study: it names what is wrong with the user's model.
    """
    checking = workers.start("check")
    try:
        study = make()
    except Exception:
        checking()
        raise
    return dataclasses.replace(study, assumptions=(*study.assumptions, *checking()))


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """Exempt objects that exist now from the garbage collection before each simulation."""
    if gc.get_freeze_count():  # by the user, whose objects must stay frozen
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _best_study(evaluator: Evaluator, until: float) -> Study:
    """Search until there is a best candidate, and return its study."""
    explain.check_largest_unit(evaluator)
    remarks: tuple[str, ...] = ()
    try:
        evaluator.start_probes()
        for offload in evaluator.space.offloads:
            if evaluator.best is None:
                _search_with(evaluator, offload, until)
    except KeyboardInterrupt:
        if evaluator.best is None:
            raise
        remarks = (f"Interrupted: the best of the {len(evaluator.forecasts)} plans that were compared until then.",)
    if (best := evaluator.best) is None:
        raise explain.nothing_fits(evaluator)
    alternatives = [
        Alternative(explain.described(evaluator, candidate), forecast)
        for candidate, forecast in evaluator.forecasts.items()
        if candidate != best
    ]
    study = evaluator.studies[best]
    reasons = explain.reasons(evaluator, proposals(evaluator, best.setting.offload))
    return dataclasses.replace(
        study, reasons=reasons, assumptions=(*study.assumptions, *remarks), alternatives=alternatives
    )


def _search_with(evaluator: Evaluator, offload: Offload, until: float) -> None:
    """Study candidates until none is expected to be better, or none to fit."""
    while evaluator.best is None or time.perf_counter() < until:
        candidates = proposals(evaluator, offload, until - time.perf_counter())
        if candidates:
            candidate = min(candidates, key=evaluator.order)
            worth = evaluator.best_cost() * (1 - ENOUGH)
            if candidate in evaluator.forecasts or evaluator.expected(candidate).cost >= worth:
                return
        else:
            candidate = explain.frugal(evaluator, offload)
            if candidate in evaluator.forecasts:
                candidate = _smallest_left(evaluator, offload)
                expected = evaluator.expected(candidate)
                if expected.is_exact or expected.excess > MARGIN + expected.reserved * UNCERTAIN:
                    return
        evaluator.evaluate(candidate)


def proposals(evaluator: Evaluator, offload: Offload, seconds: float = math.inf) -> list[Candidate]:
    """Return of each setting and grouping of units the candidate that is expected to be the fastest that fits, if any.

    Mixtures are among them where a study of one is expected to take no more than ``seconds``.
    """
    best = [_proposal(evaluator, *grouping, seconds) for grouping in evaluator.groupings(offload)]
    return [candidate for candidate in best if candidate is not None]


def _smallest_left(evaluator: Evaluator, offload: Offload) -> Candidate:
    """Return the candidate that takes the least memory, of those that were not studied if any."""
    every = [member for grouping in evaluator.groupings(offload) for member in evaluator.candidates(*grouping)]
    left = [candidate for candidate in every if candidate not in evaluator.forecasts]
    return min(left or every, key=lambda candidate: evaluator.expected(candidate).reserved)


def _proposal(evaluator: Evaluator, setting: Setting, split: bool, seconds: float) -> Candidate | None:
    """Return the candidate expected to be the fastest that fits, if any: see [Note: mixtures of two]."""

    def may_fit(candidate: Candidate) -> bool:
        return evaluator.expected(candidate).may_fit

    candidates = evaluator.candidates(setting, split)
    faster: Candidate | None = None
    for candidate in _hull(evaluator, candidates):
        if not may_fit(candidate):
            faster = candidate
            continue
        if faster is None:
            return candidate
        total, base = len(faster.differing(candidate)), faster
        count = 1 + bisect_left(range(1, total), True, key=lambda count: may_fit(base.followed_by(candidate, count)))
        mixture = faster.followed_by(candidate, count)
        gain = evaluator.expected(candidate).cost / evaluator.expected(mixture).cost - 1
        is_quick = mixture in evaluator.forecasts or evaluator.effort(mixture) <= seconds
        return mixture if gain > ENOUGH and is_quick else candidate
    # Of small models predictions are so near to each other that a study may have turned their order.
    return min(filter(may_fit, candidates), key=evaluator.order, default=None)


def _hull(evaluator: Evaluator, candidates: list[Candidate]) -> list[Candidate]:
    """Return the lower convex hull of time over memory, from the fastest to the one that takes the least memory."""
    hull: list[Candidate] = []

    def saved(one: Candidate, two: Candidate) -> float:
        """Return the bytes that a second more saves."""
        (faster, larger), (slower, smaller) = evaluator.predicted(one), evaluator.predicted(two)
        return (larger - smaller) / max(1e-12, slower - faster)

    for candidate in sorted(candidates, key=evaluator.predicted):
        if hull and evaluator.predicted(candidate)[1] >= evaluator.predicted(hull[-1])[1]:
            continue  # neither faster nor smaller
        while len(hull) > 1 and saved(hull[-2], hull[-1]) <= saved(hull[-2], candidate):
            hull.pop()
        hull.append(candidate)
    return hull
