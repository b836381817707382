"""Grids of candidates, and branch and bound over one for the fastest candidate that fits.

Along each axis of a grid a plan becomes slower and takes less memory: more is recomputed, more is freed after forward.
So the time of a candidate is a lower bound for all that are at no lower position, and one that is over the budget by
more than ``slack`` rules out all that are at no higher position. A linear model guesses which one to evaluate next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trueshard.planner.search.space import RECOMPUTE, Candidate, Evaluator, Grouping, Setting, cost, node_size, slack
from trueshard.plans import Forecast

WHOLE = 512
"""Candidates of one setting up to which each unit is chosen by itself."""

STEPS = 16
"""Counts of blocks that are tried at first where they are not chosen one by one."""

EXACT = 1e-9
"""Relative differences of time below it are rounding."""

ENOUGH = 1e-3
"""Relative gain in speed below which the search stops where blocks are not chosen one by one."""


@dataclass(frozen=True)
class Grid:
    """Candidates by their positions along axes."""

    positions: NDArray[np.int64]
    """(candidates, axes)."""
    starts: tuple[tuple[int, ...], ...]
    """Positions to evaluate first."""
    candidate: Callable[[Sequence[int]], Candidate]
    """Positions → candidate."""
    is_whole: bool
    """Whether the grid has every candidate of its grouping."""
    is_coarse: bool = False
    """Whether some counts of blocks are left out."""


def whole_grids(evaluator: Evaluator, setting: Setting) -> list[Grid]:
    """Return a grid for each grouping, with an axis for each free value of a unit; none if one exceeds ``WHOLE``."""
    found, levels = [], _levels(evaluator, setting)
    for split, grouping in evaluator.groupings(setting.replicate).items():
        freed, again = sum(grouping.free_reshard), sum(grouping.free_recompute)
        sizes = [len(levels)] * freed + [len(RECOMPUTE)] * again
        if math.prod(sizes) > WHOLE:
            return []
        positions = np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)
        starts = ((0,) * len(sizes), *((len(levels) - 1,) * freed + (level,) * again for level in (2, 1, 0)))

        def candidate(at: Sequence[int], split: bool = split, freed: int = freed) -> Candidate:
            recompute = [RECOMPUTE[level] for level in at[freed:]]
            return evaluator.candidate(setting, split, [levels[level] for level in at[:freed]], recompute)

        found.append(Grid(positions, starts, candidate, is_whole=True))
    return found


def count_grid(evaluator: Evaluator, setting: Setting, around: Sequence[int] | None = None) -> Grid:
    """Return a grid whose axes count blocks: those recomputed, those recomputed fully, those at each reshard level.

    The first blocks are recomputed, for their activations live longest; the last ones stay gathered, for their backward
    comes first. The last axis is the level of all other units. Of many counts some ``STEPS`` are tried, or those
    near ``around``.
    """
    groupings = evaluator.groupings(setting.replicate)
    blocks, again = sum(_free_blocks(groupings[False])), sum(groupings[False].free_recompute)
    levels = _levels(evaluator, setting)
    last = len(levels) - 1
    others = last if len(_free_blocks(groupings[False])) > blocks else 0
    sizes = [again] * 2 + [blocks] * last
    axes = [_counts(size, None if around is None else around[axis]) for axis, size in enumerate(sizes)]
    positions = [
        at
        for at in itertools.product(*axes, range(others + 1))
        if all(more >= fewer for part in (at[:2], at[2:-1]) for more, fewer in itertools.pairwise(part))
    ]

    def candidate(at: Sequence[int]) -> Candidate:
        split = at[-1] == last and True in groupings
        number = itertools.count()
        reshard = [
            levels[_level(next(number), at[2:-1]) if is_block else at[-1]]
            for is_block in _free_blocks(groupings[split])
        ]
        recompute = [RECOMPUTE[_level(each, at[:2])] for each in range(again)]
        return evaluator.candidate(setting, split, reshard, recompute)

    always = (*[blocks] * last, others)
    starts = ((0,) * (last + 3), (again, again, *always), (0, 0, *always), (again, 0, *always))
    is_coarse = max(blocks, again) > STEPS and around is None
    return Grid(np.array(positions, dtype=np.int64), starts, candidate, is_whole=False, is_coarse=is_coarse)


def _levels(evaluator: Evaluator, setting: Setting) -> tuple[bool | int, ...]:
    """Return the values of ``reshard_after_forward``, from the fastest to the one that takes the least memory."""
    node = node_size(evaluator.space, setting.replicate)
    return (False, True) if node is None else (False, node, True)


def _level(number: int, counts: Sequence[int]) -> int:
    """Return the level of a block, of which the first ``counts[i]`` are above level i."""
    return sum(number < count for count in counts)


def _free_blocks(grouping: Grouping) -> list[bool]:
    """Return for each unit whose resharding is free whether it is a block."""
    units = zip(grouping.plan.units, grouping.free_reshard, strict=True)
    return [unit.kind == "block" for unit, free in units if free]


def _counts(blocks: int, around: int | None) -> list[int]:
    step = max(1, math.ceil(blocks / STEPS))
    near = range(0, blocks + 1, step)
    if around is not None:
        near = range(max(0, around - step), min(blocks, around + step) + 1)
    return sorted({0, *near, max(0, blocks - 1), blocks})


def branch_and_bound(
    grid: Grid,
    evaluate: Callable[[Candidate], Forecast],
    best_cost: Callable[[], float],
    may_continue: Callable[[], bool] = lambda: True,
) -> tuple[int, ...] | None:
    """Evaluate candidates until no other can be faster than the best that fits.

    Args:
        grid: the candidates.
        evaluate: return a candidate's forecast.
        best_cost: return the cost of the fastest candidate so far that fits, of this grid or any; infinity if none.
        may_continue: called before each evaluation.

    Returns:
        Positions of the fastest candidate that fits, of those evaluated here; None if none fits.
    """
    search = _Search(grid, evaluate)
    for start in grid.starts:
        row = int(np.flatnonzero((grid.positions == np.array(start)).all(axis=1))[0])
        if may_continue() and search.is_open(best_cost())[row]:
            search.evaluate(row)
    while may_continue() and (following := search.next(best_cost())) is not None:
        search.evaluate(following)
    return None if search.fastest is None else search.fastest[1]


class _Search:
    """Bounds of a grid's candidates, and the figures of those evaluated."""

    def __init__(self, grid: Grid, evaluate: Callable[[Candidate], Forecast]) -> None:
        self.grid = grid
        self.features = _features(grid.positions)
        self.forecast = evaluate
        self.lower_bound = np.zeros(len(grid.positions))
        """Seconds a token."""
        self.is_closed = np.zeros(len(grid.positions), dtype=bool)
        """Evaluated, or ruled out by one that does not fit."""
        self.rows: list[int] = []
        self.values: list[tuple[float, float]] = []
        """(cost, reserved bytes over the budget) of each row."""
        self.fastest: tuple[float, tuple[int, ...]] | None = None
        """(cost, positions) of those that fit."""

    def evaluate(self, row: int) -> None:
        positions = self.grid.positions
        at = tuple(positions[row].tolist())
        forecast = self.forecast(self.grid.candidate(at))
        seconds = cost(forecast)
        self.rows.append(row)
        self.values.append((seconds, forecast.peak_reserved_bytes / forecast.budget_bytes))
        self.is_closed[row] = True
        slower = (positions >= positions[row]).all(axis=1)
        self.lower_bound[slower] = np.maximum(self.lower_bound[slower], seconds)
        if forecast.peak_reserved_bytes > forecast.budget_bytes + slack(forecast):
            self.is_closed |= (positions <= positions[row]).all(axis=1)
        if forecast.fits and (self.fastest is None or seconds < self.fastest[0]):
            self.fastest = seconds, at

    def is_open(self, best: float) -> NDArray[np.bool_]:
        gain = EXACT if self.grid.is_whole else ENOUGH
        return ~self.is_closed & (self.lower_bound < best * (1 - gain))

    def next(self, best: float) -> int | None:
        """Return the row to evaluate next; None if none is worth it."""
        rows = np.flatnonzero(self.is_open(best))
        if not len(rows):
            return None
        costs, memory = self._guesses(rows).T
        fits = memory <= 1
        if fits.any():
            is_worth = self.grid.is_whole or costs[fits].min() < best * (1 - ENOUGH)
            return int(rows[fits][costs[fits].argmin()]) if is_worth else None
        # None should fit. Evaluate the smallest, unless something fits and this grid need not be searched to the end.
        return int(rows[memory.argmin()]) if self.grid.is_whole or best == math.inf else None

    def _guesses(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (rows, 2), cost and memory: by least squares, plus the residual of the nearest evaluated candidate."""
        known, values = self.features[self.rows], np.array(self.values)
        mean = values.mean(axis=0)
        weights = np.linalg.lstsq(known, values - mean, rcond=None)[0]
        residuals = values - mean - known @ weights
        wanted = self.features[rows]
        distances = np.abs(wanted[:, None, :] - known[None, :, :]).sum(axis=2)
        return wanted @ weights + mean + residuals[distances.argmin(axis=1)]


def _features(positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (candidates, features) in which time and memory are nearly linear: steps of short axes, shares of long."""
    columns = [np.ones(len(positions))]
    for axis in positions.T:
        last = int(axis.max())
        columns += [axis >= level for level in range(1, last + 1)] if last <= 2 else [axis / last]
    return np.stack(columns, axis=1).astype(np.float64)
