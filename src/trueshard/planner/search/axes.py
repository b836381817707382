"""Choose how many ranks share matrices, sequences, experts and blocks: upwards from what is given, an axis at a time.

An axis is doubled as long as the best plan with it is faster, or lacks less memory where none fits. Each number is a
search of its own. Ranks that share matrices stay inside a node, where links are fast; what ``shard()`` refuses (heads
that do not divide, a model without experts) ends an axis. A pipeline needs several microbatches: it is tried where
these are given, or where nothing else fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trueshard.planner.planning import Request
from trueshard.planner.workload import NothingFits, Study
from trueshard.text import size

AXES = ("experts", "tensor", "context", "pipeline")
"""In the order in which they are tried."""


@dataclass(frozen=True)
class _Trial:
    """Axes with their best plan, or with the one that lacks the least."""

    request: Request
    study: Study
    error: NothingFits | None = None
    """None also where nothing was to be chosen: a plan that is said is forecast, whether it fits or not."""

    @property
    def fits(self) -> bool:
        return self.study.forecast.fits

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is better: what fits by its speed, else by the bytes that it lacks."""
        forecast = self.study.forecast
        if self.fits:
            return 0, -forecast.tokens_per_second_per_rank
        return 1, forecast.peak_reserved_bytes - forecast.budget_bytes

    def __str__(self) -> str:
        forecast = self.study.forecast
        if self.fits:
            return f"{_words(self.request)} {forecast.tokens_per_second_per_rank:,.0f} {forecast.counted}/s"
        return f"{_words(self.request)} lacks {size(forecast.peak_reserved_bytes - forecast.budget_bytes)}"


def choose(
    request: Request, solve: Callable[[Request], Study], progress: Callable[[str], object] = lambda line: None
) -> Study:
    """Return the study of the fastest plan of all axes that were tried; Ctrl-C takes the best so far.

    Args:
        request: with the smallest numbers of ranks on each axis.
        solve: a search with the axes of a request.
        progress: gets a line before each search.

    Raises:
        NothingFits: with any axes, where plans are searched; the error is that of those that lack the least.
        ValueError: ``shard()`` refuses the request itself.
    """
    request = dataclasses.replace(request, axes=False)
    trials = [_tried(request, solve)]
    best = trials[0]
    try:
        for axis in AXES:
            for larger in _doubled(best, axis):
                progress(f"{_words(larger)}; the best so far: {best}")
                try:
                    trial = _tried(larger, solve)
                except ValueError:
                    break
                trials.append(trial)
                if trial.rank >= best.rank:
                    break
                best = trial
    except KeyboardInterrupt:
        if best.error is not None:
            raise
    if best.error is not None:
        raise best.error
    others = "; ".join(str(each) for each in trials if each is not best)
    words = _words(best.request)
    told = f"{words[0].upper()}{words[1:]}: {others or 'no axis can be shared by more ranks'}."
    return dataclasses.replace(best.study, reasons=(told, *best.study.reasons))


def _tried(request: Request, solve: Callable[[Request], Study]) -> _Trial:
    try:
        found = solve(request)
    except NothingFits as error:
        return _Trial(request, error.study, error)
    return _Trial(request, found)


def _doubled(best: _Trial, axis: str) -> Iterator[Request]:
    """Yield requests with 2, 4, … times as many ranks on an axis, up to what the ranks and a node allow."""
    request = best.request
    if axis == "pipeline" and best.fits and not (request.accumulation or request.global_batch):
        return
    node = request.ranks_per_node or request.device().ranks_per_node
    now = _ranks(request, axis)
    while (now := 2 * now) <= (min(node, request.ranks) if axis == "tensor" else request.ranks):
        value: Any = {"ranks": now, "sequence": True} if axis == "tensor" else now
        yield dataclasses.replace(request, **{axis: value})


def _ranks(request: Request, axis: str) -> int:
    value = getattr(request, axis)
    return int(value if isinstance(value, int) else value.get("ranks", 1))


def _words(request: Request) -> str:
    shared = [f"{axis} {ranks}" for axis in AXES if (ranks := _ranks(request, axis)) > 1]
    return ", ".join(shared) or "nothing but shards shared"
