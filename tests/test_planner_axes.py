"""Ranks that share matrices, sequences or experts are simulated exactly: memory, and each byte received."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import trueshard
from parity import Ranks
from planning import Setting, own_loss, text, traffic, train
from resting import all_but
from test_planner_exact import differences, simulated
from test_planner_extend import assert_equal, job
from trueshard.options import Options
from trueshard.planner import ledger, process
from trueshard.planner.choose_plan import solve
from trueshard.planner.planning import Request
from trueshard.planner.simulation.fake_values import EQUAL_SHARES
from trueshard.planner.simulation.repeats import FEWEST
from trueshard.planner.simulation.simulate import simulate
from trueshard.planner.trace import Communication
from trueshard.planner.workload import Job

SEQUENCE = {"tensor": {"ranks": 2, "sequence": True}}
FULL, SELECTIVE = ({"activation_checkpointing": word} for word in ("full", "selective"))

TWO: dict[str, Setting] = {
    "tensor": Setting("llama tied", words={"tensor": 2} | FULL, ranks=(1,)),
    "tensor, uneven, muon": Setting("llama uneven", "muon", {"tensor": 2}, ranks=(1,), rank=1),
    "tensor, sequence, bf16": Setting("llama", words=SEQUENCE | FULL | {"mixed_precision": "bf16"}, ranks=(1,)),
    "context": Setting("llama, text", words={"context": 2}, accumulation=2),
    "context, uneven, recomputed, last rank": Setting("llama uneven, text", words={"context": 2} | FULL, rank=1),
    "experts": Setting("qwen3 moe", words={"experts": 2}, accumulation=2),
    "experts, recomputed, bf16": Setting("qwen3 moe", words={"experts": 2, "mixed_precision": "bf16"} | FULL),
    "experts = tensor": Setting("qwen3 moe", words={"experts": 2, "tensor": 2}, ranks=(1,)),
}
FOUR: dict[str, Setting] = {
    "shard × tensor": Setting("llama", words={"tensor": 2}, ranks=(2,), accumulation=2),
    "shard × tensor, sequence": Setting("llama", words=SEQUENCE | SELECTIVE, ranks=(2,)),
    "replicate × tensor, last rank": Setting("qwen3", words={"tensor": 2}, ranks=(2, 1), rank=3),
    "context × tensor": Setting("llama, text", words={"context": 2, "tensor": 2}),
    "shard × context": Setting("llama, text", words={"context": 2} | SELECTIVE, ranks=(4,)),
    "shard × experts": Setting("qwen3 moe", words={"experts": 2}, ranks=(4,)),
    "every axis": Setting("qwen3 moe", words={"experts": 4, "tensor": 2, "context": 2} | FULL, rank=3),
}


def hold(ranks: Ranks, setting: Setting) -> None:
    """Hold a simulation against real training over gloo: memory to the byte, and what each collective receives."""
    found = simulated(setting)
    for step, received in zip((found.first, found.steady), ranks.run(traffic, setting)[setting.rank], strict=True):
        assert ledger.received(step) == received
    assert differences(setting, found, ranks.run(train, setting)[setting.rank]) == []


@pytest.mark.parametrize("name", all_but([], TWO))
def test_two_ranks(name: str, ranks2: Ranks) -> None:
    hold(ranks2, TWO[name])


@pytest.mark.rest
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(name: str, ranks4: Ranks) -> None:
    hold(ranks4, FOUR[name])


def llama(layers: int) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 58, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, vocab_size=97, **sizes))


EXTENDED: dict[str, Any] = {
    "tensor": {"words": {"tensor": 2}},
    "tensor, sequence, recomputed": {"words": SEQUENCE | FULL},
    "context × tensor": {"words": {"context": 2, "tensor": 2}},
}


@pytest.mark.rest
@pytest.mark.parametrize("name", EXTENDED)
def test_blocks_on_axes_are_extended_as_the_whole_model(name: str) -> None:
    few = job(lambda: llama(FEWEST + 1), ranks=(2,), **EXTENDED[name])
    few = dataclasses.replace(few, workload=dataclasses.replace(few.workload, batch=text, loss=own_loss))
    extended = simulate(few)
    assert extended.models > 1, extended.whole_because
    assert_equal(extended, simulate(few, whole=True))


@pytest.mark.rest
def test_all_blocks_are_recomputed_with_sequence_parallelism_the_first_and_the_last_too() -> None:
    found = simulate(job(lambda: llama(4), ranks=(2,), words=SEQUENCE | FULL)).steady
    turn = next(at for at, event in enumerate(found.events) if event.place.phase == "backward")
    kept = [each.unit for each in ledger.alive(found, turn) if each.kind == "activations"]
    assert all(1 <= kept.count(f"model.layers.{number}") <= 3 for number in range(4)), kept


def test_collectives_know_their_axis_and_the_distance_of_neighbours() -> None:
    found = simulate(job(lambda: llama(2), ranks=(2, 4), words={"tensor": 2}))
    groups = {(each.axis, each.ranks, each.stride) for each in found.steady if isinstance(each, Communication)}
    assert groups == {("tensor", 2, 1), ("shard", 4, 2), ("replicate", 2, 8)}


def forecast(**words: Any) -> trueshard.plans.Forecast:
    defaults = {"ranks": 8, "activation_checkpointing": "none", "reshard_after_forward": "default", "batch": (2, 64)}
    found = trueshard.plan(lambda: llama(2), **defaults | words).forecast
    assert found is not None
    return found


@pytest.mark.rest
def test_a_token_counts_once_however_many_ranks_share_it() -> None:
    alone, shared = forecast(), forecast(tensor=2)
    assert shared.tokens_per_second_per_rank * shared.step_seconds == pytest.approx(2 * 64 / 2)
    assert alone.tokens_per_second_per_rank * alone.step_seconds == pytest.approx(2 * 64)
    assert shared.received_by_axis.keys() == {"shard", "tensor"}
    assert sum(shared.received_by_axis.values()) == shared.bytes_received_per_step
    assert sum(shared.exposed_by_axis.values()) == pytest.approx(shared.exposed_communication_seconds)
    assert shared.model_flops_per_step < alone.model_flops_per_step


@pytest.mark.rest
def test_between_nodes_an_axis_takes_longer() -> None:
    inside, across = (forecast(tensor=2, ranks_per_node=node) for node in (8, 1))
    assert across.exposed_by_axis["tensor"] > inside.exposed_by_axis["tensor"]


def unbalanced(factor: float) -> tuple[int, int, list[str]]:
    """Bytes for which the links of experts are busy, FLOPs, and what is said of it, where routers decide."""
    workload = Setting("qwen3 moe, routed").workload()
    found = simulate(Job(workload, (2,), microbatch=2, choices=Options(experts=2), imbalance=factor))
    moved = [each for each in found.steady if isinstance(each, Communication) and each.axis == "experts"]
    return sum(max(each.received, each.sent) for each in moved), ledger.flops(found.steady), found.warnings


@pytest.mark.rest
def test_the_busiest_rank_gets_more_tokens_and_computes_more() -> None:
    (even, work, said), (more, harder, _) = unbalanced(1.0), unbalanced(2.0)
    assert more > 1.3 * even
    assert harder > work
    assert said == [EQUAL_SHARES]


@pytest.mark.rest
def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor=3 does not divide the 8 ranks: choose a divisor, or other ranks"):
        forecast(tensor=3)
    with pytest.raises(ValueError, match="heads"):
        forecast(tensor=8)


def auto(rank: int, world_size: int) -> str:
    model = llama(2)
    words: dict[str, Any] = {"activation_checkpointing": "auto", "memory": "8GiB", "tensor": 2}
    plan = trueshard.shard(model, torch.optim.AdamW(model.parameters()), **words)
    assert plan.forecast is not None
    assert plan.forecast.ranks == world_size
    return plan.to_json()


@pytest.mark.rest
def test_shard_plans_on_its_mesh(ranks4: Ranks) -> None:
    plans = ranks4.run(auto)
    assert len(set(plans)) == 1
    told = json.loads(plans[0])
    assert (told["tensor"], told["ranks"]) == (2, [2])


@pytest.mark.rest
def test_a_plan_of_axes_is_applied_and_forecast_again() -> None:
    words: dict[str, Any] = {"ranks": 8, "tensor": 2, "batch": (2, 64), "activation_checkpointing": "none"}
    plan = trueshard.plan(lambda: llama(2), reshard_after_forward="default", **words)
    again = trueshard.plan(lambda: llama(2), plan=trueshard.Plan.from_json(plan.to_json()), ranks=8, batch=(2, 64))
    assert again.forecast == plan.forecast
    assert dataclasses.replace(again, forecast=None) == dataclasses.replace(plan, forecast=None)


# Choosing axes


def planned(memory: str | None, **more: Any) -> Any:
    """The plan of a wide llama on four ranks, of which only matrices are worth sharing where memory is short."""
    return trueshard.plan(wide, "h100", 4, memory, (1, 2048), microbatch=1, **more)


def wide() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=512,
            intermediate_size=8192,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
    )


@pytest.mark.rest
def test_axes_are_chosen_where_nothing_else_fits_and_not_where_they_cost_more() -> None:
    fast = {"offload": "none", "activation_checkpointing": "none", "reshard_after_forward": "default"}
    free = planned(None, axes=True, **fast)
    assert free.tensor == free.context == free.experts == 1
    assert free.forecast == planned(None, **fast).forecast
    small = {"offload": "none", "activation_checkpointing": "full", "reshard_after_forward": "always"}
    short = f"{int(planned(None, **small).forecast.peak_reserved_bytes * 0.8)}"
    assert not planned(short, **small).forecast.fits
    found = planned(short, axes=True, **small)
    assert found.tensor * found.context > 1
    assert found.forecast.fits


@pytest.mark.rest
def test_a_search_of_axes_in_two_processes_begins_the_next_probes_early_and_finds_the_same() -> None:
    request = Request(model=wide, ranks=4, batch=(1, 2048), microbatch=1, axes=True, offload="none", optimizer="adamw")
    alone = solve(request)
    beside = process.call("trueshard.planner.choose_plan:solve", request)
    assert beside.plan == alone.plan
    assert beside.reasons == alone.reasons
    assert re.search("tensor 2.*context 2", alone.reasons[0])


def test_a_plan_that_is_given_has_its_axes() -> None:
    with pytest.raises(ValueError, match="axes"):
        trueshard.plan(wide, plan=trueshard.Plan(), axes=True)
