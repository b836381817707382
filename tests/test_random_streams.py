"""What is drawn at random by ranks that read the same samples is what one process draws, whatever their seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueshard
from cases import on_ranks
from gathering import gradients
from messages import naming
from resting import all_but
from tensor_models import SIZES, batch, distance, llama
from trueshard.checkpoint.state import seed_all

STYLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def drop(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.3)


def mask(x: torch.Tensor) -> torch.Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.7))


def drop_path(x: torch.Tensor) -> torch.Tensor:
    """Stochastic depth, of each sample."""
    return x * torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.5)


def by_others(x: torch.Tensor) -> torch.Tensor:
    return x * random.random() + numpy.random.random()  # noqa: NPY002


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"layer": nn.Dropout(0.3)}
DRAWS |= {function.__name__: function for function in (noise, drop, mask, drop_path, by_others)}


class Block(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(6, 10), nn.Linear(10, 6), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.draw(self.down(F.silu(self.up(x))))


class Drawing(nn.Module):
    """Draws in each of its blocks, and before them."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw, self.first, self.blocks = draw, nn.Linear(6, 6), nn.ModuleList(Block(draw) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.draw(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


def of_transformers(name: str) -> Any:
    import transformers

    kinds: dict[str, dict[str, Any]] = {
        "SeedOss": {"residual_dropout": 0.2, "attention_dropout": 0.0, "head_dim": 8},
        "Mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.2},
        "Phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.2, "input_jitter_noise": 0.2},
    }
    config = getattr(transformers, f"{name}Config")(**SIZES, pad_token_id=0, **kinds[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    if name != "SeedOss":
        model.set_experts_implementation("eager")
    return model


def check(rank: int, tensor: Any, build: Callable[[], nn.Module], loss: Callable[[nn.Module, int, int], Any]) -> None:
    """Hold two microbatches and what is drawn between against one process, which has the seed of a row's first rank."""
    torch.manual_seed(0)
    plain = build().double().train()
    model = build().double().train()
    model.load_state_dict(plain.state_dict())
    recomputed = getattr(model, "draw", None) is not by_others  # torch's recomputation keeps its own generators alone
    before = torch.get_rng_state()
    trueshard.shard(model, tensor=tensor, activation_checkpointing="full" if recomputed else "none")
    assert torch.equal(torch.get_rng_state(), before)
    ranks = tensor["ranks"] if isinstance(tensor, dict) else tensor
    row, between = rank // ranks, {}
    for number in range(torch.distributed.get_world_size() // ranks):
        seed_all(100 + ranks * number)
        for microbatch in range(2):
            (loss(plain, number, microbatch) / torch.distributed.get_world_size() * ranks).backward()
            between[number, microbatch] = torch.rand(1)
    seed_all(100 + rank)
    for microbatch in range(2):
        with trueshard.accumulate(model, last=microbatch == 1):
            loss(model, row, microbatch).backward()
        assert torch.equal(torch.rand(1), between[row, microbatch])  # ranks with other samples draw by themselves
        if rank % ranks:
            seed_all(7)  # and may draw, or seed, or load what they will
    found = distance(gradients(model), gradients(plain))
    assert found < 1e-5, found  # some norms compute in float32


@pytest.mark.parametrize("name", all_but(["drop_path", "layer"], DRAWS))
@on_ranks(4)
def test_what_a_forward_draws_is_that_of_one_process(rank: int, world_size: int, name: str) -> None:
    def loss(model: nn.Module, row: int, microbatch: int) -> torch.Tensor:
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(10 * row + microbatch), dtype=torch.float64)
        return model(x).pow(2).mean()

    check(rank, {"ranks": 2, **STYLES}, lambda: Drawing(DRAWS[name]), loss)


@pytest.mark.parametrize("name", all_but(["SeedOss sequence"], ["SeedOss", "SeedOss sequence", "Mixtral", "Phimoe"]))
@on_ranks(2)
def test_models_of_transformers_that_draw_by_themselves(rank: int, world_size: int, name: str) -> None:
    def loss(model: Any, row: int, microbatch: int) -> torch.Tensor:
        ids = batch(microbatch)
        return model(input_ids=ids, labels=ids).loss

    kind, _, sequence = name.partition(" ")  # a sum of parts with one mask on all is the masked sum
    check(rank, {"ranks": 2, "sequence": bool(sequence)}, lambda: of_transformers(kind), loss)


@pytest.mark.parametrize("words", all_but([{"tensor": 2}], [{"tensor": 2}, {"context": 2, "tensor": 2}]))
@on_ranks(4)
def test_answers_are_sampled_as_by_one_process(rank: int, world_size: int, words: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain: Any = llama().double()
    model: Any = llama().double()
    model.load_state_dict(plain.state_dict())
    trueshard.shard(model, **words)
    ranks = words["tensor"] * words.get("context", 1)
    ids = torch.arange(8).view(2, 4)
    answers = []
    for each, seed in ((plain, 5 + rank // ranks * ranks), (model, 5 + rank)):
        torch.manual_seed(seed)
        drawn = [each.generate(ids, max_new_tokens=6, do_sample=True, pad_token_id=0) for _ in range(2)]
        answers.append([*drawn, torch.rand(1)])
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.rest
@on_ranks(2)
def test_a_compiled_forward_draws_alike(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Drawing(drop)
    trueshard.shard(model, tensor={"ranks": 2, **STYLES}, compile=True)
    torch.manual_seed(rank)
    for _ in range(2):
        model(torch.ones(2, 3, 6)).pow(2).mean().backward()
    found = gradients(model)
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, found["first.weight"])
    assert torch.equal(everyone[0], everyone[1])
    assert everyone[0].abs().sum() > 0


class Parted(nn.Module):
    """Draws where ranks have parts: of the features between two matrices, of the tokens between two blocks."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(6, 10), nn.Linear(10, 6), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.draw(self.up(x)) if self.training else self.up(x))


class Dropping(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


@on_ranks(2)
def test_what_is_drawn_for_parts_is_refused_by_name(rank: int, world_size: int) -> None:
    for draw in (noise, drop, mask):
        for model in (Parted(draw), Parted(draw).eval()):  # it may be trained later
            with pytest.raises(ValueError, match=naming("random", "part", "'down'", "dropout")):
                trueshard.shard(model, tensor={"ranks": 2, "up": "colwise", "down": "rowwise"})
    model: Any = llama().eval()
    model.model.layers[1].post_attention_layernorm = Dropping(32)  # of its tokens
    with pytest.raises(ValueError, match=naming("random", "part", "layers.1.post_attention_layernorm", "dropout")):
        trueshard.shard(model, tensor={"ranks": 2, "sequence": True})
    with pytest.raises(ValueError, match=naming("context", "random", "parts", "model.layers.0", "dropout")):
        trueshard.shard(of_transformers("SeedOss").eval(), context=2)
