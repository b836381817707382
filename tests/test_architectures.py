"""Every model of the catalogue, sharded over 2 and 3 ranks, is trained as on one process.

One test a family: its models run one after the other in the same ranks, for starting ranks is what costs.
"""

from __future__ import annotations

import pytest

from models import CASES
from parity import Ranks, assert_same
from training import train_many

FAMILIES = sorted({case.kind for case in CASES.values()})

#: bf16 weights round each gradient to 8 bits, so the order of a sum shows in the third digit.
LOW_PRECISION = {"mixed": (3e-2, 3e-3)}


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_training_on_one_process(family: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks) -> None:
    names = [name for name, case in CASES.items() if case.kind == family]
    (expected,) = alone.run(train_many, names, {}, timeout=240)
    for ranks in (ranks2, ranks3):
        for rank, found in enumerate(ranks.run(train_many, names, {}, timeout=240)):
            for name in names:
                assert not isinstance(expected[name], str), f"{name} alone:\n{expected[name]}"
                assert not isinstance(found[name], str), f"{name} on rank {rank} of {ranks.count}:\n{found[name]}"
                rtol, atol = LOW_PRECISION.get(name, (1e-4, 2e-5))
                assert_same({name: found[name]}, {name: expected[name]}, rtol=rtol, atol=atol)


def test_at_least_forty_architectures_are_held_to_it() -> None:
    assert len([case for case in CASES.values() if case.kind not in ("handmade", "peft")]) >= 40
