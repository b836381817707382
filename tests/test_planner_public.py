"""``trueshard.plan`` and ``shard()``'s ``plan=``, ``"auto"`` and ``memory=``, as a user's program calls them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from gathering import whole
from messages import lacking, naming
from parity import Ranks, assert_same
from photograph import photograph

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, 8))


FIXED: dict[str, Any] = {"reshard_after_forward": "always", "activation_checkpointing": "full"}


def planned(**words: Any) -> trueshard.Plan:
    return trueshard.plan(make, hardware="cpu", ranks=2, **({"batch": torch.zeros(4, 16)} | FIXED | words))


# In one process


@pytest.mark.rest
def test_the_planner_is_loaded_when_it_is_asked_for() -> None:
    code = """
import sys, trueshard
loaded = [name for name in sys.modules if name.startswith("trueshard.planner")]
assert not loaded, loaded
function = trueshard.plan
import trueshard.planner.planning
assert trueshard.plan is function and callable(function) and issubclass(trueshard.NothingFits, ValueError)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.rest
def test_a_module_is_planned_and_stays_as_it_is() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    before = photograph(model, optimizer)
    plan = trueshard.plan(model, hardware="cpu", ranks=4, batch=torch.zeros(8, 16), **FIXED)
    assert photograph(model, optimizer) == before
    assert not torch.distributed.is_initialized()
    assert [unit.name for unit in plan.units] == ["", "1", "2", "3"]
    assert [unit.activation_checkpointing for unit in plan.units[1:]] == ["full"] * 3
    forecast = plan.forecast
    assert isinstance(forecast, trueshard.Forecast)
    assert (forecast.ranks, forecast.microbatch, plan.ranks) == (4, 8, (4,))
    assert forecast.fits
    assert 0 < forecast.peak_live_bytes <= forecast.peak_reserved_bytes <= forecast.budget_bytes
    assert sum(forecast.peak_by_kind.values()) == forecast.peak_live_bytes


@pytest.mark.rest
def test_a_module_a_function_and_a_file_are_the_same_plan(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from test_planner_public import make\n")
    batch: Callable[[int, int], Any] = lambda samples, length: torch.zeros(samples, 16)  # noqa: E731
    plans = [
        trueshard.plan(model, hardware="cpu", ranks=2, batch=how, microbatch=4, **FIXED)
        for model, how in ((make(), torch.zeros(4, 16)), (make, batch), (f"{file}:make", batch))
    ]
    assert all(plan == plans[0] for plan in plans)
    assert len({plan.forecast.peak_live_bytes for plan in plans if plan.forecast}) == 1


@pytest.mark.rest
def test_a_larger_batch_takes_more_memory() -> None:
    small, large = (planned(batch=torch.zeros(samples, 16)).forecast for samples in (64, 4096))
    assert small
    assert large
    assert (small.microbatch, large.microbatch) == (64, 4096)
    assert large.peak_by_kind["inputs"] == 64 * small.peak_by_kind["inputs"] == 4096 * 16 * 4


def test_a_plan_is_json_and_costs_what_it_said() -> None:
    plan = planned()
    read = trueshard.Plan.from_json(plan.to_json())
    assert read == plan
    assert read.forecast == plan.forecast
    again = trueshard.plan(make, hardware="cpu", ranks=2, batch=torch.zeros(4, 16), plan=read)
    assert again == plan
    assert again.forecast == plan.forecast


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"microbatch": 0}, ("microbatch=0", "whole number", 1)),
        ({"ranks": 0}, ("ranks=0", "whole number", 1)),
        ({"ranks": 6, "replicate": 4}, ("ranks=6", "4 replicas")),
        ({"hardware": "h10"}, ("'h10'", "'h100'")),
        ({"memory": "70 gallons"}, ("memory='70 gallons'",)),
        ({"storage_dtype": "bf17"}, ("bf17", "dtype")),
        ({"global_batch": 7}, ("global_batch=7", "microbatch")),
        ({"plan": trueshard.Plan(), "compile": True}, ("plan=", "compile")),
        ({"batch": torch.zeros(4, 17)}, ("forward",)),
    ],
)
def test_a_choice_that_is_wrong_is_told_in_one_line(words: dict[str, Any], said: tuple[object, ...]) -> None:
    fixed = {} if "plan" in words else FIXED
    with pytest.raises(ValueError, match=naming(*said)) as caught:
        trueshard.plan(make, **({"batch": torch.zeros(4, 16), "ranks": 2} | fixed | words))
    assert "\n" not in str(caught.value)


def test_an_argument_that_is_misspelt_is_told() -> None:
    with pytest.raises(TypeError, match=naming("plan()", "'sequnce'", "'sequence'")):
        trueshard.plan(make, sequnce=128)


def test_a_sharded_model_is_refused() -> None:
    model = make()
    trueshard.shard(model)
    with pytest.raises(ValueError, match="sharded already"):
        trueshard.plan(model, **FIXED)


@pytest.mark.rest
def test_a_plan_for_another_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=naming("plan's unit", "'2'", "module")):
        trueshard.plan(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)), ranks=2, plan=planned())


# On ranks


def train(rank: int, world_size: int, text: str = "", words: dict[str, Any] | None = None) -> dict[str, Any]:
    """Three steps on a global batch of 8, each rank its part; whole parameters, and the plan that was applied."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chosen = {"plan": trueshard.Plan.from_json(text)} if text else words or {}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        applied = trueshard.shard(model, optimizer, **chosen)
    data = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(2))
    for step in range(3):
        model(data[step].chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = whole(dict(model.named_parameters()))
    return {"values": values, "plan": applied.to_json()}


def test_a_plan_from_json_trains_as_one_process(ranks2: Ranks, alone: Ranks) -> None:
    plan = planned()
    (expected,) = alone.run(train)
    for found in ranks2.run(train, plan.to_json()):
        assert_same(found["values"], expected["values"], rtol=1e-4, atol=1e-6)
        assert trueshard.Plan.from_json(found["plan"]) == plan


@pytest.mark.rest
def test_a_plan_edited_by_hand_is_applied_as_edited(ranks2: Ranks, alone: Ranks) -> None:
    data = json.loads(planned().to_json())
    data["units"][1]["reshard_after_forward"] = False
    data["units"][2]["activation_checkpointing"] = "none"
    (expected,) = alone.run(train)
    for found in ranks2.run(train, json.dumps(data)):
        assert_same(found["values"], expected["values"], rtol=1e-4, atol=1e-6)
        units = trueshard.Plan.from_json(found["plan"]).units
        assert [unit.reshard_after_forward for unit in units[1:]] == [False, True, True]
        assert [unit.activation_checkpointing for unit in units[1:]] == ["full", "none", "full"]


@pytest.mark.rest
def test_a_word_edited_by_hand_is_worked_out_again(ranks2: Ranks) -> None:
    data = json.loads(planned().to_json()) | {"reshard_after_forward": "never"}
    for found in ranks2.run(train, json.dumps(data)):
        assert not any(unit.reshard_after_forward for unit in trueshard.Plan.from_json(found["plan"]).units)


AUTO = {"reshard_after_forward": "auto", "activation_checkpointing": "auto", "memory": "1GiB"}


@pytest.mark.rest
def test_auto_words_train_as_one_process(ranks2: Ranks, alone: Ranks) -> None:
    (expected,) = alone.run(train)
    found = ranks2.run(train, "", AUTO, timeout=150)
    assert found[0]["plan"] == found[1]["plan"]
    for each in found:
        assert_same(each["values"], expected["values"], rtol=1e-4, atol=1e-6)
    forecast = trueshard.Plan.from_json(found[0]["plan"]).forecast
    assert forecast is not None
    assert forecast.fits
    assert (forecast.ranks, forecast.budget_bytes, forecast.hardware) == (2, 1 << 30, "cpu")


def refused(rank: int, world_size: int, text: str, words: dict[str, Any]) -> dict[str, Any]:
    """What a failing ``shard()`` raises, and whether everything is as it was."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    before = photograph(model, optimizer)
    chosen = {"plan": trueshard.Plan.from_json(text)} if text else words
    told: dict[str, Any] = {}
    try:
        trueshard.shard(model, optimizer, **chosen)
    except Exception as error:
        told = {"kind": type(error).__name__, "text": str(error), "lacks": 0}
        if isinstance(error, trueshard.NothingFits):
            told["lacks"] = error.study.forecast.peak_reserved_bytes - error.study.forecast.budget_bytes
    return told | {"same": photograph(model, optimizer) == before}


@pytest.mark.rest
def test_where_nothing_fits_every_rank_says_so_and_nothing_changed(ranks2: Ranks) -> None:
    first, second = ranks2.run(refused, "", AUTO | {"memory": "64KiB"}, timeout=150)
    assert first == second
    assert first["kind"] == "NothingFits"
    assert first["same"]
    assert first["lacks"] > 0
    assert lacking(first["text"], "64.0 KiB", "one unit", "Sequential", "'1'", "129.2 KiB") == []


@pytest.mark.rest
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (AUTO | {"memory": "much"}, "memory='much'"),
        (AUTO | {"memory": "1TiB"}, "more than"),
        (AUTO | {"units": "Blok"}, "'Block'"),
        (AUTO | {"reshard_after_forward": "alway"}, "'always'"),
    ],
)
def test_a_wrong_word_is_told_on_every_rank(ranks2: Ranks, words: dict[str, Any], said: str) -> None:
    for found in ranks2.run(refused, "", words):
        assert said in found["text"]
        assert found["same"]


@pytest.mark.rest
def test_a_plan_for_another_model_is_refused_by_name_on_ranks(ranks2: Ranks) -> None:
    data = json.loads(planned().to_json())
    data["units"][2]["parameters"] -= 1
    for found in ranks2.run(refused, json.dumps(data), {}):
        assert lacking(found["text"], "'2'", "33,087 elements") == []
        assert found["same"]
