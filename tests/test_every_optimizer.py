"""Contract line 9: every optimizer computes, sharded, what it computes on one device, or is refused by name.

`make test` runs torch's own, and of the others one of each way to work; `make test-all` runs every one. The catalogue
finds the classes by itself; which way each is to step stands in `optimizer_expectations`, by hand, and
``docs/optimizers.md`` is held against what the code says of each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

import optimizer_table
from optimizer_catalogue import LIBRARIES, entries
from optimizer_expectations import EXPECTED
from optimizer_trial import Sweep, moved
from parity import Pool
from resting import all_but

SIZES = (2, 3)

REPRESENTATIVE = (
    "ADOPT",  # element-wise, with a list of tensors at once
    "BSAM",  # a closure, and random numbers
    "CAME",  # factors of matrices
    "DAdaptAdam",  # one number from all parameters
    "FlashAdamW",  # quantized state
    "GaLore",  # groups with keys of their own
    "Lamb",  # a norm over each parameter
    "Lookahead",  # a wrapper with state of its own
    "Muon",  # matrices, and the rest by Adam
    "SOAP",  # nested state
    "ScheduleFreeAdamW",  # moves parameters outside of step()
    "SophiaH",  # second derivatives
)
"""Of pytorch_optimizer, in `make test`."""


def cases(library: str) -> Iterator[object]:
    for name in entries(library):
        quick = library != "pytorch_optimizer" or name in REPRESENTATIVE
        yield pytest.param(library, name, id=f"{library}.{name}", marks=[] if quick else pytest.mark.rest)


@pytest.fixture(scope="session")
def sweep(pool: Pool) -> Sweep:
    return Sweep(pool)


every = pytest.mark.parametrize(("library", "name"), [case for library in LIBRARIES for case in cases(library)])


@every
@pytest.mark.parametrize("count", all_but([2], SIZES))
@pytest.mark.timeout(1200)
def test_every_optimizer_equals_one_process_or_is_refused_as_expected(
    library: str, name: str, count: int, sweep: Sweep
) -> None:
    compared, expected = sweep.compared(count, library, name, [name]), EXPECTED[library][name]
    assert compared.outcome == expected.outcome, f"{name} on {count} ranks: {compared.words}"
    if expected.outcome == "equal":
        assert sweep.results(1, library, [name])[name]["way"] == expected.says
    else:
        assert expected.says in compared.words
    if expected.outcome == "refused":
        assert compared.words.startswith(f"{entries(library)[name].cls.__name__} ")


@pytest.mark.parametrize("library", LIBRARIES)
def test_of_every_class_it_is_said_how_it_steps(library: str) -> None:
    assert list(EXPECTED[library]) == list(entries(library)), "edit tests/optimizer_expectations.py"


@every
def test_every_parameter_moves_visibly(library: str, name: str, sweep: Sweep) -> None:
    """Else a trial would say nothing."""
    one = sweep.results(1, library, [name])[name]
    if EXPECTED[library][name].outcome == "alone":
        assert "error" in one
        return
    moves = {parameter: change > 1e-3 for parameter, change in moved(one).items()}
    assert any(moves.values()) if entries(library)[name].special.partly else all(moves.values()), moves


@every
def test_the_page_says_how_it_steps(library: str, name: str, sweep: Sweep) -> None:
    one = sweep.results(1, library, [name])[name]
    many = sweep.results(SIZES[0], library, [name])[name]
    assert page()[library].get(name) == optimizer_table.escaped(optimizer_table.outcome(one, many)), "run `make tables`"


@functools.cache
def page() -> dict[str, dict[str, str]]:
    return optimizer_table.committed()


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_lists_every_class_of_the_library(library: str) -> None:
    assert list(page()[library]) == list(entries(library)), "run `make tables`"
