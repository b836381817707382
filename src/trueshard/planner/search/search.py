"""Find the fastest plan that fits, of all that a space allows.

Probes tell what each unit costs (see ``costs``); from that every plan's time and memory is predicted, and the one that
is expected to be the fastest of those that fit is studied exactly. What the study tells corrects the prediction (what
the allocator reserves above what is live is not predicted at all), and the next one is chosen. The search ends when no
other plan is expected to be faster by more than ``ENOUGH``, or when its time is over and something fits. What it
returns was studied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator

from trueshard.options import Offload
from trueshard.planner.search import explain
from trueshard.planner.search.evaluator import MARGIN, Evaluator
from trueshard.planner.search.frontier import ENOUGH, frugal, proposal
from trueshard.planner.search.space import Candidate, Setting, Space, batches
from trueshard.planner.workload import Alternative, Study

UNCERTAIN = 0.02
"""Part of its memory by which a plan that is expected not to fit is still studied where no other fits."""

SECONDS = 5.5
"""Seconds after which no further study begins once a plan fits: with the start of Python, ten for the command."""


def choose(
    space: Space,
    progress: Callable[[str], object] = lambda line: None,
    *,
    seconds: float = SECONDS,
    workers: int | None = 0,
    check: Callable[[], list[str]] = list,
) -> Study:
    """Return the fastest plan of a space that fits; of equally fast ones that with the least memory.

    Interrupted by Ctrl-C, it is the best so far, if any.

    Args:
        space: what is asked for.
        progress: gets a line whenever a plan was studied.
        seconds: after which no further study begins, once a plan fits.
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
            checking = evaluator.workers.start("check")
            try:
                told = _searched(evaluator, time.perf_counter() + seconds)
            except Exception:
                evaluator.workers.result(checking)
                raise
            return _with_reasons(evaluator, [*told, *evaluator.workers.result(checking)])


def _searched(evaluator: Evaluator, until: float) -> list[str]:
    """Search until there is a best candidate; return what is to be said of it."""
    explain.check_largest_unit(evaluator)
    try:
        evaluator.start_probes()
        for offload in evaluator.space.offloads:
            if evaluator.best is None:
                _search(evaluator, offload, until)
    except KeyboardInterrupt:
        if evaluator.best is None:
            raise
        return [f"Interrupted: the best of the {len(evaluator.forecasts)} plans that were compared until then."]
    if evaluator.best is None:
        raise explain.nothing_fits(evaluator)
    return []


def _with_reasons(evaluator: Evaluator, told: list[str]) -> Study:
    best = evaluator.best
    assert best is not None
    others = [
        Alternative(explain.described(evaluator.plan(each), each), forecast)
        for each, forecast in evaluator.forecasts.items()
        if each != best
    ]
    found = evaluator.studies[best]
    return dataclasses.replace(
        found,
        reasons=explain.reasons(evaluator),
        assumptions=(*found.assumptions, *told),
        alternatives=others,
    )


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """Exempt objects that exist now from the garbage collection before each simulation."""
    if gc.get_freeze_count():  # the user's own
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _search(evaluator: Evaluator, offload: Offload, until: float) -> None:
    groupings = [
        (Setting(replicate, size, times, offload), split)
        for replicate in evaluator.replicas
        for size, times in batches(evaluator.space)
        for split in evaluator.bases(replicate)
    ]
    while evaluator.best is None or time.perf_counter() < until:
        left = until - time.perf_counter()
        found = [each for grouping in groupings if (each := proposal(evaluator, *grouping, left)) is not None]
        if found:
            best = min(found, key=lambda each: _order(evaluator, each))
            if best in evaluator.forecasts or evaluator.expected(best).cost >= evaluator.best_cost() * (1 - ENOUGH):
                return
        else:
            best = explain.frugal(evaluator, offload)
            if best in evaluator.forecasts:
                small = [each for grouping in groupings if (each := frugal(evaluator, *grouping)) is not None]
                best = min(small, key=lambda each: evaluator.expected(each).reserved, default=best)
                expected = evaluator.expected(best)
                if expected.is_exact or expected.excess > MARGIN + expected.reserved * UNCERTAIN:
                    return
        evaluator.evaluate(best)


def _order(evaluator: Evaluator, candidate: Candidate) -> tuple[float, float]:
    expected = evaluator.expected(candidate)
    return float(f"{expected.cost:.7g}"), expected.reserved
