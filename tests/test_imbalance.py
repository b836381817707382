"""Experts to which more tokens go than to others: the planner's bytes are those of a real run in which all go to one rank."""

from __future__ import annotations

from typing import Any

import pytest

from parity import Ranks
from planning import Setting, traffic, train
from test_planner_exact import differences, simulated
from trueshard.planner import ledger

FULL = {"activation_checkpointing": "full"}


def crowded(ranks: int, imbalance: float, rank: int = 0, more: Any = None, kind: str = "") -> Setting:
    words = {"experts": ranks} | (more or {})
    return Setting(f"{ranks} ranks, crowded{kind}", words=words, ranks=(ranks,), rank=rank, imbalance=imbalance)


TWO = {
    "the worst rank": crowded(2, 2.0),
    "the other rank": crowded(2, 0.0, rank=1),
    "the worst rank, recomputed, bf16": crowded(2, 2.0, more=FULL | {"mixed_precision": "bf16"}),
}
THREE = {
    "the worst rank": crowded(3, 3.0),
    "another rank": crowded(3, 0.0, rank=2),
    "as a token's experts are on different ranks, half of all is the most": crowded(3, 3.0, kind=" by choice"),
    "without tokens, while two ranks have all": crowded(3, 0.0, rank=2, kind=" by choice"),
}


def hold(ranks: Ranks, setting: Setting) -> None:
    """Memory after each allocation, and bytes that are received; those of an all-reduce are no whole number here."""
    found, rank = simulated(setting), setting.rank
    for step, real in zip((found.first, found.steady), ranks.run(traffic, setting)[rank], strict=True):
        planned = ledger.received(step)
        assert {kind: planned[kind] for kind in real if kind != "all_reduce"} == {  # type: ignore[index]
            kind: count for kind, count in real.items() if kind != "all_reduce"
        }
    assert differences(setting, found, ranks.run(train, setting)[rank]) == []


@pytest.mark.rest
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_at_full_imbalance(name: str, ranks2: Ranks) -> None:
    hold(ranks2, TWO[name])


@pytest.mark.rest
@pytest.mark.parametrize("name", THREE)
def test_three_ranks_at_full_imbalance(name: str, ranks3: Ranks) -> None:
    hold(ranks3, THREE[name])
