"""Where plans of a space are worked out, each once.

The fastest plan that fits, of all that a space allows.

Settings (replicas, microbatch, offload) come in the order of the most that each could reach, with nothing freed early
and nothing recomputed; one that could not be faster than what is known is left out. So is one whose most frugal plan
does not fit, and with it all larger microbatches. ``lattice`` searches among the plans of one setting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import heapq
from collections.abc import Iterator

from trueshard.planner.search import lattice, reasons
from trueshard.planner.search.lattice import Bench, cost
from trueshard.planner.search.space import (
    RECOMPUTE,
    Offload,
    Setting,
    Space,
    batches,
    node_size,
)
from trueshard.planner.workload import Alternative, NothingFits, Study

__all__ = ["NothingFits", "Space", "choose"]

STUDIES = 40
"""Plans that are worked out where blocks are not chosen one by one; the uniform ones of the table come on top."""


def choose(space: Space) -> Study:
    """The fastest plan of a space that fits; of equally fast ones that with the least memory.

    Where the units of the model have no more than ``lattice.WHOLE`` choices a setting, it is what trying all of them
    would find, if a plan that frees or recomputes more is never faster, nor larger by more than ``bench.slack``. Where
    there are more, choices are by numbers of blocks, and gains below ``lattice.ENOUGH`` are not looked for.

    Raises:
        NothingFits: by how much, and the cheapest change that would.
        ValueError: the space contradicts itself, or what ``shard()`` refuses.
    """
    with _collecting_little():
        return _chosen(Bench(space))


def _chosen(bench: Bench) -> Study:
    space = bench.space
    reasons.check_largest_unit(bench)
    for offload in space.offloads:
        _search(bench, offload)
        if bench.best is not None:
            break
    else:
        raise reasons.nothing_fits(bench)
    _work_out_uniform(bench, bench.best.setting)
    best = bench.best
    others = [Alternative(bench.words(each), forecast) for each, forecast in bench.forecasts.items() if each != best]
    return dataclasses.replace(bench.study(best), reasons=reasons.reasons(bench), alternatives=others)


@contextlib.contextmanager
def _collecting_little() -> Iterator[None]:
    """What is there by now is not looked at again by the garbage collections that each simulation asks for."""
    if gc.get_freeze_count():  # the user's own
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _search(bench: Bench, offload: Offload) -> None:
    waiting: list[tuple[float, int, list[Setting]]] = []
    for replicate in bench.replicas:
        settings = [Setting(replicate, size, times, offload) for size, times in batches(bench.space)]
        settings = _that_may_fit(bench, settings)
        if settings and lattice.lattices(bench.groupings, settings[0]):
            for setting in settings:
                _push(bench, waiting, [setting])
        else:
            _push(bench, waiting, settings)
    while waiting:
        bound, _, settings = heapq.heappop(waiting)
        if bound >= bench.best_cost() * (1 - lattice.EXACT):
            return
        _explore(bench, settings[0])
        _push(bench, waiting, settings[1:])


def _that_may_fit(bench: Bench, settings: list[Setting]) -> list[Setting]:
    """Those whose microbatch is not too large.

    A single microbatch stands apart: where gradients are accumulated they stay whole until the last.
    """
    single = [each for each in settings if each.accumulation == 1 and bench.may_fit(each)]
    several = [each for each in settings if each.accumulation > 1]
    low, high = 0, len(several)
    while low < high:
        middle = (low + high) // 2
        if bench.may_fit(several[middle]):
            high = middle
        else:
            low = middle + 1
    return single + several[low:]


def _push(bench: Bench, waiting: list[tuple[float, int, list[Setting]]], settings: list[Setting]) -> None:
    """Put settings of falling microbatch into the queue, by the least cost that the first could have."""
    if settings:
        bound = cost(bench.look(bench.groupings.uniform(settings[0], "never", "none")))
        heapq.heappush(waiting, (bound, len(bench.forecasts), settings))


def _explore(bench: Bench, setting: Setting) -> None:
    if bench.look(bench.groupings.uniform(setting, "never", "none")).fits:
        return
    whole = lattice.lattices(bench.groupings, setting)
    for each in whole:
        lattice.refine(each, bench.look, bench.best_cost, lambda: True)
    if not whole:
        around = None
        for _ in range(2):
            rows = lattice.rows_of_blocks(bench.groupings, setting, around)
            around = lattice.refine(rows, bench.look, bench.best_cost, lambda: len(bench.forecasts) < STUDIES)
            if around is None or lattice.is_every_count(bench.groupings, setting):
                return


def _work_out_uniform(bench: Bench, setting: Setting) -> None:
    """The plans that can be said in two words, for the reader to compare."""
    node = node_size(bench.space, setting.replicate)
    words: list[str | int] = ["default", "always", "never"]
    for word in words if node is None else [*words, node]:
        for recompute in RECOMPUTE:
            bench.look(bench.groupings.uniform(setting, word, recompute))
