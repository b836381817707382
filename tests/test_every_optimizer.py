"""Contract line 9: every optimizer computes, sharded, what it computes on one device, or is refused by name.

`make test` runs torch's own and torchao's, and of the others one of each way to work, at two ranks; `make test-rest`
runs of each library the first of each kind at three, and all else at two. The catalogue finds the classes by itself;
which way each is to step stands in ``docs/optimizers.md``: whoever changes the way of one changes its line there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import optimizer_table
from optimizer_catalogue import LIBRARIES, entries
from optimizer_trial import BATCH, Sweep, moved
from parity import Pool

WAYS = ("on shards", "by owner", "on shards and by owner")
"""Outcomes, as the page has them, of what steps."""
OPTIONS_OF_THE_REST = ("fused=", "foreach=", "maximize=", "capturable=", "differentiable=")
"""Of torch.optim."""


def is_quick(library: str, name: str) -> bool:
    """Torch's own are held in `make test`; ways to step of others in ``test_classify.py``, on rules of every kind."""
    return library == "torch.optim" and not any(option in name for option in OPTIONS_OF_THE_REST)


def kind(library: str, name: str) -> tuple[Any, ...]:
    """How it steps, whether its state is quantized, and how it is made and called."""
    entry, special = entries(library)[name], entries(library)[name].special
    return page()[library].get(name), entry.full_precision is None, special.make, special.take, special.trains


def firsts(library: str) -> list[str]:
    """The first of each kind that steps."""
    found: dict[tuple[Any, ...], str] = {}
    for name in entries(library):
        if page()[library].get(name) in WAYS:
            found.setdefault(kind(library, name), name)
    return list(found.values())


def batches() -> Iterator[Any]:
    """(library, names, number of ranks) of each test."""
    rest = pytest.mark.rest
    for library in LIBRARIES:
        every = list(entries(library))
        quick = [name for name in every if is_quick(library, name)]
        others = [name for name in every if name not in quick and name not in firsts(library)]
        for names, count, marks in ((quick, 2, ()), (others, 2, rest), (firsts(library), 3, rest)):
            for start in range(0, len(names), BATCH):
                some = names[start : start + BATCH]
                yield pytest.param(
                    library, some, count, id=f"{library} {some[0]} to {some[-1]}, {count} ranks", marks=marks
                )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("library", "names", "count"), batches())
def test_every_optimizer_equals_one_process_or_is_refused_as_expected(
    library: str, names: Sequence[str], count: int, pool: Pool
) -> None:
    sweep = Sweep(pool)
    sweep.results(count, library, names)
    wrong = {name: list(faults(sweep, count, library, name)) for name in names}
    assert not any(wrong.values()), {name: found for name, found in wrong.items() if found}


def faults(sweep: Sweep, count: int, library: str, name: str) -> Iterator[str]:
    """How an optimizer did otherwise than it should, or than the page says."""
    compared = sweep.compared(count, library, name, [name])
    one, many = (sweep.results(each, library, [name])[name] for each in (1, count))
    if compared.outcome in ("different", "failed"):
        yield f"{compared.outcome}: {compared.words}"
        return
    if compared.outcome == "refused" and not compared.words.startswith(f"{entries(library)[name].cls.__name__} "):
        yield f"the refusal does not begin with the class: {compared.words!r}"
    if compared.outcome != "alone":
        still = [parameter for parameter, change in moved(one).items() if change <= 1e-3]
        if len(still) == len(one["after"]) or (still and not entries(library)[name].special.partly):
            yield f"does not move {still}, of which the trial would say nothing"
    if page()[library].get(name) != optimizer_table.escaped(optimizer_table.outcome(one, many)):
        yield f"the page does not say {optimizer_table.outcome(one, many)!r}: run `make tables`, if that is right"


@pytest.mark.parametrize("library", LIBRARIES)
def test_of_every_class_it_is_said_how_it_steps(library: str) -> None:
    assert list(page()[library]) == list(entries(library)), "run `make tables`"


@functools.cache
def page() -> dict[str, dict[str, str]]:
    return optimizer_table.committed()
