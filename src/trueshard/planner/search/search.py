"""Find the fastest plan that fits, of all that a space allows.

Probes tell what each unit costs (see ``costs``); from that every plan's time and memory is predicted, and the one that
is expected to be the fastest of those that fit is studied exactly. What the study tells corrects the prediction (what
the allocator reserves above what is live is not predicted at all), and the next one is chosen. The search ends when no
other plan is expected to be faster by more than ``ENOUGH``, or when something fits and another study would be more
than ``WORK``. What it returns was studied.

[Note: mixtures of two] Plans are compared that say the same for all blocks. On their lower convex hull of time over
memory, the first that fits is followed by a faster one that does not. Between the two, blocks go over one after the
other, the first ones first: their activations live longest. Time and memory are nearly sums over units, so a mixture of
more than two would be no better than a point of the hull.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator

from trueshard.options import Offload
from trueshard.planner.search import explain
from trueshard.planner.search.evaluator import MARGIN, Evaluator, Simulations
from trueshard.planner.search.space import Candidate, Setting, Space
from trueshard.planner.workload import Alternative, NotFaster, Study
from trueshard.text import size

ENOUGH = 5e-3
"""Relative gain in speed for which another plan is worth a study, and a mixture of two is worth it."""

UNCERTAIN = 0.02
"""Part of its memory by which a plan that is expected not to fit is still studied where no other fits."""

DOUBT = 0.05
"""Relative error of predicted speeds: a space whose plans are expected to be slower by more than that is left out."""

WORK = 45_000
"""Work of all studies at most, once a plan fits, see ``Evaluator.effort``: the command answers in ten seconds on two
idle cores, and the answer does not depend on the machine."""


def choose(
    space: Space,
    progress: Callable[[str], object] = lambda line: None,
    *,
    simulations: Simulations | None = None,
    faster_than: float | None = None,
    before_offload: Callable[[str], Study | None] = lambda lack: None,
    work: float = WORK,
) -> Study:
    """Return the fastest plan of a space that fits; of equally fast ones that with the least memory.

    Interrupted by Ctrl-C, it is the best so far, if any.

    Args:
        progress: gets a line whenever a plan was studied.
        simulations: of the model, which run already; None: this process alone does the work.
        faster_than: tokens a second of a rank that other searches have reached; None: this one is alone.
        before_offload: (memory that is lacking) → study of something else that fits, if any; asked before offload.
        work: as ``WORK``.

    Raises:
        NotFaster: no plan is expected to be faster than that; nothing was studied.
        NothingFits: by how much, and, if the search is alone, the cheapest change that would.
        ValueError: the space contradicts itself, or what ``shard()`` refuses.
    """
    own = Simulations(space.workload, 0).running() if simulations is None else contextlib.nullcontext(simulations)
    with own as running:
        return _best_study(Evaluator(space, progress, running), faster_than, before_offload, work)


def checked(simulations: Simulations, make: Callable[[], Study]) -> Study:
    """Return a study with the assumptions that the check of ``simulations`` returns, which runs beside it."""
    with named_faults(simulations):
        study = make()
    return with_warnings(simulations, study)


@contextlib.contextmanager
def named_faults(simulations: Simulations) -> Iterator[None]:
    """Raise an error of the check in the place of one raised inside: it names what is wrong with the user's model."""
    try:
        yield
    except Exception:
        simulations.check()
        raise


def with_warnings(simulations: Simulations, study: Study) -> Study:
    """Return a study with the assumptions that the check of ``simulations`` returns; raises its error."""
    return dataclasses.replace(study, assumptions=(*study.assumptions, *simulations.check()))


def _best_study(
    evaluator: Evaluator, faster_than: float | None, before_offload: Callable[[str], Study | None], work: float
) -> Study:
    """Search until there is a best candidate, and return its study."""
    explain.check_largest_unit(evaluator)
    remarks: tuple[str, ...] = ()
    try:
        evaluator.start_probes()
        if faster_than:
            evaluator.simulations.hand_out_expected()
            check_speed(evaluator, faster_than)
        for offload in evaluator.space.offloads:
            if evaluator.best is not None:
                break
            if offload == "cpu" and evaluator.smallest is not None:
                lack = size(evaluator.forecasts[evaluator.smallest].lacking_bytes)
                if (other := before_offload(lack)) is not None:
                    return other
            _search_with(evaluator, offload, work)
    except KeyboardInterrupt:
        if evaluator.best is None:
            raise
        remarks = (f"Interrupted: the best of the {len(evaluator.forecasts)} plans that were compared until then.",)
    if (best := evaluator.best) is None:
        raise explain.nothing_fits(evaluator, advise=faster_than is None)
    alternatives = [
        Alternative(explain.described(evaluator, candidate), forecast)
        for candidate, forecast in evaluator.forecasts.items()
        if candidate != best
    ]
    study, others = evaluator.studies[best], proposals(evaluator, best.setting.offload)
    reasons, remarks = explain.reasons(evaluator, others), remarks or _left_out(evaluator, others)
    return dataclasses.replace(
        study, reasons=reasons, assumptions=(*study.assumptions, *remarks), alternatives=alternatives
    )


def check_speed(evaluator: Evaluator, faster_than: float) -> None:
    """Raise NotFaster if the plans that are expected to fit are expected to be slower."""
    costs = [evaluator.expected(candidate).cost for candidate in proposals(evaluator, evaluator.space.offloads[0])]
    if costs and (expected := 1 / min(costs)) * (1 + DOUBT) < faster_than:
        raise NotFaster(expected)


def _search_with(evaluator: Evaluator, offload: Offload, work: float) -> None:
    """Study candidates until none is expected to be better, none to fit, or the work is done."""
    while True:
        left = work - evaluator.work
        candidates = proposals(evaluator, offload, left)
        if candidates:
            candidate = min(candidates, key=evaluator.order)
            gain = _gain(evaluator, candidate)
            if candidate in evaluator.forecasts or gain <= ENOUGH:
                return
            if evaluator.best is not None and evaluator.effort(candidate) > left:
                return
        else:
            candidate = explain.frugal(evaluator, offload)
            if candidate in evaluator.forecasts:
                candidate = _smallest_left(evaluator, offload)
                expected = evaluator.expected(candidate)
                if expected.is_exact or expected.excess > MARGIN + expected.reserved * UNCERTAIN:
                    return
        if evaluator.evaluate(candidate).host_lack > 0:
            return  # so does every other: what lies on the host is the same


def _gain(evaluator: Evaluator, candidate: Candidate) -> float:
    """Return by what part a candidate is expected to be faster than the best; infinity if none fits yet."""
    return evaluator.best_cost() / evaluator.expected(candidate).cost - 1


def _left_out(evaluator: Evaluator, candidates: list[Candidate]) -> tuple[str, ...]:
    """Return a sentence about the plan that would have been studied next, were there no end of work."""
    candidate = min(candidates, key=evaluator.order, default=None)
    if candidate is None or candidate in evaluator.forecasts or (gain := _gain(evaluator, candidate)) <= ENOUGH:
        return ()
    words = explain.described(evaluator, candidate)
    return (f"Not studied, to answer soon (--thorough): {words}, expected to be {gain:.1%} faster.",)


def study_fastest(evaluator: Evaluator, candidates: list[Candidate]) -> None:
    """Study those of few candidates that are expected to be the fastest, until none that fits is better."""
    while left := [candidate for candidate in candidates if candidate not in evaluator.forecasts]:
        fitting = [candidate for candidate in left if evaluator.expected(candidate).may_fit]
        candidate = min(fitting, key=evaluator.order, default=None)
        if candidate is not None and evaluator.expected(candidate).cost >= evaluator.best_cost():
            return
        if candidate is None:
            candidate = min(left, key=lambda candidate: evaluator.expected(candidate).reserved)
            expected = evaluator.expected(candidate)
            is_too_large = expected.excess > MARGIN + expected.reserved * UNCERTAIN
            if evaluator.best is not None or (is_too_large and len(left) < len(candidates)):
                return
        if evaluator.evaluate(candidate).host_lack > 0:
            return


def proposals(evaluator: Evaluator, offload: Offload, work: float = math.inf) -> list[Candidate]:
    """Return of each setting and grouping of units the candidate that is expected to be the fastest that fits, if any.

    Mixtures are among them where a study of one is no more than ``work``.
    """
    best = [_proposal(evaluator, *grouping, work) for grouping in evaluator.groupings(offload)]
    return [candidate for candidate in best if candidate is not None]


def _smallest_left(evaluator: Evaluator, offload: Offload) -> Candidate:
    """Return the candidate that takes the least memory, of those that were not studied if any."""
    every = [member for grouping in evaluator.groupings(offload) for member in evaluator.candidates(*grouping)]
    left = [candidate for candidate in every if candidate not in evaluator.forecasts]
    return min(left or every, key=lambda candidate: evaluator.expected(candidate).reserved)


def _proposal(evaluator: Evaluator, setting: Setting, split: bool, work: float) -> Candidate | None:
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
        is_quick = mixture in evaluator.forecasts or evaluator.effort(mixture) <= work
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
