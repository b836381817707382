"""Trials of the tensor axis: what ranks with parts would compute otherwise is refused by name, or put right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueshard
from cases import on_ranks
from gathering import gradients
from messages import naming
from parity import Ranks
from tensor_models import build, distance
from trueshard.model.names import Index
from trueshard.parallel.tensor import own_styles

EXACT = 1e-12


class Attention(nn.Module):
    """Of one's own: the number of heads is nowhere but in its forward."""

    def __init__(self, heads: int = 5, size: int = -1) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.query, self.key, self.value, self.out = (nn.Linear(30, 30) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.heads, self.size
        parts = (f(x).unflatten(-1, heads).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Halves of one matrix: a gate and what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 24), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class ByHand(nn.Module):
    """Logits by the rows of an embedding, without its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(18, 6), nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.up(self.table(ids)) @ self.table.weight.T


class TwoInputs(nn.Module):
    """Of whose inputs nothing can be guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Fused()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.inner(x * scale)


class Stacked(nn.Module):
    """Heads of the first block are as many as its matrix has; the second counts on five."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(18, 30)
        self.blocks = nn.ModuleList((Attention(-1, 5), Attention()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


ATTENTION = dict.fromkeys(("*query", "*key", "*value"), "colwise") | {"*out": "rowwise"}
FUSED = {"*both": "colwise", "*down": "rowwise"}
WRONG: dict[str, tuple[type[nn.Module], dict[str, str], tuple[str, ...]]] = {
    "heads": (Attention, ATTENTION, ("Attention", "query", "colwise")),
    "heads of one block": (Stacked, ATTENTION, ("blocks.1", "Attention", "colwise")),
    "fused": (Fused, FUSED, ("Fused", "both", "colwise")),
    "by hand": (ByHand, {"table": "embedding_rowwise"}, ("ByHand", "table", "embedding_rowwise")),
    "not summed": (Fused, {"both": "colwise_gather_output", "down": "rowwise"}, ("Fused", "down", "rowwise")),
}


@pytest.mark.parametrize("way", WRONG)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.rest)])
def test_what_parts_compute_otherwise_is_refused_by_name(way: str, count: int, ranks2: Ranks, ranks3: Ranks) -> None:
    ranks = ranks2 if count == 2 else ranks3
    ranks.raises(refused, way, match=naming(f"tensor={count}", *WRONG[way][2]))


def refused(rank: int, world_size: int, way: str) -> None:
    make, styles, _ = WRONG[way]
    torch.manual_seed(rank)
    trueshard.shard(make(), tensor={"ranks": world_size, **styles})


@on_ranks(2)
def test_styles_that_join_parts_are_the_remedy(rank: int, world_size: int) -> None:
    joined = {"*both": "colwise_gather_output", "*down": "rowwise_split_input"}
    torch.manual_seed(0)
    plain = Fused().double()
    model = copy.deepcopy(plain)
    before = torch.random.get_rng_state()
    plan = trueshard.shard(model, tensor={"ranks": 2, **joined})
    assert torch.equal(torch.random.get_rng_state(), before)
    assert "Fused (root): the same as one process" in str(plan)
    x = torch.randn(3, 6, dtype=torch.float64)
    for each in (model, plain):
        each(x).square().sum().backward()
    assert distance(gradients(model), gradients(plain)) < EXACT


# What cannot be guessed


@on_ranks(2)
def test_what_does_not_run_before_is_tried_in_the_first_pass(rank: int, world_size: int) -> None:
    model = TwoInputs()
    plan = trueshard.shard(model, tensor={"ranks": 2, **FUSED}, units=None)
    assert "TwoInputs (root): in the first pass" in str(plan)
    with torch.no_grad():
        model(torch.ones(2, 6), torch.ones(6))
    with pytest.raises(ValueError, match=naming("tensor=2", "TwoInputs", "both")):
        model(torch.ones(2, 6), torch.ones(6))


@on_ranks(2)
def test_it_can_be_turned_off_and_the_plan_says_so(rank: int, world_size: int) -> None:
    plan = trueshard.shard(Fused(), tensor={"ranks": 2, "trial": False, **FUSED})
    assert "not tried" in str(plan)
    assert trueshard.Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match=naming("trial")):
        trueshard.shard(Fused(), tensor={"ranks": 2, "trial": "no", **FUSED})


@pytest.mark.rest
def test_verify_says_what_was_tried(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "examples" / "tensor.toml"
    report = trueshard.verify(str(file), nproc=2, steps=2, overrides=[f"run.dir={tmp_path}/run"])
    assert report.held, report
    assert any("LlamaDecoderLayer model.layers.0, as 3 more: the same as one" in note for note in report.notes)


# Whole parameters between matrices that ranks share


class Scale(nn.Module):
    """A learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * self.number


class Feed(nn.Module):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(6, 7), activation(), nn.Linear(7, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(x)))


def summed(rank: int, world_size: int) -> dict[str, float]:
    """Distances of gradients, after two microbatches, from one process."""
    found = {}
    for kind in (nn.PReLU, Scale):
        for given in ({}, {"*.activation": "replicated_with_grad_allreduce"}):
            torch.manual_seed(0)
            plain = nn.Sequential(Feed(kind), Feed(kind)).double()
            model = copy.deepcopy(plain)
            styles = {"*.up": "colwise", "*.down": "rowwise", **given}
            plan = trueshard.shard(model, tensor={"ranks": world_size, **styles})
            assert ("summed over ranks" in str(plan)) is not bool(given)
            for number in range(2):
                x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
                with trueshard.accumulate(model, last=number == 1):
                    model(x).square().sum().backward()
                plain(x).square().sum().backward()
            found[f"{kind.__name__} {len(given)}"] = distance(gradients(model), gradients(plain))
    return found


@pytest.mark.rest
@on_ranks(2)
def test_a_number_between_parts_that_compute_in_bf16(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Feed(Scale), Feed(Scale))
    model = copy.deepcopy(plain)
    trueshard.shard(model, tensor={"ranks": 2, "*.up": "colwise", "*.down": "rowwise"}, mixed_precision="bf16")
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    for each in (model, plain):
        each(x).float().square().sum().backward()
    assert distance(gradients(model), gradients(plain)) < 0.1


@pytest.mark.rest
def test_whole_parameters_between_parts_get_the_sum(ranks2: Ranks, ranks3: Ranks) -> None:
    for found in ranks2.run(summed) + ranks3.run(summed):
        assert {what: far for what, far in found.items() if not far < EXACT} == {}


@on_ranks(2)
def test_a_norm_that_a_plan_forgot(rank: int, world_size: int) -> None:
    plain, model = build("qwen3"), build("qwen3")
    styles = {glob: word for glob, word in own_styles(Index(model)).items() if "_norm" not in glob}
    plan = trueshard.shard(model, tensor={"ranks": 2, **styles})
    lacking = [f"model.layers.{i}.self_attn.{name}_norm.weight" for i in range(2) for name in "qk"]
    assert sorted(plan.styles.keys() - styles.keys()) == sorted(lacking)
    again = trueshard.Plan.from_json(plan.to_json())
    assert again == plan
    ids = torch.arange(22).view(2, 11)
    for each in (model, plain):
        each(input_ids=ids, labels=ids).loss.backward()
    assert distance(gradients(model), gradients(plain)) < 1e-6


def test_large_matrices_are_tried_without_memory_for_weights() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from trueshard.options import Options
    from trueshard.parallel import tensor
    from trueshard.parallel.tensor_trial import _Trial
    from trueshard.sharding.engine import resolve

    config: Any = LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, vocab_size=256)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    index = Index(model)
    plan = tensor.resolve(index, resolve(index, Options(tensor=2), (1,)), {"tensor": 2})
    trial = _Trial(index, plan)
    trial.run()
    assert [sentence.partition(":")[2] for sentence in trial.tried] == [" the same as one process"] * 2
