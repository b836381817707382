"""Choose how many ranks share experts, matrices, sequences and blocks: an axis at a time, upwards from what is given.

An axis is doubled as long as the best plan with it is faster, or lacks less memory where none fits. Each number is a
search of its own. Ranks that talk inside of every block stay inside a node, where links are fast; what ``shard()``
refuses (heads that do not divide, a model without experts) ends an axis. A pipeline needs several microbatches: it is
tried where these are given, or where nothing else fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trueshard.axes import AXES, ranks_along
from trueshard.planner.planning import Request
from trueshard.planner.workload import NothingFits, Study
from trueshard.text import size

TRIED = tuple(axis for axis in reversed(AXES) if axis.is_option or axis.place == "stages")
"""The order in which axes are tried, from the innermost outwards."""


@dataclass(frozen=True)
class _Trial:
    """Axes with their best plan, or with the one that lacks the least."""

    request: Request
    study: Study
    error: NothingFits | None = None
    """None also where nothing was to be chosen: a given plan is forecast, whether it fits or not."""

    @property
    def lack(self) -> int:
        """Bytes by which it does not fit; 0 if it does."""
        forecast = self.study.forecast
        return 0 if forecast.fits else forecast.peak_reserved_bytes - forecast.budget_bytes

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller for better: the bytes that it lacks, then its speed."""
        return self.lack, -self.study.forecast.tokens_per_second_per_rank

    def __str__(self) -> str:
        forecast = self.study.forecast
        speed = f"{forecast.tokens_per_second_per_rank:,.0f} {forecast.counted}/s"
        return f"{_words(self.request)} {f'lacks {size(self.lack)}' if self.lack else speed}"


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

    def tried(request: Request) -> _Trial:
        try:
            return _Trial(request, solve(request))
        except NothingFits as error:
            return _Trial(request, error.study, error)

    trials = [tried(dataclasses.replace(request, axes=False))]
    best = trials[0]
    try:
        for axis in TRIED:
            for larger in _doubled(best, axis.name, in_node=axis.in_node, piped=axis.place == "stages"):
                progress(f"{_words(larger)}; the best so far: {best}")
                try:
                    trial = tried(larger)
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
    others = "; ".join(str(trial) for trial in trials if trial is not best)
    words = _words(best.request)
    reason = f"{words[0].upper()}{words[1:]}: {others or 'no axis can be shared by more ranks'}."
    return dataclasses.replace(best.study, reasons=(reason, *best.study.reasons))


def _doubled(best: _Trial, axis: str, *, in_node: bool, piped: bool) -> Iterator[Request]:
    """Yield requests with 2, 4, … times as many ranks on an axis, up to what the ranks and a node allow."""
    request = best.request
    if piped and not best.lack and not (request.accumulation or request.global_batch):
        return
    node = request.ranks_per_node or request.device().ranks_per_node
    most = min(node, request.ranks) if in_node else request.ranks
    ranks = 2 * ranks_along(request, axis)
    while ranks <= most:
        value: Any = {"ranks": ranks, "sequence": True} if in_node else ranks
        yield dataclasses.replace(request, **{axis: value})
        ranks *= 2


def _words(request: Request) -> str:
    shared = [f"{axis.name} {ranks}" for axis in TRIED if (ranks := ranks_along(request, axis.name)) > 1]
    return ", ".join(shared) or "nothing but shards shared"
