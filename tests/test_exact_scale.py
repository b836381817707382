"""Grids of ``shard(exact={glob: exponent})``: small and large gradients, the same bits at any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import exactness
import trueshard
from messages import lacking, naming
from parity import Ranks, assert_same
from trueshard.errors import UserError
from trueshard.model.names import Index
from trueshard.options import Options
from trueshard.plans import check_options
from trueshard.sharding import engine
from trueshard.sharding.hooks import runtime_of
from trueshard.train.parse import load_config
from trueshard.verification.report import BITS

SMALL = 2.0**-30
"""Factor of a loss whose gradients have few digits on the grid of 2**-40."""


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gradients(rank: int, world_size: int, name: str, exact: Any, power: float) -> tuple[dict[str, Any], list[str]]:
    """Gradients of six microbatches, whose losses are multiplied by ``power``, divided by it; and what lost digits."""
    torch.manual_seed(0)
    model = exactness.MODELS[name]()
    trueshard.shard(model, exact=exact)
    own = exactness.dealt(rank, world_size, 6)
    mean = trueshard.token_mean(model, 8 * len(own))
    for number in own:
        with trueshard.accumulate(model, last=number == own[-1]):
            mean(power * exactness.summed_loss(model, 0, number)).backward()
    found = {key: p.grad.full_tensor() / power for key, p in model.named_parameters() if p.grad is not None}
    runtime = runtime_of(model)
    assert runtime is not None
    assert runtime.exact is not None
    return exactness.digest(found), runtime.exact.coarse


@pytest.mark.parametrize("name", ["whole_ones", pytest.param("tied", marks=pytest.mark.rest)])
def test_a_finer_grid_keeps_the_digits_of_small_gradients(
    name: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks
) -> None:
    ((expected, coarse),) = alone.run(gradients, name, True, 1.0)
    assert coarse == []
    finer = {"*": -70}
    for ranks in (alone, ranks2, ranks3):
        for found, coarse in ranks.run(gradients, name, finer, SMALL):
            assert_same(found, expected)
            assert coarse == []
    ((lost, _),) = alone.run(gradients, name, True, SMALL)
    assert not any(lost[key] == expected[key] for key in expected)


def test_the_first_glob_that_matches_counts_and_a_tie_has_all_its_names(alone: Ranks, ranks2: Ranks) -> None:
    ((expected, _),) = alone.run(gradients, "tied", True, 1.0)
    ((lost, _),) = alone.run(gradients, "tied", True, SMALL)
    assert "lm_head.weight" not in expected
    for found, _ in ranks2.run(gradients, "tied", {"*.q_proj.*": -40, "*_proj.*": -70, "lm_head.*": -70}, SMALL):
        for key in expected:
            fine = "embed_tokens" in key or ("_proj" in key and "q_proj" not in key)
            assert found[key] == (expected if fine else lost)[key], key


def test_gradients_that_lose_digits_are_told_of_with_the_exponent(alone: Ranks, ranks2: Ranks, ranks3: Ranks) -> None:
    ((_, expected),) = alone.run(gradients, "whole_ones", True, SMALL)
    (words,) = expected
    assert "more" in words
    for ranks in (ranks2, ranks3):
        assert [coarse for _, coarse in ranks.run(gradients, "whole_ones", True, SMALL)] == [expected] * ranks.count
    exponents = {name: int(e) for name, e in re.findall(r"'([\w.]+)': (-\d+)", words)}
    ((_, (left,)),) = alone.run(gradients, "whole_ones", exponents, SMALL)
    assert not any(f"'{name}'" in left for name in exponents)


def too_large(rank: int, world_size: int, exponent: int) -> None:
    torch.manual_seed(0)
    model = exactness.MODELS["whole_ones"]()
    trueshard.shard(model, exact={"first.weight": exponent, "*": 0})
    (1e6 * exactness.summed_loss(model, 0, rank)).backward()


def test_a_gradient_beyond_the_range_is_told_the_exponent_that_holds_it(ranks2: Ranks) -> None:
    told = set()
    for message in ranks2.raises(too_large, -50, match="OverflowError"):
        found = re.search(
            r"gradients of 'first.weight' .* 2\*\*-50 are exact up to 8: give it the exponent (-\d+) ", message
        )
        assert found, message
        told.add(int(found[1]))
    (exponent,) = told
    ranks2.run(too_large, exponent)
    ranks2.raises(too_large, exponent - 1, match="OverflowError")


def test_a_glob_that_matches_nothing_and_a_wrong_exponent_are_refused_by_name() -> None:
    every: list[tuple[Any, str]] = [
        ({"*": -127}, "-127"),
        ({"*": True}, "True"),
        ({"*": "-60"}, "'-60'"),
        ({}, "{}"),
        (-60, "-60"),
    ]
    for asked, named in every:
        with pytest.raises(ValueError, match=naming(named)):
            check_options(Options(exact=asked))
    plan = trueshard.Plan(exact={"*": -40, "first.wieght": -60})
    with pytest.raises(ValueError, match=naming("'first.wieght'")) as caught:
        engine.resolve(Index(exactness.MODELS["whole_ones"]()), plan, (2,))
    assert lacking(str(caught.value), "Did you mean 'first.weight'") == []


def test_a_plan_as_json_keeps_the_exponents_in_their_order() -> None:
    plan = trueshard.Plan(exact={"first.*": -60, "*": -30})
    again = trueshard.Plan.from_json(plan.to_json())
    assert again == plan
    assert isinstance(again.exact, dict)
    assert list(again.exact) == ["first.*", "*"]


def configured(*overrides: str) -> Any:
    example = Path(__file__).parents[1] / "examples/pretrain.toml"
    return load_config(example, ["train.accumulate=1", "train.microbatch=1", *overrides])


def test_a_configuration_takes_a_table_of_exponents_which_no_resume_may_change() -> None:
    config = configured("train.exact={'*.embed_tokens.weight' = -60, '*' = -40}")
    exponents = {"*.embed_tokens.weight": -60, "*": -40}
    assert config.shard.options().exact == exponents
    assert config.identity()["train.exact"] == exponents
    assert configured("shard.exact={'*' = -60}").shard.options().exact == {"*": -60}
    for refused in ("train.exact={}", "train.exact={'*' = -127}", "train.exact=1"):
        with pytest.raises(UserError, match=naming("train.exact")):
            configured(refused)
    with pytest.raises(UserError, match=naming("shard.exact")):
        configured("train.exact=true", "shard.exact={'*' = -60}")


@pytest.mark.rest
def test_the_planner_takes_exponents_of_blocks_that_it_does_not_run() -> None:
    def planned(exact: Any) -> trueshard.Plan:
        return trueshard.plan(Deep, ranks=2, batch=torch.randn(2, 8), exact=exact)

    plain, chosen = planned(True), planned({"blocks.11.*": -60})
    assert chosen.exact == {"blocks.11.*": -60}
    assert chosen.forecast is not None
    assert plain.forecast is not None
    assert chosen.forecast.received_by_collective == plain.forecast.received_by_collective
    assert chosen.forecast.peak_live_bytes == plain.forecast.peak_live_bytes
    with pytest.raises(ValueError, match=naming("'blocks.12.*'")):
        planned({"blocks.12.*": -60})


SMALL_GRADIENTS = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
    loss = lambda model, x: 1 + model(x).square().mean() * 1e-9
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(8, 6), loss
"""


@pytest.mark.rest
def test_verify_says_which_exponents_keep_the_digits(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(SMALL_GRADIENTS)
    report = exactness.verified(file, {"2.*": -62})
    assert report["held"], report
    (bits,) = [point["detail"] for point in report["points"] if point["name"] == BITS]
    assert all(f"step {step}: " in bits for step in range(1, 5))
    (note,) = [each for each in report["notes"] if "bits" in each]
    assert "exact={'0.bias': -58, '0.weight': -58}" in note
