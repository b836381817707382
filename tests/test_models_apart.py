"""Contract: sharded models of one process never see each other, and patches of torch are undone after the last."""

from __future__ import annotations

import ast
import copy
import gc
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import optimizer as optimizer_module

import trueshard
from cases import as_on_one_device, on_ranks
from handmade_training import batch
from models.handmade import Scalar
from stepping import accumulate, take_step
from trueshard.model import registry
from trueshard.sharding.process_patches import PATCHES

SOURCE = Path(trueshard.__file__).parent
CONTRACT = Path(__file__).parents[1] / "docs" / "concepts" / "contract.md"


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Scalar()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


@as_on_one_device()
def test_models_that_take_turns_train_as_on_one_device(rank: int, world_size: int) -> Any:
    """An actor that accumulates while a critic steps, is read by it, and is copied to a teacher in between."""
    (actor, actors), (critic, critics) = build(0), build(1)
    if world_size > 1:
        trueshard.shard(actor, actors)
        trueshard.shard(critic, critics)
    for step in range(2):
        rows = batch(step, rank, world_size, 12)
        teacher = copy.deepcopy(actor)
        for last in (False, True):
            with accumulate(actor, last):
                with torch.no_grad():
                    aim = teacher(rows)
                (critic(actor(rows).repeat(1, 3)[:, :8]).mean() + (actor(rows) - aim).pow(2).mean()).backward()
            if not last:
                critics.zero_grad()  # drops what the critic has, and nothing of the actor's
                critic(rows).pow(2).mean().backward()
                take_step(critics)
        take_step(actors)
        critics.zero_grad()
        if world_size > 1:
            runtimes = registry.models()
            assert not any(runtime.states or runtime.has_pending for runtime in runtimes)
    return dict(actor.named_parameters()), dict(critic.named_parameters())


@as_on_one_device()
def test_models_in_threads_train_as_on_one_device(rank: int, world_size: int) -> Any:
    """Two models, each with process groups of its own, trained in two threads at once; numbers of both are read."""
    models = [build(seed) for seed in range(2)]
    if world_size > 1:
        # Names differ, since DTensor remembers results of operators by equal meshes, and then takes the other's group.
        for (model, optimizer), names in zip(models, (("shard",), None), strict=True):
            group = dist.new_group()  # init_device_mesh would take the default group for both
            trueshard.shard(model, optimizer, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=names))
    results: dict[int, Any] = {}

    def train(number: int) -> None:
        model, optimizer = models[number]
        norms = []
        for step in range(4):
            for last in (False, True):
                with accumulate(model, last):
                    model(batch(10 * number + step, rank, world_size, 12)).pow(2).mean().backward()
            take_step(optimizer)
            norms.append(torch.tensor([model.last.weight.norm().item()]))
        results[number] = norms, dict(model.named_parameters())

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(2)]


def torch_now() -> dict[str, Any]:
    """What the patches replace."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    words = [f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv") for side in ("", "r")]
    words += ["__format__", "__setitem__", "numpy", "data"]
    return {
        **{f"operator {operator}": handler for operator, handler in handlers.items()},
        **{f"DTensor.{word}": vars(DTensor).get(word) for word in words},
        "Optimizer.zero_grad": torch.optim.Optimizer.zero_grad,
        "Module.zero_grad": nn.Module.zero_grad,
        "DDP": nn.parallel.DistributedDataParallel.__init__,
        "engine": torch.autograd._engine_run_backward,
        "functional_call": torch.nn.utils.stateless._functional_call,
        "step hooks": dict(optimizer_module._global_optimizer_pre_hooks),
        "module hooks": dict(torch.nn.modules.module._global_module_registration_hooks),
        "parameter hooks": dict(torch.nn.modules.module._global_parameter_registration_hooks),
        "jvp": torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction.jvp,
    }


@pytest.mark.rest
@on_ranks(2, fresh=True)
def test_patches_are_undone_with_the_last_model(rank: int, world_size: int) -> None:
    """torch is itself before the first model, after the last one, and after a ``shard()`` that failed."""
    gc.collect()
    before = torch_now()
    first, optimizer = build(0)
    trueshard.shard(first, optimizer)
    second, _ = build(1)
    trueshard.shard(second)
    during = torch_now()
    assert len(during) >= len(before)
    for name in ("DTensor.__add__", "Optimizer.zero_grad", "DDP", "engine", "functional_call", "step hooks", "jvp"):
        assert during[name] != before[name], name
    first(batch(0, rank, world_size, 12)).pow(2).mean().backward()
    optimizer.step()
    weak = weakref.ref(first)
    del first, optimizer
    gc.collect()
    assert weak() is None
    assert torch_now() == during
    del second
    gc.collect()
    assert torch_now() == before
    model, _ = build(2)
    unstepped = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="LBFGS"):
        trueshard.shard(model, unstepped)
    assert torch_now() == before


PACKAGES = ("model", "optim", "parallel", "sharding", "_torch")
MAKERS = ("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakTensorKeyDictionary", "ExitStack", "Counter")
MAKERS += ("dict", "list", "set", "count", "defaultdict", "deque")
OF_THE_PROCESS = {
    "model.registry._models",
    "model.registry._numbers",
    "model.registry._installed",
    "sharding.meeting._meetings",
}


def test_what_changes_stands_on_the_record_of_a_model() -> None:
    changing = set()
    for file in (file for package in PACKAGES for file in (SOURCE / package).glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            is_empty = isinstance(value, ast.Dict | ast.List | ast.Set) and not ast.unparse(value).strip("[{}]")
            made = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) and not value.args else ""
            if is_empty or made in MAKERS:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                changing.add(f"{file.parent.name}.{file.stem}.{ast.unparse(target)}")
    assert changing == OF_THE_PROCESS


@on_ranks(2)
def test_tensors_of_the_program_itself_stay_as_torch_has_them(rank: int, world_size: int) -> None:
    """DTensors of the program itself, on a mesh of its own, do what torch does, beside a sharded model or without."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("mine",))

    def behave() -> list[Any]:
        tensor = DTensor.from_local(torch.full((2,), rank + 1.0), mesh, [Shard(0)])
        whole = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
        results: list[Any] = []
        for function in (
            lambda: tensor.sum().item(),
            lambda: f"{tensor.sum():.2f}",
            lambda: (tensor + torch.ones(4)).full_tensor().tolist(),
            lambda: tensor.add_(torch.ones(4)).to_local().tolist(),
            lambda: tensor.numpy(),
            lambda: tensor.__setitem__(0, 7.0),
            lambda: setattr(tensor, "data", torch.zeros(4)),
            lambda: torch._foreach_lerp_([torch.zeros(2), whole], [torch.ones(2), whole], 0.5),
            lambda: torch.manual_seed(3) and tensor.normal_().to_local().tolist(),
            lambda: torch.autograd.grad(whole.clone().requires_grad_().sum(), []),
        ):
            try:
                results.append(str(function()))
            except Exception as error:
                results.append(f"{type(error).__name__}: {str(error)[:60]}")
        return results

    before = behave()
    model, optimizer = build(0)
    trueshard.shard(model, optimizer)
    assert behave() == before


def test_the_documented_table_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", CONTRACT.read_text(), re.MULTILINE)
    assert [row for row in rows if row in {(p.name, p.does, p.why) for p in PATCHES}] == [
        (patch.name, patch.does, patch.why) for patch in PATCHES
    ]
