"""Contract: what a sharded model gives can be copied, pickled, saved and traced as what an unsharded one gives."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import stepping
import trueshard
from cases import as_on_one_device, on_ranks
from gathering import whole
from handmade_training import batch, prepared, take_steps
from models.handmade import Scalar
from stepping import EPS


def build(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return prepared(world_size, Scalar, "AdamW", {"lr": 0.01, "eps": EPS})


@as_on_one_device()
def test_copied_state_dicts_go_back_to_what_was(rank: int, world_size: int) -> dict[str, Any]:
    """As the finders of learning rates do: copy, try, go back, train."""
    model, optimizer = build(world_size)
    take_steps(model, optimizer, rank, world_size, range(2))
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    take_steps(model, optimizer, rank, world_size, range(2, 5))
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    take_steps(model, optimizer, rank, world_size, range(5, 7))
    return {"parameters": dict(model.named_parameters()), "before": dict(before[0])}


@on_ranks(3)
def test_state_dicts_gradients_and_single_parameters_are_pickled(rank: int, world_size: int) -> None:
    model, optimizer = build(world_size)
    model(batch(0, rank, world_size)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    for given in (state, [p.grad for p in model.parameters()], optimizer.state_dict()):
        file = io.BytesIO()
        torch.save(given, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        assert str(whole(read)) == str(whole(given)) == str(whole(copy.deepcopy(given)))
    one = list(state.values())[2]
    file = io.BytesIO()
    torch.save(one, file)
    assert len(file.getvalue()) < one.to_local().nbytes + 4096  # not with what lies beside it in memory


@on_ranks(2)
def test_torchs_background_save_takes_the_state_dict(rank: int, world_size: int) -> None:
    model, optimizer = build(world_size)
    take_steps(model, optimizer, rank, world_size, range(2))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    expected = whole(dict(model.state_dict()))
    dcp.async_save(model.state_dict(), checkpoint_id=Path(str(folder[0]))).result()
    take_steps(model, optimizer, rank, world_size, range(2, 3))
    read = model.state_dict()
    dcp.load(read, checkpoint_id=Path(str(folder[0])))
    found = whole(dict(read))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "nested"])
@as_on_one_device(2)
def test_torchs_own_functions_take_state_out_and_put_it_back(rank: int, world_size: int, flatten: bool) -> Any:
    """Groups of different settings, and amsgrad's third tensor, through torch's own functions and its checkpoints."""
    model = stepping.build()
    optimizer = stepping.adamw(model, amsgrad=True)
    other = stepping.build()
    second = stepping.adamw(other, amsgrad=True)
    if world_size > 1:
        trueshard.shard(model, optimizer)
        trueshard.shard(other, second)
    stepping.train(model, optimizer, rank, world_size, [0, 1, 2])
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    if world_size > 1:
        dist.broadcast_object_list(folder)
    state = get_state_dict(model, optimizer, options=options)
    dcp.save(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=str(folder[0]))
    read = dict(zip(("model", "optimizer"), get_state_dict(other, second, options=options), strict=True))
    dcp.load(read, checkpoint_id=str(folder[0]))
    set_state_dict(other, second, model_state_dict=read["model"], optim_state_dict=read["optimizer"], options=options)
    loaded = stepping.told(other, second)
    stepping.train(other, second, rank, world_size, [3, 4])
    return sorted(map(str, state[1])) if flatten else None, loaded, stepping.told(other, second)


@pytest.mark.rest
@as_on_one_device(2, rtol=0.001, atol=1e-05)
def test_a_function_of_a_whole_step_is_compiled(rank: int, world_size: int) -> Any:
    model, optimizer = build(world_size)

    def step(seed: int) -> None:
        take_steps(model, optimizer, rank, world_size, [seed])

    if world_size > 1:
        step = torch.compile(step, backend="eager")
    for seed in range(3):
        step(seed)
    return dict(model.named_parameters())


@on_ranks(2)
def test_shards_have_storages_of_their_own_in_one_piece_of_memory(rank: int, world_size: int) -> None:
    """Neighbours in memory are stepped as one flat tensor, though each has a storage of its own."""
    from trueshard import _torch

    model, _ = build(world_size)
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor) and p.to_local().numel() and p.ndim]
    assert len({_torch.storage_identity(each) for each in shards}) == len(shards)
    assert len({_torch.memory_identity(each) for each in shards}) == 1
