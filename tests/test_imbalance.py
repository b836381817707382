"""Experts to which more tokens go than to others: the planner's bytes are those of a real run."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import studies
from parity import Ranks
from planning import Setting, _experts, own_loss, text, traffic, train
from test_planner_exact import differences, simulated
from test_planner_page import data_of
from trueshard.planner import ledger, process
from trueshard.planner.choose_plan import solve
from trueshard.planner.imbalance import NEAR, with_imbalances
from trueshard.planner.planning import Request
from trueshard.planner.report.page import page
from trueshard.planner.report.summary import WIDTH, as_json
from trueshard.planner.report.summary import text as summary_text
from trueshard.planner.workload import Study
from trueshard.text import size

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


# The curve


def one_of_four() -> Any:
    return _experts(routed=True, choices=1)


def requested(memory: int | None = None) -> Request:
    return Request(
        model=one_of_four, ranks=4, experts=4, batch=text, sequence=512, microbatch=8, memory=memory, loss=own_loss,
        reshard_after_forward="default", activation_checkpointing="none",
    )  # fmt: skip


def curve(memory: int | None = None, **words: Any) -> Study:
    request = requested(memory)
    return with_imbalances(request, solve(request), bool, **words)


def test_text_json_and_page_have_a_row_for_each_imbalance() -> None:
    study = studies.study()
    more = dataclasses.replace(study.forecast, fits=False, peak_reserved_bytes=study.forecast.budget_bytes + (1 << 30))
    study = dataclasses.replace(study, imbalances=((1.0, study.forecast), (8.0, more)))
    told = summary_text(study)
    assert re.search(r"\n +8 .* does not fit, 1\.0 GiB too much\n", told)
    assert max(map(len, told.splitlines())) <= WIDTH
    rows = as_json(study)["imbalances"]
    assert [(row["imbalance"], row["fits"]) for row in rows] == [(1, study.forecast.fits), (8, False)]
    assert data_of(page(study))["imbalances"] == rows
    assert "imbalances" not in as_json(studies.study())


@pytest.mark.rest
def test_the_curve_ends_where_all_tokens_go_to_one_rank_and_says_up_to_where_it_fits() -> None:
    study = curve()
    assert [imbalance for imbalance, _ in study.imbalances] == [1, 1.5, 2, 4]
    every = [forecast for _, forecast in study.imbalances]
    assert every[0] == study.forecast
    live, work = ([getattr(each, key) for each in every] for key in ("peak_live_bytes", "flops_per_step"))
    assert live == sorted(set(live))
    assert work == sorted(set(work))
    assert f"4 times the mean, the plan reserves {size(every[-1].peak_reserved_bytes)} and fits." in study.reasons[-1]
    assert [row["imbalance"] for row in as_json(study)["imbalances"]] == [1, 1.5, 2, 4]
    searched = dataclasses.replace(requested(), reshard_after_forward="auto", activation_checkpointing="auto")
    alone = with_imbalances(searched, solve(searched), bool)
    beside = process.call("trueshard.planner.imbalance:solve_with_imbalances", searched)  # in the search's processes
    assert (beside.plan, beside.imbalances, beside.reasons) == (alone.plan, alone.imbalances, alone.reasons)


@pytest.mark.rest
def test_where_all_tokens_do_not_fit_the_largest_imbalance_that_does_is_found() -> None:
    reserved = [forecast.peak_reserved_bytes for _, forecast in curve().imbalances]
    study = curve((reserved[0] + reserved[-1]) // 2, whole=False)
    fitting = [imbalance for imbalance, forecast in study.imbalances if forecast.fits]
    failing = [imbalance for imbalance, forecast in study.imbalances if not forecast.fits]
    assert 1 in fitting
    assert 4 in failing
    assert max(fitting) < min(failing) <= NEAR * max(fitting)
    assert f"up to an imbalance of {max(fitting):g}, and at {min(failing):g} no more" in study.reasons[-1]
    assert f"{max(fitting):g}" in [line.split()[0] for line in summary_text(study).splitlines() if line]
