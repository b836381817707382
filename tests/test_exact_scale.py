"""Grids of ``shard(exact={glob: exponent})``: small and large gradients, the same bits at any number of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import exactness
import trueshard
from messages import lacking, naming
from parity import Ranks, assert_same
from trueshard.choices import Choices
from trueshard.runtime import engine
from trueshard.runtime.passes import runtime_of

SMALL = 2.0**-30
"""Factor of a loss whose gradients have few digits on the grid of 2**-40."""


def gradients(rank: int, world_size: int, name: str, exact: Any, power: float) -> tuple[dict[str, Any], list[str]]:
    """Gradients of six microbatches, whose losses are multiplied by ``power``, divided by it; and what lost digits."""
    torch.manual_seed(0)
    model = exactness.MODELS[name]()
    trueshard.shard(model, exact=exact)
    own = range(rank * 6 // world_size, (rank + 1) * 6 // world_size)
    mean = trueshard.token_mean(model, 8 * len(own))
    for number in own:
        with trueshard.accumulate(model, last=number == own[-1]):
            mean(power * exactness.summed_loss(model, 0, number)[0]).backward()
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
    model = exactness.whole_ones()
    trueshard.shard(model, exact={"first.weight": exponent, "*": 0})
    (1e6 * exactness.summed_loss(model, 0, rank)[0]).backward()


def test_a_gradient_beyond_the_range_is_told_the_exponent_that_holds_it(ranks2: Ranks) -> None:
    told = set()
    for message in ranks2.raises(too_large, -50, match="OverflowError"):
        found = re.search(
            r"gradients of 'first.weight' .* 2\*\*-50 are exact up to 8: give it a grid of (-\d+) ", message
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
            Choices(exact=asked).check()
    plan = trueshard.Plan(exact={"*": -40, "first.wieght": -60})
    with pytest.raises(ValueError, match=naming("'first.wieght'")) as caught:
        engine.resolve(exactness.whole_ones(), plan, (2,))
    assert lacking(str(caught.value), "Did you mean 'first.weight'") == []


def test_a_plan_as_json_keeps_the_exponents_in_their_order() -> None:
    plan = trueshard.Plan(exact={"first.*": -60, "*": -30})
    again = trueshard.Plan.from_json(plan.to_json())
    assert again == plan
    assert isinstance(again.exact, dict)
    assert list(again.exact) == ["first.*", "*"]
