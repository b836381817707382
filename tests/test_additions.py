"""Contract: what the user gives a sharded model later trains as on one device, or the assignment is refused by name."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import trueshard
from cases import as_on_one_device, on_ranks
from handmade_training import prepared, take_steps
from messages import naming
from models.handmade import Scalar
from parity import Ranks
from resting import all_but
from trueshard.sharding.engine import sharded


def head(model: nn.Module) -> None:
    torch.manual_seed(7)
    model.last = nn.Linear(8, 3)


def parameter(model: nn.Module) -> None:
    model.first.gain = nn.Parameter(torch.full((8,), 0.7))
    model.first.register_forward_hook(lambda module, _, output: output * module.gain)


def inside_a_block(model: nn.Module) -> None:
    torch.manual_seed(8)
    model.blocks[1].down = nn.Sequential(model.blocks[1].down, nn.Linear(8, 8), nn.Tanh())


def layer(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.last = nn.Sequential(model.last, nn.Linear(8, 8))
    model.last[-1].bias = None


def tie_among_new_ones(model: nn.Module) -> None:
    torch.manual_seed(10)
    shared = nn.Parameter(torch.randn(8, 8) / 3)
    model.last = nn.Sequential(model.last, nn.Linear(8, 8), nn.Linear(8, 8))
    model.last[1].weight = shared
    model.last[2].weight = shared


def twice(model: nn.Module) -> None:
    head(model)
    model.last.weight = nn.Parameter(torch.full((3, 8), 0.2))


def fewer_blocks(model: nn.Module) -> None:
    model.blocks = nn.ModuleList(list(model.blocks)[:2])


CHANGES = [head, parameter, inside_a_block, layer, tie_among_new_ones, twice, fewer_blocks]


@pytest.mark.parametrize("gathered", all_but([False], [False, True]), ids=["freed", "gathered"])
@pytest.mark.parametrize("change", range(len(CHANGES)), ids=[each.__name__ for each in CHANGES])
@as_on_one_device()
def test_what_is_added_trains_as_on_one_device(rank: int, world_size: int, change: int, gathered: bool) -> Any:
    model, optimizer = prepared(
        world_size, Scalar, "AdamW", {"lr": 0.1}, reshard_after_forward="never" if gathered else "default"
    )
    take_steps(model, optimizer, rank, world_size, [0])
    if gathered:
        model(torch.ones(1, 8))
    before = {id(parameter) for parameter in model.parameters()}
    CHANGES[change](model)
    new = [parameter for parameter in model.parameters() if id(parameter) not in before]
    if new:
        optimizer.add_param_group({"params": new, "lr": 0.05})
    take_steps(model, optimizer, rank, world_size, [1, 2, 3])
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    take_steps(model, made, rank, world_size, [4])
    return dict(model.named_parameters()), list(model.state_dict())


def seeded_apart(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    model = Scalar()
    trueshard.shard(model)
    torch.manual_seed(rank)
    model.last = nn.Linear(8, 3)
    with pytest.warns(UserWarning, match=r"'last\.weight', 'last\.bias'"):
        model(torch.ones(1, 8))
    return model.last.weight.detach().full_tensor(), [(r.name, r.why) for r in sharded(model).plan.replicated]


@pytest.mark.rest
def test_ranks_take_rank_0s_values_of_what_is_added(ranks3: Ranks) -> None:
    torch.manual_seed(0)
    expected = nn.Linear(8, 3).weight
    for weight, replicated in ranks3.run(seeded_apart):
        assert torch.equal(weight, expected)
        assert ("last.weight", "added after shard()") in replicated


@on_ranks(2)
def test_what_fsdp2_would_not_follow_is_refused_where_it_is_assigned(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    model = Scalar()
    trueshard.shard(model)
    with pytest.raises(RuntimeError, match=naming("last.weight", "before shard()")):
        model.last.weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(RuntimeError, match=naming("first.weight", "weight", "before shard()")):
        model.last.weight = model.first.weight
    with pytest.raises(RuntimeError, match=naming("first.weight", "before shard()")):
        model.extra = model.first.weight
    model(torch.ones(1, 8)).sum().backward()
    assert model.last.weight.grad is not None
    for remove in (lambda layer: setattr(layer, "bias", None), lambda layer: delattr(layer, "bias")):
        bias = model.last.bias
        remove(model.last)
        with pytest.raises(RuntimeError, match=naming("last.bias", "None", "before shard()")):
            model(torch.ones(1, 8))
        model.last.bias = bias
    model(torch.ones(1, 8))
    with pytest.raises(RuntimeError, match=naming("last.weight", "before shard()")):
        parametrize.register_parametrization(model.last, "weight", nn.Tanh())
    embedded: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=31, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    )
    trueshard.shard(embedded)
    with pytest.raises(RuntimeError, match=naming("c_attn", "get_peft_model()", "before shard()")):
        peft.get_peft_model(embedded, peft.LoraConfig(target_modules=["c_attn"]))
    assert embedded.resize_token_embeddings() is embedded.transformer.wte
    with pytest.raises(RuntimeError, match=naming("31", "40", "resize_token_embeddings", "before shard()")):
        embedded.resize_token_embeddings(40)
    writers: list[Callable[[Any], Any]] = [pickle.dumps, lambda it: torch.save(it, io.BytesIO())]
    writers += [lambda it: it.save_pretrained("nowhere"), lambda it: it.transformer.save_pretrained(tempfile.mkdtemp())]
    writers += [lambda it: safetensors.torch.save(it.state_dict())]
    for write in writers:
        with pytest.raises(RuntimeError, match=naming("trueshard.save(folder, model=model)")):
            write(embedded)
    with pytest.raises(
        RuntimeError,
        match=naming("sharded", "DistributedDataParallel", "ShardedTrainer"),
    ):
        DistributedDataParallel(nn.Sequential(embedded))
    words = torch.ones(2, 4, dtype=torch.long)
    embedded.eval()
    assert torch.equal(copy.deepcopy(embedded)(words).logits, embedded(words).logits)
    DistributedDataParallel(nn.Linear(2, 2))


@on_ranks(2)
def test_an_optimizer_of_parameters_that_were_replaced_is_an_error(rank: int, world_size: int) -> Any:
    model = Scalar()
    trueshard.shard(model)
    new = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
    model.last = new
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=naming("weight", "after shard()")):
        optimizer.step()
