"""Where plans of a space are worked out, each once."""

from __future__ import annotations

from trueshard.forecast import Forecast
from trueshard.planner.choice.space import Groupings, Point, Setting, Space, described, meshes
from trueshard.planner.forecasting import study
from trueshard.planner.study import Study
from trueshard.planner.workload import Job

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
