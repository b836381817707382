"""What gathers on somebody's call ends in an error of its own name where some ranks call it alone."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trueshard
from cases import on_ranks
from messages import naming
from models.handmade import Stack
from parity import Ranks
from resting import all_but
from trueshard.sharding.meeting import meet_to_gather


def stack(mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack(3)
    optimizer = torch.optim.AdamW(model.parameters())
    trueshard.shard(model, optimizer, mesh=mesh)
    return model, optimizer


@torch.no_grad()
def evaluate(model: nn.Module) -> Any:
    return model(torch.ones(2, 8))


def gather(model: nn.Module) -> None:
    with trueshard.gathered(model):
        pass


def norm(model: nn.Module) -> Any:
    weight: Any = next(iter(model.parameters()))
    return weight.norm().full_tensor()


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "full_tensor": (lambda model: next(iter(model.parameters())).full_tensor(), "full_tensor()"),
    "norm": (norm, "full_tensor()"),
    "gathered": (gather, "gathering of the model"),
    "weights": (lambda model: list(trueshard.weights(model)), "gathering of the model"),
    "evaluation": (evaluate, "forward() without gradients"),
}


def lonely(rank: int, world_size: int, folder: str, call: str, others: str) -> None:
    """Rank 1 makes a call; rank 0 makes none, or goes on to train."""
    over, store, limit = Path(folder, "over"), f"file://{folder}/store", datetime.timedelta(seconds=1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=limit)
    model, _ = stack()
    if rank:
        try:
            function, what = CALLS[call]
            with pytest.raises(RuntimeError, match=naming(what, "test_meeting.py:", "collective", "all ranks")):
                function(model)
        finally:
            over.touch()
        return
    if others == "train":
        with pytest.raises(RuntimeError):  # of gloo: its partner has waited elsewhere, and is gone
            model(torch.ones(2, 8)).sum().backward()
    deadline = time.monotonic() + 30
    while not over.exists():
        assert time.monotonic() < deadline, "the call goes on"
        time.sleep(0.05)


CASES = [(call, others) for call in CALLS for others in ("nothing", "train")]


@pytest.mark.parametrize(("call", "others"), all_but([("evaluation", "train")], CASES, unpack=True))
def test_a_call_on_one_rank_alone_names_itself(call: str, others: str, tmp_path: Path, ranks2: Ranks) -> None:
    ranks2.run(lonely, str(tmp_path), call, others, group=False)


@on_ranks(2)
def test_ranks_that_call_different_things_are_both_told(rank: int, world_size: int) -> None:
    model, _ = stack()
    weight: Any = next(iter(model.parameters()))
    with pytest.raises(RuntimeError, match=naming("something else", "all ranks")):
        evaluate(model) if rank else weight.full_tensor()
    assert torch.isfinite(evaluate(model)).all()  # the model goes on


@on_ranks(4)
def test_copies_of_the_model_may_be_evaluated_apart(rank: int, world_size: int) -> None:
    model, _ = stack(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    weight: Any = next(iter(model.parameters()))
    if rank < 2:
        assert evaluate(model).shape == (2, 8)
        assert weight.full_tensor().shape == weight.shape


@on_ranks(2)
def test_a_step_of_training_does_not_meet(rank: int, world_size: int) -> None:
    model, optimizer = stack()
    with pytest.MonkeyPatch.context() as patch:
        for place in ("hooks", "dtensor_compat"):
            patch.setattr(f"trueshard.sharding.{place}.meet_to_gather", lambda *_: pytest.fail("ranks met"))
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            trueshard.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    meet_to_gather("a part that one rank has", mesh, [0])  # nobody to meet
