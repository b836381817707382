"""Plans of one setting as points with whole-number coordinates, and the search for the fastest of them that fits.

Along each coordinate a plan becomes slower and takes less memory: more is recomputed, more is freed after forward. So a
plan that lacks more than ``bench.slack`` rules out all that are at no coordinate above it, and a plan's time is a least
time for all that are at no coordinate below it. That leaves few to be worked out, in an order that a linear model
guesses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueshard.planner.forecasting import study
from trueshard.planner.search.space import (
    RECOMPUTE,
    Base,
    Groupings,
    Point,
    Setting,
    Space,
    described,
    meshes,
    node_size,
)
from trueshard.planner.workload import Job, Study
from trueshard.plans import Forecast

WHOLE = 512
"""Plans of one setting up to which each unit is chosen by itself."""

STEPS = 16
"""Into so many steps a row of blocks is divided at first where they are not chosen one by one."""

EXACT = 1e-9
"""Relative differences of time below it are rounding."""

ENOUGH = 1e-3
"""A gain in speed below it is not searched for where blocks are not chosen one by one."""


@dataclass(frozen=True)
class Lattice:
    """Points in rows."""

    coordinates: NDArray[np.int64]
    """(points, coordinates)."""
    features: NDArray[np.float64]
    """(points, features), in which time and memory are nearly linear."""
    seeds: tuple[tuple[int, ...], ...]
    """Coordinates with which to begin."""
    point: Callable[[Sequence[int]], Point]
    whole: bool
    """Whether every plan of the grouping is among them."""


def lattices(groupings: Groupings, setting: Setting) -> list[Lattice]:
    """Each grouping with every choice for every unit; [] where that is too much."""
    levels = _levels(groupings, setting)
    made = []
    for split, base in groupings.of(setting.replicate).items():
        if len(levels) ** sum(base.free_reshard) * len(RECOMPUTE) ** sum(base.free_recompute) > WHOLE:
            return []
        made.append(_whole(base, split, setting, levels))
    return made


def _levels(groupings: Groupings, setting: Setting) -> tuple[bool | int, ...]:
    node = node_size(groupings.space, setting.replicate)
    return (False, True) if node is None else (False, node, True)


def _whole(base: Base, split: bool, setting: Setting, levels: Sequence[bool | int]) -> Lattice:
    freed = [i for i, free in enumerate(base.free_reshard) if free]
    again = [i for i, free in enumerate(base.free_recompute) if free]
    sizes = [len(levels)] * len(freed) + [len(RECOMPUTE)] * len(again)
    coordinates = np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)
    coordinates = coordinates.reshape(math.prod(sizes), len(sizes))
    steps: list[NDArray[Any]] = [
        coordinates[:, [i]] >= level for i, size in enumerate(sizes) for level in range(1, size)
    ]

    def point(at: Sequence[int]) -> Point:
        reshard, recompute = list(base.reshard("never")), list(base.recompute("none"))
        for i, level in zip(freed, at, strict=False):
            reshard[i] = levels[level]
        for i, level in zip(again, at[len(freed) :], strict=True):
            recompute[i] = RECOMPUTE[level]
        return Point(setting, split, tuple(reshard), tuple(recompute))

    most = (len(levels) - 1,) * len(freed)
    seeds = [(0,) * len(sizes), *(most + (level,) * len(again) for level in reversed(range(len(RECOMPUTE))))]
    return Lattice(coordinates, _with_constant(steps, len(coordinates)), tuple(seeds), point, whole=True)


def rows_of_blocks(groupings: Groupings, setting: Setting, around: Sequence[int] | None = None) -> Lattice:
    """Plans in which a coordinate counts blocks.

    The first so many blocks are recomputed, for their activations live longest; the last so many stay gathered, for
    their backward comes first; all other units are treated alike.

    Args:
        around: coordinates near which every number of blocks is a point; None: every few.
    """
    levels = _levels(groupings, setting)
    bases = groupings.of(setting.replicate)
    base = bases[False]
    blocks = sum(_is_block(base))
    again = sum(base.free_recompute)
    rest = len(levels) if sum(base.free_reshard) > blocks else 1
    axes = [_counts(again, around, 0), _counts(again, around, 1), _counts(blocks, around, 2)]
    axes += [_counts(blocks, around, 3), list(range(rest))]
    node = len(levels) > 2
    kept = [at for at in itertools.product(*axes) if at[1] <= at[0] and (at[3] <= at[2] if node else at[3] == at[2])]
    coordinates = np.array(kept, dtype=np.int64)
    parts: list[NDArray[Any]] = [
        coordinates[:, [i]] / max(1, size) for i, size in enumerate((again, again, blocks, blocks))
    ]
    parts += [coordinates[:, [4]] >= level for level in range(1, rest)]

    def point(at: Sequence[int]) -> Point:
        split = at[4] == len(levels) - 1 and True in bases
        return _by_counts(bases[split], split, setting, levels, at)

    least = (blocks, blocks, rest - 1)
    seeds = ((0, 0, 0, 0, 0), (again, again, *least), (0, 0, *least), (again, 0, *least))
    return Lattice(coordinates, _with_constant(parts, len(kept)), seeds, point, whole=False)


def is_every_count(groupings: Groupings, setting: Setting) -> bool:
    """Whether ``rows_of_blocks`` without ``around`` has every number of blocks."""
    base = groupings.of(setting.replicate)[False]
    return max(sum(_is_block(base)), sum(base.free_recompute)) <= STEPS


def _is_block(base: Base) -> list[bool]:
    return [free and unit.kind == "block" for free, unit in zip(base.free_reshard, base.plan.units, strict=True)]


def _counts(blocks: int, around: Sequence[int] | None, axis: int) -> list[int]:
    step = max(1, math.ceil(blocks / STEPS))
    if around is None:
        return sorted({*range(0, blocks + 1, step), max(0, blocks - 1), blocks})
    near = range(max(0, around[axis] - step), min(blocks, around[axis] + step) + 1)
    return sorted({0, *near, max(0, blocks - 1), blocks})


def _by_counts(base: Base, split: bool, setting: Setting, levels: Sequence[bool | int], at: Sequence[int]) -> Point:
    recompute = list(base.recompute("none"))
    again = [i for i, free in enumerate(base.free_recompute) if free]
    for number, i in enumerate(again):
        recompute[i] = "full" if number < at[1] else "selective" if number < at[0] else "none"
    reshard = list(base.reshard("never"))
    is_block = _is_block(base)
    number = 0
    for i, free in enumerate(base.free_reshard):
        if is_block[i]:
            reshard[i] = True if number < at[3] else levels[1] if number < at[2] else False
            number += 1
        elif free:
            reshard[i] = levels[at[4]]
    return Point(setting, split, tuple(reshard), tuple(recompute))


def _with_constant(parts: Sequence[NDArray[Any]], count: int) -> NDArray[np.float64]:
    return np.concatenate([*parts, np.ones((count, 1))], axis=1).astype(np.float64)


def refine(
    lattice: Lattice, look: Callable[[Point], Forecast], best: Callable[[], float], may_go_on: Callable[[], bool]
) -> tuple[int, ...] | None:
    """Work out points until no other can be faster than the best that fits.

    Args:
        lattice: where.
        look: works out a plan.
        best: ``cost`` of the fastest plan so far that fits, here or anywhere.
        may_go_on: asked before each look.

    Returns:
        Coordinates of the fastest that fits, of those that were worked out here; None if there is none.
    """
    found = _Found(lattice, look)
    for seed in lattice.seeds:
        row = found.row(seed)
        if may_go_on() and found.is_open(best())[row]:
            found.take(row)
    while may_go_on() and (at := found.next(best())) is not None:
        found.take(at)
    return found.fastest


class _Found:
    """What is known of a lattice."""

    def __init__(self, lattice: Lattice, look: Callable[[Point], Forecast]) -> None:
        self.lattice = lattice
        self.look = look
        self.least_cost = np.zeros(len(lattice.coordinates))
        self.ruled_out = np.zeros(len(lattice.coordinates), dtype=bool)
        """Worked out, or not below one that does not fit."""
        self.rows: list[int] = []
        self.values: list[tuple[float, float]] = []
        """(cost, reserved bytes over the budget)"""
        self.fastest: tuple[int, ...] | None = None
        self._fastest_cost = math.inf

    def row(self, at: Sequence[int]) -> int:
        return int(np.flatnonzero((self.lattice.coordinates == np.array(at)).all(axis=1))[0])

    def take(self, row: int) -> None:
        coordinates = self.lattice.coordinates
        here = tuple(int(each) for each in coordinates[row])
        forecast = self.look(self.lattice.point(here))
        seconds = cost(forecast)
        self.rows.append(row)
        self.values.append((seconds, forecast.peak_reserved_bytes / forecast.budget_bytes))
        self.ruled_out[row] = True
        slower = (coordinates >= coordinates[row]).all(axis=1)
        self.least_cost[slower] = np.maximum(self.least_cost[slower], seconds)
        if forecast.peak_reserved_bytes > forecast.budget_bytes + (slack(forecast) if self.lattice.whole else 0):
            self.ruled_out |= (coordinates <= coordinates[row]).all(axis=1)
        if forecast.fits and seconds < self._fastest_cost:
            self.fastest, self._fastest_cost = here, seconds

    def is_open(self, best: float) -> NDArray[np.bool_]:
        """Whether a point may be the fastest that fits."""
        worth = EXACT if self.lattice.whole else ENOUGH
        open_: NDArray[np.bool_] = ~self.ruled_out & (self.least_cost < best * (1 - worth))
        return open_

    def next(self, best: float) -> int | None:
        """The point to work out next, if any is worth it."""
        rows = np.flatnonzero(self.is_open(best))
        if not len(rows) or not self.rows:
            return None
        guessed = self._guessed(rows)
        fitting = rows[guessed[:, 1] <= 1]
        if len(fitting):
            costs = guessed[guessed[:, 1] <= 1, 0]
            if self.lattice.whole or costs.min() < best * (1 - ENOUGH):
                return int(fitting[costs.argmin()])
            return None
        # None should fit: of a whole lattice that is to be shown, with one that rules out many.
        return int(rows[guessed[:, 1].argmin()]) if self.lattice.whole else None

    def _guessed(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """(rows, 2): cost and memory by least squares, put right by how wrong that is at the nearest known point."""
        features, known = self.lattice.features, np.array(self.rows)
        values = np.array(self.values)
        mean = values.mean(axis=0)
        weights = np.linalg.lstsq(features[known], values - mean, rcond=None)[0]
        wrong = values - mean - features[known] @ weights
        distances = np.abs(features[rows][:, None, :] - features[known][None, :, :]).sum(axis=2)
        guessed: NDArray[np.float64] = features[rows] @ weights + mean + wrong[distances.argmin(axis=1)]
        return guessed


SEGMENT = 20 << 20
"""Bytes of the allocator's segments for requests of 1 to 10 MiB (``kLargeBuffer`` in torch's allocator)."""


class Bench:
    """Works plans out, each once, and keeps the best."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.groupings = Groupings(space)
        self.replicas = self._replicas()
        self.forecasts: dict[Point, Forecast] = {}
        self.best: Point | None = None
        self.frugal: Point | None = None
        """The one that takes the least memory."""
        self._studies: dict[Point, Study] = {}

    def _replicas(self) -> list[int]:
        """Meshes that the words allow.

        Raises:
            ValueError: none, or the budget is more than any device has.
        """
        found, refused = [], []
        for replicate in meshes(self.space):
            try:
                self.groupings.of(replicate)
            except ValueError as error:
                refused.append(error)
            else:
                found.append(replicate)
        if not found:
            raise refused[0]
        return found

    def budget(self, replicate: int) -> int:
        """Bytes for torch on a rank: no more than the device has besides the communicators of that mesh."""
        available = self.space.cluster(replicate).available_bytes
        asked = self.space.budget
        return available if asked is None else asked if replicate == self.replicas[0] else min(asked, available)

    def study(self, point: Point) -> Study:
        """All that is known of a plan."""
        self.look(point)
        if point not in self._studies:
            self._studies[point] = self._worked_out(point)
        return self._studies[point]

    def look(self, point: Point) -> Forecast:
        """What a plan costs."""
        if point not in self.forecasts:
            made = self._worked_out(point)
            self.forecasts[point] = made.forecast
            self._studies[point] = made
            if made.forecast.fits and (self.best is None or self.order(point) < self.order(self.best)):
                self.best = point
            if (
                self.frugal is None
                or made.forecast.peak_reserved_bytes < self.forecasts[self.frugal].peak_reserved_bytes
            ):
                self.frugal = point
            self._studies = {each: kept for each, kept in self._studies.items() if each in (self.best, self.frugal)}
        return self.forecasts[point]

    def _worked_out(self, point: Point) -> Study:
        setting = point.setting
        cluster = self.space.cluster(setting.replicate)
        job = Job(
            self.space.workload,
            cluster.mesh,
            microbatch=setting.microbatch,
            accumulation=setting.accumulation,
            plan=self.groupings.plan(point),
            optimizer=self.space.optimizer,
        )
        return study(job, cluster, self.budget(setting.replicate))

    def order(self, point: Point) -> tuple[float, int, int]:
        """Smaller is better: time a token, then memory, then choices away from the default."""
        forecast = self.forecasts[point]
        return float(f"{cost(forecast):.9g}"), forecast.peak_reserved_bytes, self.groupings.away(point)

    def best_cost(self) -> float:
        """Seconds a token of the best plan."""
        return float("inf") if self.best is None else cost(self.forecasts[self.best])

    def may_fit(self, setting: Setting) -> bool:
        """Whether a plan of the setting may fit, by the one that should take the least memory."""
        forecast = self.look(self.groupings.uniform(setting, "always", "full"))
        budget = forecast.budget_bytes
        return forecast.peak_live_bytes <= budget and forecast.peak_reserved_bytes <= budget + slack(forecast)

    def words(self, point: Point) -> str:
        """A plan in a few words."""
        return described(self.groupings.plan(point), point)


def slack(forecast: Forecast) -> int:
    """Bytes by which a plan that should take less memory than another one may take more.

    What the caching allocator reserves does not fall at every step with what is live: its segments have 20 MiB (for
    requests of 1 to 10 MiB), or what was asked for in units of 2 MiB, and are put together differently.
    """
    return 2 * SEGMENT + forecast.peak_reserved_bytes // 50


def cost(forecast: Forecast) -> float:
    """Seconds a token of one rank."""
    return 1 / forecast.tokens_per_second_per_rank
