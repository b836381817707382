"""Which plan of one setting to study next: the fastest that is expected to fit.

Time and memory are nearly sums over units. Where sums are to be made small under one limit, each unit's choices lie on
a convex line from the fastest to the most frugal, and what gives most memory for its time comes first. Equal blocks go
over from one choice to the next one after the other, the first ones first: their activations live longest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from trueshard.planner.search.evaluator import Evaluator
from trueshard.planner.search.space import Candidate, Setting, Values

ENOUGH = 5e-3
"""Relative gain in speed for which another plan is worth a study, and two choices for equal blocks are worth it."""

WHOLE = 256
"""Candidates of one grouping of units in one setting up to which all are compared."""


def proposal(evaluator: Evaluator, setting: Setting, split: bool, seconds: float = math.inf) -> Candidate | None:
    """Return the candidate that is expected to be the fastest that fits; None if none is.

    Equal blocks get two choices only where a study of that is expected to take no more than ``seconds``.
    """
    options = evaluator.options(setting.replicate)[split]
    if _is_small(options):
        expected = ((evaluator.expected(each), each) for each in _every(setting, split, options))
        fitting = [(each.cost, each.reserved, i, at) for i, (each, at) in enumerate(expected) if each.may_fit]
        return min(fitting)[3] if fitting else None
    return _on_line(evaluator, setting, split, options, seconds)


def frugal(evaluator: Evaluator, setting: Setting, split: bool) -> Candidate | None:
    """Return the candidate that was not studied yet and is expected to take the least memory, of some or of all."""
    options = evaluator.options(setting.replicate)[split]
    if _is_small(options):
        every = list(_every(setting, split, options))
    else:
        state, steps = _line(evaluator, setting, split, options)
        for step in steps:
            state = step.applied(state, len(step.units))
        every = [state]
    left = [each for each in every if each not in evaluator.forecasts]
    return min(left, key=lambda each: evaluator.expected(each).reserved) if left else None


def _is_small(options: list[list[Values]]) -> bool:
    return math.prod(map(len, options)) <= WHOLE


def _every(setting: Setting, split: bool, options: list[list[Values]]) -> Iterator[Candidate]:
    return (Candidate(setting, split, values) for values in itertools.product(*options))


def _on_line(
    evaluator: Evaluator, setting: Setting, split: bool, options: list[list[Values]], seconds: float
) -> Candidate | None:
    state, steps = _line(evaluator, setting, split, options)
    if evaluator.expected(state).may_fit:
        return state
    for step in steps:
        behind = step.applied(state, len(step.units))
        if evaluator.expected(behind).may_fit:
            low, high = 0, len(step.units)
            while high - low > 1:
                middle = (low + high) // 2
                if evaluator.expected(step.applied(state, middle)).may_fit:
                    high = middle
                else:
                    low = middle
            mixed = step.applied(state, high)
            gain = evaluator.expected(behind).cost / evaluator.expected(mixed).cost - 1
            is_known = mixed in evaluator.forecasts or evaluator.effort(mixed) <= seconds
            return mixed if gain > ENOUGH and is_known else behind
        state = behind
    return None


@dataclass(frozen=True)
class _Step:
    """Equal units go over to another choice."""

    units: tuple[int, ...]
    values: Values
    price: float
    """Seconds for each byte."""

    def applied(self, candidate: Candidate, count: int) -> Candidate:
        """Return a candidate with the first ``count`` of the units changed."""
        values = list(candidate.values)
        for i in self.units[:count]:
            values[i] = self.values
        return dataclasses.replace(candidate, values=tuple(values))


def _line(
    evaluator: Evaluator, setting: Setting, split: bool, options: list[list[Values]]
) -> tuple[Candidate, list[_Step]]:
    """Return the fastest candidate, and the steps from it to the one of the least memory, the cheapest first."""
    fastest = Candidate(setting, split, tuple(each[0] for each in options))
    groups = list(_groups(evaluator, fastest, options))
    choices: list[list[tuple[float, float, Values]]] = []
    for units in groups:
        found = []
        for values in options[units[0]]:
            seconds, live = evaluator.predicted(_Step(units, values, 0.0).applied(fastest, len(units)))
            found.append((seconds, live, values))
        choices.append(_convex(found))
    start = fastest
    steps: list[_Step] = []
    for units, line in zip(groups, choices, strict=True):
        start = _Step(units, line[0][2], 0.0).applied(start, len(units))
        for before, behind in itertools.pairwise(line):
            price = (behind[0] - before[0]) / max(1.0, before[1] - behind[1])
            steps.append(_Step(units, behind[2], price))
    return start, sorted(steps, key=lambda each: each.price)


def _groups(evaluator: Evaluator, candidate: Candidate, options: list[list[Values]]) -> Iterator[tuple[int, ...]]:
    """Yield the positions of equal units that have a choice."""
    found: dict[object, list[int]] = {}
    for i, (unit, mine) in enumerate(zip(evaluator.units(candidate), options, strict=True)):
        if len(mine) > 1:
            alone = unit.name if unit.kind != "block" else ""
            found.setdefault((alone, unit.kind, unit.parameters, unit.bytes, frozenset(mine)), []).append(i)
    yield from map(tuple, found.values())


def _convex(points: list[tuple[float, float, Values]]) -> list[tuple[float, float, Values]]:
    """Return the points (seconds, bytes, …) of the lower convex hull, from the fastest to that with the least bytes."""
    hull: list[tuple[float, float, Values]] = []
    for point in sorted(points, key=lambda each: each[:2]):
        if hull and point[1] >= hull[-1][1]:
            continue  # neither faster nor smaller
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(one: tuple[float, float, Values], two: tuple[float, float, Values]) -> float:
    """Return the bytes that a second more saves."""
    return (one[1] - two[1]) / max(1e-12, two[0] - one[0])
