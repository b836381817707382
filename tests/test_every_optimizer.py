"""Contract line 9: every optimizer computes, sharded, what it computes on one device, or is refused by name.

`make test` runs torch's own, and of the others one of each way to work; `make test-all` runs every one. The catalogue
finds the classes by itself, and ``docs/optimizers.md`` is held against what the code says of each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

import optimizer_table
from optimizer_catalogue import LIBRARIES, entries
from optimizer_trial import Sweep, moved
from parity import Pool

SIZES = (2, 3)

REPRESENTATIVE = (
    "ADOPT",  # element-wise, with a list of tensors at once
    "AdamMini",  # holds the model
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
        yield pytest.param(library, name, id=f"{library}.{name}", marks=[] if quick else pytest.mark.slow)


@pytest.fixture(scope="session")
def sweep(pool: Pool) -> Sweep:
    return Sweep(pool)


@pytest.fixture
def names(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Of each library what this session runs, so that one job runs many."""
    chosen: dict[str, list[str]] = {library: [] for library in LIBRARIES}
    for item in request.session.items:
        arguments = getattr(getattr(item, "callspec", None), "params", {})
        if arguments.get("library") in chosen and "name" in arguments:
            chosen[arguments["library"]].append(arguments["name"])
    return {library: list(dict.fromkeys(some)) for library, some in chosen.items()}


every = pytest.mark.parametrize(("library", "name"), [case for library in LIBRARIES for case in cases(library)])


@every
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.timeout(1200)
def test_every_optimizer_equals_one_process_or_is_refused_by_name(
    library: str, name: str, count: int, sweep: Sweep, names: dict[str, list[str]]
) -> None:
    compared = sweep.compared(count, library, name, names[library])
    assert compared.outcome in ("equal", "refused", "alone"), f"{name} on {count} ranks: {compared.words}"


@every
def test_every_parameter_moves_visibly(library: str, name: str, sweep: Sweep, names: dict[str, list[str]]) -> None:
    """Else a trial would say nothing."""
    one = sweep.results(1, library, names[library])[name]
    if "error" not in one and not entries(library)[name].special.partly:
        still = {parameter: change for parameter, change in moved(one).items() if not change > 1e-3}
        assert not still


@every
def test_the_page_says_how_it_steps(library: str, name: str, sweep: Sweep, names: dict[str, list[str]]) -> None:
    one = sweep.results(1, library, names[library])[name]
    many = sweep.results(SIZES[0], library, names[library])[name]
    assert page()[library].get(name) == optimizer_table.escaped(optimizer_table.outcome(one, many)), "run `make tables`"


@functools.cache
def page() -> dict[str, dict[str, str]]:
    return optimizer_table.committed()


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_lists_every_class_of_the_library(library: str) -> None:
    assert list(page()[library]) == list(entries(library)), "run `make tables`"
