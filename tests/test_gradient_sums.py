"""Contract: gradients of several microbatches are one process's, whether ranks add them up whole or as shards."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import trueshard
from cases import as_on_one_device, on_ranks, raises_on_ranks
from handmade_training import batch, prepared
from messages import naming
from models.handmade import Sharing, Stack, TiedBlocks
from resting import all_but
from stepping import accumulate
from trueshard import _torch
from trueshard.model import policies
from trueshard.model.names import Index
from trueshard.options import Options
from trueshard.sharding import engine

MICROBATCHES = 3
FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
WAYS: dict[str, dict[str, Any]] = {
    "shards": {"accumulate_gradients": "sharded"},
    "shards of some units": {"accumulate_gradients": {"*": "whole", "blocks.1": "sharded", "": "sharded"}},
    "kept in the reduce dtype": {"accumulate_gradients": "sharded", "exact": True},
    "kept in float64": {
        "accumulate_gradients": "sharded",
        "mixed_precision": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    },
    "on the CPU": {"accumulate_gradients": "sharded", "offload": "cpu"},
    "kept on the CPU": {"accumulate_gradients": "sharded", "offload": "cpu", "exact": True},
    "recomputed, gathered twice": {
        "accumulate_gradients": "sharded",
        "activation_checkpointing": "full",
        "reshard_after_forward": "always",
    },
}


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, world_size: int, word: Any = None) -> None:
    """Three steps; in the first one the gradients of two microbatches are given up."""
    for step in range(3):
        for number in range(-2 if step == 0 else 0, MICROBATCHES):
            if number == 0:
                optimizer.zero_grad()
            with accumulate(model, number == MICROBATCHES - 1, word):
                (model(batch(10 * step + number + 5, rank, world_size, 12)).pow(2).mean() / MICROBATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)


@pytest.mark.parametrize(
    ("count", "way"),
    all_but([(3, "shards"), (3, "kept in float64")], itertools.product((2, 3), WAYS), unpack=True),
)
@as_on_one_device("count")
def test_training_is_that_of_one_process(rank: int, world_size: int, way: str) -> Any:
    model, optimizer = prepared(world_size, Stack, "AdamW", {"lr": 1e-2, "eps": 1e-4}, **WAYS[way])
    train(model, optimizer, rank, world_size)
    return dict(model.named_parameters())


@pytest.mark.rest
@pytest.mark.parametrize(
    ("build", "way"), [(TiedBlocks, "shards"), (TiedBlocks, "kept in the reduce dtype"), (Sharing, "shards")]
)
@as_on_one_device(3)
def test_units_that_run_or_are_held_several_times(rank: int, world_size: int, build: Any, way: str) -> Any:
    model, optimizer = prepared(world_size, build, "AdamW", {"lr": 1e-2, "eps": 1e-4}, **WAYS[way])
    train(model, optimizer, rank, world_size)
    return dict(model.named_parameters())


@pytest.mark.parametrize("options", all_but([{}], [{}, {"exact": True}, {"mixed_precision": FLOAT32}]))
@as_on_one_device(4)
def test_copies_add_up_once(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    if world_size > 1:
        options = {**options, "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    words = {"accumulate_gradients": "sharded", **options}
    model, optimizer = prepared(world_size, Stack, "AdamW", {"lr": 1e-2, "eps": 1e-4}, **words)
    train(model, optimizer, rank, world_size)
    return dict(model.named_parameters())


@as_on_one_device()
def test_the_word_of_a_call_comes_before_the_plans(rank: int, world_size: int) -> Any:
    model, optimizer = prepared(world_size, Stack, "AdamW", {"lr": 1e-2, "eps": 1e-4}, accumulate_gradients="whole")
    train(model, optimizer, rank, world_size, "sharded")
    return dict(model.named_parameters())


@on_ranks(2)
def test_between_microbatches_a_rank_holds_its_part_or_the_whole(rank: int, world_size: int) -> None:
    """Elements of gradients: on gathered parameters, in ``.grad``, and kept in the dtype of reductions."""
    elements = {}
    for word, exact in (("whole", False), ("sharded", False), ("sharded", True)):
        model, _ = prepared(world_size, Stack, accumulate_gradients=word, exact=exact)
        runtime = model.__dict__["_trueshard"]
        with trueshard.accumulate(model, last=False):
            model(batch(0, rank, world_size)).mean().backward()
        leaves = (leaf for _, _, leaf in _torch.gathered_parameters(runtime.units))
        whole = sum(leaf.grad.numel() for leaf in leaves if leaf.grad is not None)
        shards = sum(p.grad.to_local().numel() for p in model.parameters() if p.grad is not None)
        kept = sum(flat.numel() for flat in runtime.sums._kept.values())
        elements[word, exact] = whole, shards, kept
    total = sum(p.numel() for p in Stack().parameters())
    assert elements["whole", False] == (total, 0, 0)
    assert elements["sharded", False] == (0, total // 2, 0)
    assert elements["sharded", True] == (0, 0, total // 2)


@on_ranks(2)
def test_a_parameter_that_one_rank_uses_in_one_microbatch(rank: int, world_size: int) -> None:
    """It has the mean over ranks; one that no rank uses has none."""

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
            return self.second(self.first(x)) if second else self.first(x)

    torch.manual_seed(0)
    model = Choice()
    trueshard.shard(model, units=None, accumulate_gradients="sharded")
    for number in range(3):
        with trueshard.accumulate(model, last=number == 2):
            model(torch.ones(2, 4), second=rank == number == 1).sum().backward()
    assert model.third.weight.grad is None
    assert model.second.bias.grad is not None
    assert model.second.bias.grad.full_tensor().tolist() == [1.0] * 4  # 2 samples, on one of 2 ranks


@on_ranks(2)
def test_what_trains_may_not_change_while_sums_of_a_unit_wait(rank: int, world_size: int) -> None:
    """They are one flat tensor of all that is trained; two parameters of one size would be taken for each other."""
    model, _ = prepared(world_size, Stack, accumulate_gradients="sharded", exact=True)
    with trueshard.accumulate(model, last=False):
        model(batch(0, rank, world_size)).mean().backward()
    model.blocks[0].up.weight.requires_grad_(False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=naming("requires_grad", "between steps")):
            model(batch(1, rank, world_size))
    model.zero_grad()
    model(batch(1, rank, world_size)).mean().backward()
    assert model.blocks[0].up.weight.grad is None


class Twice(nn.Module):
    """Two equal units behind another one, of which a loss may use the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        return self.one(x), self.two(x)


@raises_on_ranks(2, naming("different orders", "add 0 * output.sum()"))
def test_units_that_ranks_reduce_in_other_orders_are_told(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Twice()
    trueshard.shard(model, units="Linear", reshard_after_forward="never", accumulate_gradients="sharded")
    for last in (False, True):
        with trueshard.accumulate(model, last=last):
            one, two = model(torch.ones(2, 4))
            (one.sum() + two.sum() if rank == 0 else one.sum()).backward()


def test_whole_where_it_takes_little_of_the_memory() -> None:
    """Whole gradients and four times the parameters' shards: at most half."""
    plan = engine.resolve(Index(Stack()), Options(), (4,))
    size = 4 * sum(p.numel() for p in Stack().parameters())
    for memory, word in ((2 * (size + size), "whole"), (2 * (size + size) - 2, "sharded"), (None, "whole")):
        assert set(policies.accumulation_values(plan, "auto", 4, memory)) == {word}
    assert set(policies.accumulation_values(plan, "auto", 1, 1)) == {"whole"}
    half = dataclasses.replace(plan, mixed_precision=trueshard.MixedPrecision("bfloat16", "bfloat16"))
    assert policies.unreduced_bytes(half) == size // 2


@on_ranks(2)
def test_words_that_are_refused(rank: int, world_size: int) -> None:
    model = Stack()
    with pytest.raises(ValueError, match=naming("accumulate_gradients", "sharted", "sharded")):
        trueshard.shard(model, accumulate_gradients="sharted")
    with pytest.raises(ValueError, match=naming("accumulate_gradients", "block.*", "matches no unit")):
        trueshard.shard(model, accumulate_gradients={"block.*": "whole"})
    plan = trueshard.shard(model)
    assert {unit.accumulate_gradients for unit in plan.units} == {"whole"}
    with (
        pytest.raises(ValueError, match=naming("parts", "whole")),
        trueshard.accumulate(
            model,
            last=True,
            gradients="parts",  # type: ignore[arg-type]
        ),
    ):
        pass
    with pytest.raises(ValueError, match=naming("pipeline", "whole")):
        trueshard.shard(Stack(), plan=trueshard.Plan(pipeline=True, accumulate_gradients="sharded"))
