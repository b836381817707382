"""Every model of the catalogue, sharded over 2 ranks, is trained as on one process; over 3 those that may tell.

One test a family: its models run one after the other in the same ranks. Of each family, one model is not of the rest.
What a number of ranks can do to parameters is what the hand-made models are for: all of these train on 3 too, and of
each other family one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from models import CASES
from parity import Pool, Ranks, assert_same
from training import train_many

FAMILIES = sorted({case.kind for case in CASES.values()})

#: bf16 weights round each gradient to 8 bits, so the order of a sum shows in the third digit.
LOW_PRECISION = {"mixed": (3e-2, 3e-3)}


def models_and_sizes() -> Iterator[Any]:
    for family in FAMILIES:
        names = [name for name, case in CASES.items() if case.kind == family]
        yield pytest.param(names[:1], (2,), id=f"{family}, {names[0]}")
        if names[1:]:
            yield pytest.param(names[1:], (2,), id=family, marks=pytest.mark.rest)
        some = names if family == "handmade" else names[:1]
        yield pytest.param(some, (3,), id=f"{family}, 3 ranks", marks=pytest.mark.rest)


@pytest.mark.parametrize(("names", "sizes"), models_and_sizes())
def test_training_is_training_on_one_process(
    names: list[str], sizes: tuple[int, ...], alone: Ranks, pool: Pool
) -> None:
    (expected,) = alone.run(train_many, names, {}, timeout=240)
    for ranks in (Ranks(size, pool) for size in sizes):
        for rank, found in enumerate(ranks.run(train_many, names, {}, timeout=240)):
            for name in names:
                assert not isinstance(expected[name], str), f"{name} alone:\n{expected[name]}"
                assert not isinstance(found[name], str), f"{name} on rank {rank} of {ranks.count}:\n{found[name]}"
                rtol, atol = LOW_PRECISION.get(name, (1e-4, 2e-5))
                assert_same({name: found[name]}, {name: expected[name]}, rtol=rtol, atol=atol)


def test_at_least_forty_architectures_are_held_to_it() -> None:
    assert len([case for case in CASES.values() if case.kind not in ("handmade", "peft")]) >= 40
