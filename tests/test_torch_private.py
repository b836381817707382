"""Every private name of torch that the library touches does what ``_torch.py`` says, or this fails by name."""

from __future__ import annotations

import copy
import datetime
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from models.handmade import Stack
from parity import Ranks
from trueshard import _torch

CALLED = {
    "wrapper_attribute",
    "renames_when_loading",
    "is_compiled_in_place",
    "fsdp_modules",
    "forget",
    "initialise",
    "refresh_dtypes",
    "gathered_parameters",
    "gathered_units",
    "in_pass",
    "tensors_in",
    "interrupted",
    "reset_iteration",
    "set_reshard_after_forward",
    "local",
    "storage_identity",
    "version",
    "forget_gathered",
    "is_initialised",
    "own_class",
    "call_first",
    "has_accumulation_hooks",
    "at_end_of_backward",
    "in_backward",
    "find_every_inf",
    "average_mixed_lists",
    "dtensor_over",
    "shards_of",
    "make_hookable",
    "shards_placed_alike",
    "specs_of",
    "world",
    "timeout_of",
    "is_placed_as",
    "join_shards",
}


def test_every_function_is_called_here() -> None:
    functions = {
        name
        for name, value in vars(_torch).items()
        if inspect.isfunction(value) and value.__module__ == _torch.__name__ and not name.startswith("_")
    }
    assert functions == CALLED


def test_wrappers_and_compilation() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    compiled, recomputed = torch.compile(Stack(), backend="eager"), checkpoint_wrapper(Stack())
    for wrapper in (compiled, recomputed):
        attribute = _torch.wrapper_attribute(wrapper)
        assert attribute is not None
        assert isinstance(getattr(wrapper, attribute), Stack)
    assert _torch.wrapper_attribute(Stack()) is None
    assert [_torch.renames_when_loading(wrapper) for wrapper in (compiled, recomputed)] == [False, True]
    model = Stack()
    assert not _torch.is_compiled_in_place(model)
    model.compile(backend="eager")
    assert _torch.is_compiled_in_place(model)


def test_tensors() -> None:
    a = torch.zeros(4)
    assert _torch.storage_identity(a) == _torch.storage_identity(a[2:]) != _torch.storage_identity(a.clone())
    meta = torch.zeros(4, device="meta")
    assert _torch.storage_identity(meta) != _torch.storage_identity(torch.zeros(4, device="meta"))
    before = _torch.version(a)
    a.add_(1)
    assert _torch.version(a) > before
    assert [t is a for t in _torch.tensors_in({"x": [a, (1, a)], "y": None})] == [True, True]
    assert _torch.local(a) is a


def test_backward() -> None:
    x = torch.zeros(2, requires_grad=True)
    seen: list[Any] = []

    def hook(_: torch.Tensor) -> None:
        seen.append(_torch.in_backward())
        _torch.at_end_of_backward(lambda: seen.append("end"))

    x.register_hook(hook)
    assert not _torch.in_backward()
    x.sum().backward()
    assert seen == [True, "end"]


def units(rank: int, world_size: int) -> None:
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    _torch.forget([model.blocks[0]])
    model.blocks[0] = Stack().blocks[0]
    fully_shard(model.blocks[0])
    fully_shard(model)
    assert _torch.own_class(model) is Stack is _torch.own_class(Stack())
    assert _torch.fsdp_modules(model) == [model, *model.blocks]
    assert not _torch.is_initialised(model)
    _torch.initialise(model)
    assert _torch.is_initialised(model)
    assert model._get_fsdp_state()._is_root
    gathered = _torch.gathered_units(_torch.fsdp_modules(model))
    assert gathered() == []
    inside: list[bool] = []
    model.blocks[1].register_forward_pre_hook(lambda m, _: inside.append(_torch.in_pass(m)))
    loss = model(torch.randn(2, 8)).sum()
    assert inside == [True]
    assert not _torch.in_pass(model.blocks[1])
    assert gathered() == [model]
    names = {name: (sharded, gathered) for name, sharded, gathered in _torch.gathered_parameters(model)}
    assert set(names) == {name for name, _ in model.named_parameters()}
    assert names["first.weight"][1] is model.first.weight
    assert not _torch.interrupted(model)
    loss.backward()
    assert names["first.weight"][0] is model.first.weight
    for write in (model.first.weight.detach(), model.first.weight.to_local()):
        before = _torch.version(model.first.weight)
        with torch.no_grad():
            write.add_(1)
        assert _torch.version(model.first.weight) > before
    _torch.set_reshard_after_forward(model.blocks[0], False, {})
    meshes: dict[Any, Any] = {}
    for module in _torch.fsdp_modules(model)[2:]:
        _torch.set_reshard_after_forward(module, 2, meshes)
    assert len(meshes) == 1
    model(torch.randn(2, 8)).sum().backward()
    model.blocks[1].up.weight.requires_grad_(False)
    _torch.refresh_dtypes(model)
    model.double()
    for module in _torch.fsdp_modules(model):
        _torch.forget_gathered(module)
    _torch.refresh_dtypes(model)
    assert model(torch.randn(2, 8, dtype=torch.float64)).dtype == torch.float64
    model.float()
    for module in _torch.fsdp_modules(model):
        module.reshard()
        _torch.forget_gathered(module)
    _torch.refresh_dtypes(model)
    model.blocks[1].register_forward_hook(_fail)
    try:
        model(torch.randn(2, 8))
    except ValueError:
        assert _torch.interrupted(model)
        _torch.reset_iteration(model)
        assert not _torch.interrupted(model)
        assert gathered() == []
        assert all(gathered.grad is None for _, _, gathered in _torch.gathered_parameters(model))
    else:
        raise AssertionError("the hook did not fail")


def scaling(rank: int, world_size: int) -> None:
    """A gradient scaler's operator on a list that a replicated gradient leads: torch's own handler loses the inf."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (world_size,))
    _torch.find_every_inf()
    shard = torch.full((2,), torch.inf if rank == 1 else 1.0)
    grads = [DTensor.from_local(torch.ones(2), mesh, [Replicate()]), DTensor.from_local(shard, mesh, [Shard(0)])]
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
    assert found.item() == 1.0
    assert grads[0].to_local().tolist() == [0.5, 0.5]


def averaging(rank: int, world_size: int) -> None:
    """torch's averaging functions on lists of parameters and buffers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

    mesh = init_device_mesh("cpu", (world_size,))
    _torch.average_mixed_lists()
    for function in (get_ema_multi_avg_fn(0.5), get_swa_multi_avg_fn()):
        for mixed in (True, False):
            old, new = ([DTensor.from_local(torch.full((2,), v), mesh, [Shard(0)])] for v in (0.0, 4.0))
            if mixed:
                old, new = [torch.zeros(3), *old, torch.zeros(2)], [torch.full((3,), 4.0), *new, torch.full((2,), 4.0)]
            function(old, new, torch.tensor(1))
            assert {value for each in old for value in _torch.local(each).tolist()} == {2.0}


def test_averaging(ranks2: Ranks) -> None:
    ranks2.run(averaging)


def test_scaling(ranks2: Ranks) -> None:
    ranks2.run(scaling)


def _fail(*_: Any) -> None:
    raise ValueError


def test_units(ranks4: Ranks) -> None:
    ranks4.run(units)


def test_hook_dictionaries_are_where_they_are_expected() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert parameter._backward_hooks is None
    first = parameter.register_hook(lambda g: g)
    second = parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert list(parameter._backward_hooks.values()) != []
    assert _torch.has_accumulation_hooks(parameter)
    assert list(parameter._post_accumulate_grad_hooks.values()) != []
    third = parameter.register_post_accumulate_grad_hook(_fail)
    _torch.call_first(parameter, third)
    assert next(iter(parameter._post_accumulate_grad_hooks.values())) is _fail
    for handle in (first, second, third):
        handle.remove()
    assert not parameter._backward_hooks
    assert not _torch.has_accumulation_hooks(parameter)
    assert set(parameter.__dict__) <= _torch.PARAMETER_ATTRIBUTES


def neighbours(rank: int, world_size: int) -> None:
    """Shards of a unit lie behind one another, each with its own version; gradients have their parameters' records."""
    model = Stack()
    fully_shard(model)
    values = [p.full_tensor() for p in model.parameters()]
    _torch.join_shards(model, small=0)
    locals_ = _torch.shards_of(model.parameters())
    assert all(a is _torch.local(b) for a, b in zip(locals_, model.parameters(), strict=True))
    assert len({_torch.storage_identity(local) for local in locals_}) == 1
    assert all(torch.equal(p.full_tensor(), value) for p, value in zip(model.parameters(), values, strict=True))
    versions = [_torch.version(local) for local in locals_]
    with torch.no_grad():
        locals_[0].add_(1)
    assert [_torch.version(local) for local in locals_[1:]] == versions[1:]
    model(torch.randn(2, 8)).sum().backward()
    members: Any = list(model.parameters())
    grads = [p.grad for p in members]
    assert all(a is b for a, b in zip(_torch.specs_of(grads), _torch.specs_of(members), strict=True))
    assert _torch.specs_of([torch.ones(2)]) == [None]
    shards = _torch.shards_placed_alike(grads)
    assert shards is not None
    assert all(shard is _torch.local(grad) for shard, grad in zip(shards, grads, strict=True))
    assert _torch.world() is torch.distributed.group.WORLD
    assert isinstance(_torch.timeout_of(_torch.world()), datetime.timedelta)
    assert _torch.is_placed_as(grads[0], members[0])
    elsewhere = DTensor.from_local(torch.ones(2), members[0].device_mesh, [Replicate()])
    wide = DTensor.from_local(torch.ones(2).double(), members[0].device_mesh, members[0].placements)
    for other in (elsewhere, wide, torch.ones(2)):
        assert _torch.shards_placed_alike([*grads, other]) is None
    assert not _torch.is_placed_as(elsewhere, members[0])
    part = torch.arange(20.0)[4:20].view(4, 4)
    made = _torch.dtensor_over(part, members[0], torch.Size((4 * world_size, 4)), (4, 1))
    assert _torch.local(made) is part
    assert torch.equal(copy.deepcopy(made).to_local(), part)


def test_shards_in_memory_and_the_records_of_gradients(ranks2: Ranks) -> None:
    ranks2.run(neighbours)


class Bare(torch.optim.Optimizer):
    """As wrappers of optimizers do it: the base class's constructor is not called."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.state, self.param_groups = {}, [{"params": [parameter]}]

    def step(self, closure: Any = None) -> None:
        """Does nothing."""


def test_an_optimizer_without_hooks_is_made_hookable() -> None:
    optimizer, seen = Bare(nn.Parameter(torch.ones(1))), []
    _torch.make_hookable(optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]
