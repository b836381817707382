"""Tests whose body is what runs on each rank: a decorator says on how many, and what its results are held against.

    @as_on_one_device()
    def test_two_optimizers(rank: int, world_size: int) -> Any: ...  # gives what one process gives

    @on_ranks(2)
    def test_dropout(rank: int, world_size: int) -> None: ...  # passes on each of 2 ranks

    @raises_on_ranks(2, "AdamW")
    def test_differentiable(rank: int, world_size: int) -> None: ...  # raises on each of 2 ranks, with these words

Further arguments of the function are pytest's: of ``parametrize``, or fixtures that can be pickled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from parity import Pool, Ranks
from stepping import same

Case = Callable[..., Any]


def as_on_one_device(ranks: int | str | None = None, **tolerances: float) -> Callable[[Case], Case]:
    """``ranks``: how many; "count": as the test's parameter of this name says; None: as the fixture ``sizes`` says."""

    def run(case: Case, alone: Ranks, others: Any, *args: Any) -> None:
        same(case, alone, others if isinstance(others, list) else [others], *args, **tolerances)

    def run_on_count(case: Case, alone: Ranks, pool: Pool, count: int, *args: Any) -> None:
        same(case, alone, [Ranks(count, pool)], *args, **tolerances)

    if ranks == "count":
        return lambda case: _test(case, ("alone", "pool", "count"), run_on_count)
    return lambda case: _test(case, ("alone", "sizes" if ranks is None else f"ranks{ranks}"), run)


def on_ranks(*counts: int, fresh: bool = False, timeout: float = 60.0) -> Callable[[Case], Case]:
    """``counts``: on so many, one after the other; ``fresh``: in processes of its own; ``timeout``: seconds."""
    return on(*(f"fresh{count}" if fresh else f"ranks{count}" for count in counts), timeout=timeout)


def on(*fixtures: str, timeout: float = 60.0) -> Callable[[Case], Case]:
    """``fixtures``: of ``Ranks``, one after the other."""

    def run(case: Case, *values: Any) -> None:
        for ranks in values[: len(fixtures)]:
            ranks.run(case, *values[len(fixtures) :], timeout=timeout)

    return lambda case: _test(case, fixtures, run)


def raises_on_ranks(ranks: int, match: str) -> Callable[[Case], Case]:
    return lambda case: _test(case, (f"ranks{ranks}",), lambda case, on, *args: on.raises(case, *args, match=match))


def _test(case: Case, fixtures: tuple[str, ...], run: Callable[..., None]) -> Case:
    further = list(inspect.signature(case).parameters)[2:]

    def test(**values: Any) -> None:
        run(case, *(values[name] for name in (*fixtures, *further)))

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*fixtures, *further)]
    function: Any = test
    function.__signature__ = inspect.Signature(parameters)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(function, attribute, getattr(case, attribute))
    # Ranks get the case by its name: pickle finds it as an attribute of the test.
    function.case, case.__qualname__ = case, f"{case.__qualname__}.case"
    return function
