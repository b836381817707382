"""Every private name of torch that the library touches does what ``_torch`` says, or this fails by name."""

from __future__ import annotations

import contextlib
import copy
import datetime
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forks
import trueshard
from cases import on_ranks
from models.handmade import Stack
from trueshard import _torch
from trueshard.distributed import gather_parts
from trueshard.model import registry
from trueshard.planner.simulation.fake_values import KnownValues


def is_any(value: Any) -> bool:
    """Every DTensor, as if a sharded model had them all."""
    return isinstance(value, DTensor)


def test_every_function_is_called_here() -> None:
    below = f"{_torch.__name__}."
    files = [importlib.import_module(each.name) for each in pkgutil.iter_modules(_torch.__path__, below)]
    functions = {
        name
        for file in files
        for name, value in vars(file).items()
        if inspect.isfunction(value) and value.__module__ == file.__name__ and not name.startswith("_")
    }
    called = set(re.findall(r"\b_torch\.(\w+)", Path(__file__).read_text()))
    assert functions <= called, functions - called
    assert all(hasattr(_torch, name) for name in functions)


PROBED = """
import warnings
import torch, torch.distributed.tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
{change}
import trueshard
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    try:
        trueshard.shard(model, optimizer)
        trueshard.shard(torch.nn.Linear(4, 4))
    except RuntimeError as error:
        print("error:", error)
    else:
        model(torch.ones(2, 4)).sum().backward()
        trueshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print("sum:", sum(p.full_tensor().isfinite().sum().item() for p in model.parameters()))
print(*(f"warned: {{each.message}}" for each in told if "torch " in str(each.message)), sep="\\n")
"""


def probed(change: str, run: Any = forks.run) -> str:
    """What a process says that shards with another torch than this one."""
    code = PROBED.format(change=change)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_newer_torch_is_told_once() -> None:
    said = probed("torch.__version__ = '2.99.0'")
    assert said.count("warned: ") == 1
    assert "torch 2.99.0" in said
    assert "2.11 to 2.15" in said
    assert "sum: 40" in said


def test_what_torch_lacks_is_named_where_it_is_needed() -> None:
    said = probed("del _fsdp_param_group.FSDPParamGroup._init_mp_dtypes")
    assert "error: torch " in said
    assert "FSDPParamGroup._init_mp_dtypes" in said
    assert "2.11 to 2.15" in said


@pytest.mark.rest
def test_what_torch_lacks_only_for_speed_is_done_without() -> None:
    said = probed("del torch._foreach_norm", subprocess.run)  # looked at by modules that a fork has imported
    assert "sum: 40" in said
    assert "torch._foreach_norm" in said


def test_nothing_is_lacking_after_a_compiled_model_has_run() -> None:
    said = probed("torch.compile(torch.nn.Linear(4, 4), backend='eager')(torch.ones(2, 4)).sum().backward()")
    assert "error: " not in said
    assert "sum: 40" in said


@on_ranks(2)
def test_fsdp_1_is_a_wrapper_and_is_refused(rank: int, world_size: int) -> None:
    model = FullyShardedDataParallel(Stack(), use_orig_params=True, device_id=torch.device("cpu"))
    attribute = _torch.wrapper_attribute(model)
    assert attribute is not None
    assert isinstance(getattr(model, attribute), Stack)
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel \(FSDP 1\): shard what it holds"):
        trueshard.shard(model)


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


def test_packed_placements() -> None:
    packed = _torch.packed(0, 2)
    assert (packed.dim, _torch.split_factor(packed), _torch.split_factor(Shard(0))) == (0, 2, 1)
    assert not packed.is_replicate()


def test_tensors() -> None:
    a = torch.zeros(4)
    assert _torch.storage_identity(a) == _torch.storage_identity(a[2:]) != _torch.storage_identity(a.clone())
    meta = torch.zeros(4, device="meta")
    assert _torch.storage_identity(meta) != _torch.storage_identity(torch.zeros(4, device="meta"))
    before = _torch.version(a)
    a.add_(1)
    assert _torch.version(a) > before
    assert [t is a for t in _torch.tensors_in({"x": [a, (1, a)], "y": None})] == [True, True]
    assert _torch.mapped(lambda leaf: leaf + 1, {"x": [1, (2,)]}) == {"x": [2, (3,)]}
    assert _torch.to_device((a, None), torch.device("meta"))[0].is_meta
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


@on_ranks(4)
def test_units(rank: int, world_size: int) -> None:
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    _torch.forget([model.blocks[0]])
    model.blocks[0] = Stack().blocks[0]
    fully_shard(model.blocks[0])
    fully_shard(model)
    assert _torch.own_class(model) is Stack is _torch.own_class(Stack())
    assert _torch.fsdp_modules(model) == [model, *model.blocks]
    assert model._get_fsdp_state()._is_root is None
    for _ in range(2):
        _torch.initialise(model)
        assert model._get_fsdp_state()._is_root
    gathered = _torch.gathered_units(_torch.fsdp_modules(model))
    assert gathered() == []
    inside: list[bool] = []
    model.blocks[1].register_forward_pre_hook(lambda m, _: inside.append(_torch.in_pass(m)))
    loss = model(torch.randn(2, 8)).sum()
    assert inside == [True]
    assert not _torch.in_pass(model.blocks[1])
    assert gathered() == [model]
    names = {name: (sharded, gathered) for name, sharded, gathered in _torch.gathered_parameters(model.modules())}
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
    _torch.refresh_dtypes(model)
    assert model(torch.randn(2, 8, dtype=torch.float64)).dtype == torch.float64
    model.float()
    for module in _torch.fsdp_modules(model):
        module.reshard()
    _torch.refresh_dtypes(model)
    model.blocks[1].register_forward_hook(_fail)
    try:
        model(torch.randn(2, 8))
    except ValueError:
        assert _torch.interrupted(model)
        _torch.reset_iteration(model)
        assert not _torch.interrupted(model)
        assert gathered() == []
        assert all(gathered.grad is None for _, _, gathered in _torch.gathered_parameters(model.modules()))
    else:
        raise AssertionError("the hook did not fail")


@on_ranks(2)
def test_what_is_cut_inside_its_rows_rests_on_a_smaller_group(rank: int, world_size: int) -> None:
    """FSDP2 would join what comes back along the dimension of the shards."""
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    model[0].weight.data.copy_(torch.arange(12.0).view(3, 4))
    fully_shard(model[0], shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    fully_shard(model)
    _torch.set_reshard_after_forward(model[0], 2, {})
    output = model(torch.ones(1, 4))
    assert model[0].weight.to_local().shape == (6,)
    model[0].unshard()
    assert torch.equal(model[0].weight, torch.arange(12.0).view(3, 4))
    output.sum().backward()
    assert model[0].weight.grad.to_local().shape == (3, 2)


@on_ranks(2)
def test_scaling(rank: int, world_size: int) -> None:
    """A gradient scaler's operator on a list that a replicated gradient leads: torch's own handler loses the inf."""
    mesh = init_device_mesh("cpu", (world_size,))
    undo = _torch.find_every_inf(is_any)
    shard = torch.full((2,), torch.inf if rank == 1 else 1.0)
    grads = [DTensor.from_local(torch.ones(2), mesh, [Replicate()]), DTensor.from_local(shard, mesh, [Shard(0)])]
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
    assert found.item() == 1.0
    assert grads[0].to_local().tolist() == [0.5, 0.5]
    undo()


@on_ranks(2)
def test_parameters_that_a_rank_does_not_use(rank: int, world_size: int) -> None:
    """A unit of which each rank uses another part: both parts get the mean over ranks, to which one rank gives zero."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[rank](x)

    class Whole:
        def fills(self, unit: nn.Module) -> bool:
            return True

        def reduces(self, unit: nn.Module, used: list[nn.Parameter]) -> None:
            used_shapes.append([tuple(parameter.shape) for parameter in used])

        def keeps(self, unit: nn.Module) -> bool:
            return False

    used_shapes: list[list[tuple[int, ...]]] = []
    model = nn.Sequential(nn.Linear(4, 4), Parts())
    _torch.follow_accumulation([fully_shard(model[1])], Whole())
    fully_shard(model)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(torch.ones(2, 4)).sum().backward()
    grads = [part.bias.grad.full_tensor().tolist() for part in model[1].parts]
    assert grads == [[2.0], [2.0] * 3]
    assert used_shapes == [[tuple(parameter.shape) for parameter in model[1].parts[rank].parameters()]]


@on_ranks(4)
def test_the_sum_of_a_copy_waits(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(4, 3), mesh=mesh)
    assert _torch.adds_copies_once(model)
    assert not _torch.adds_copies_once(fully_shard(nn.Linear(4, 3), mesh=mesh["shard"]))
    model.set_requires_all_reduce(False)
    for dropped in (True, False):
        model(torch.ones(2, 4)).sum().backward()
        (weight, weights), (bias, biases) = _torch.places_in_sum(model)
        assert (weight, weights, bias, biases) == (model.weight, 8, model.bias, 2)  # three rows on two ranks are four
        waiting = _torch.sum_of_copy(model)
        assert waiting is not None
        assert waiting.shape == (10,)
        if dropped:
            _torch.drop_sum_of_copy(model)
            assert _torch.sum_of_copy(model) is None
    model.set_requires_all_reduce(True)
    model(torch.ones(2, 4)).sum().backward()
    assert _torch.sum_of_copy(model) is None
    assert model.bias.grad.full_tensor().tolist() == [4.0] * 3


def test_a_trial_of_stages_keeps_gradients() -> None:
    from torch.distributed.pipelining import schedules

    before = getattr(schedules._PipelineSchedule, "_initialize_pp_stages", None)
    undo = _torch.try_stages_in(contextlib.nullcontext)
    has_trial = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    assert (getattr(schedules._PipelineSchedule, "_initialize_pp_stages", None) is not before) is has_trial
    undo()


@on_ranks(2)
def test_a_unit_that_reduces_at_the_end(rank: int, world_size: int) -> None:
    class Reads(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if world_size_of_model > 1:
                self[0].unshard()
            return self[0](x @ self[0].weight.T)

    grads = []
    for world_size_of_model in (1, world_size):
        torch.manual_seed(0)
        model = Reads(nn.Linear(4, 4))
        if world_size_of_model > 1:
            _torch.reduce_at_end(fully_shard(model[0], reshard_after_forward=False))
            fully_shard(model)
        model(torch.ones(2, 4)).square().sum().backward()
        grad = model[0].weight.grad
        grads.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    assert torch.allclose(*grads)


@on_ranks(2, fresh=True)  # the handlers of a model that lives on would answer after ``undo``
def test_rows_of_the_whole(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(12.0).view(3, 4)
    tensor = _torch.cut_like(rows, distribute_tensor(rows, mesh, [Shard(0)]))
    assert torch.equal(_torch.gathered(tensor), rows)
    undo = _torch.together(
        _torch.reduce_over_the_whole(is_any, lambda _: None),
        _torch.view_what_is_cut(is_any),
        _torch.write_through_views(is_any),
        _torch.clip_over_meshes(is_any),
        _torch.refuse_mixed(is_any, lambda tensor: f"of {tensor.shape[0]} rows"),
        _torch.refuse_storage(is_any, lambda: "refused"),
    )
    assert tensor.storage() == "refused"
    with pytest.raises(RuntimeError, match="of 4 rows"):
        torch.ones(2, 4) @ tensor.T
    other = distribute_tensor(rows[:2], init_device_mesh("cpu", (2,), mesh_dim_names=("other",)), [Shard(0)])
    norms = torch.stack([tensor.norm(), other.norm()])
    assert norms.full_tensor().tolist() == [rows.norm().item(), rows[:2].norm().item()]
    torch._foreach_mul_([other], norms[0] * 0)
    assert not other.full_tensor().any()
    assert nn.functional.mse_loss(tensor, tensor * 0).full_tensor().item() == rows.pow(2).mean().item()
    assert tensor.sum(dim=()).full_tensor().item() == rows.sum().item()
    tensor.view(-1)[3:6].zero_()
    assert tensor.full_tensor().flatten()[:7].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 6.0]
    undo()
    with pytest.raises(RuntimeError, match="flatten"):
        tensor.view(-1)
    negated = torch.ops.aten.neg.default
    undo = _torch.handle([negated], lambda operator, args, kwargs: rows, is_any)
    assert (-tensor) is rows
    assert isinstance(_torch.without_handler(negated, (tensor,), {}), DTensor)
    undo()
    assert isinstance(-tensor, DTensor)


@on_ranks(2)
def test_what_the_oldest_torch_lacks(rank: int, world_size: int) -> None:
    """What torch 2.11 lacks: frozen integers, a rule for ``!=``, a backward that dynamo leaves alone; and jvp."""
    undo = _torch.together(_torch.complete_units(), _torch.compare_tensors(is_any))
    model = Stack()
    model.register_parameter("bytes", nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    _torch.keep_dynamo_out(_torch.fsdp_modules(model))
    seen: list[torch.dtype] = []
    model.first.register_forward_hook(lambda *_: seen.append(model.bytes.dtype))
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, 8), torch.ones(2, 8))
        value, derivative = forward_ad.unpack_dual(model(x))
    (value.sum() + derivative.sum()).backward()
    assert model.bytes.full_tensor().tolist() == [0, 1, 2, 3, 4, 5]
    assert seen == [torch.uint8]
    weight: Any = model.first.weight.detach()
    assert weight.grad is None
    assert (weight != weight.neg()).full_tensor().all()
    undo()


def test_transforms_are_known() -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.refuses_transforms())
        return x * 2

    function(torch.ones(1))
    torch.func.jvp(function, (torch.ones(1),), (torch.ones(1),))
    assert seen == [False, not _torch.TAKES_TRANSFORMS]


@on_ranks(2)
def test_numbers(rank: int, world_size: int) -> None:
    """Numbers read from DTensors, and random ones drawn into them; the store of the default group."""
    mesh, read, met = init_device_mesh("cpu", (world_size,)), [], list[Any]()
    pairs = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    _torch.limit_alike(pairs)
    limits = [_torch.timeout_of(pairs.get_group(dim)) for dim in range(2)]
    assert limits == [_torch.timeout_of(torch.distributed.group.WORLD)] * 2
    given: list[Any] = []
    undo = _torch.together(
        _torch.read_numbers_of_the_whole(is_any, read.append),
        _torch.gather_after(is_any, met.append),
        _torch.draw_as_one_device(is_any),
        _torch.assign_data_with(is_any, lambda *pair: given.append(pair)),
        _torch.take_plain_tensors(is_any, lambda _: None, lambda value: value.full_tensor()),
    )
    tensor = DTensor.from_local(torch.full((2,), rank + 1.0), mesh, [Shard(0)])
    assert (tensor.sum().item(), f"{tensor.max():.1f}", float(tensor.detach().min())) == (6.0, "2.0", 1.0)
    assert len(read) == 3
    assert (tensor - torch.ones(4)).full_tensor().tolist() == [0.0, 0.0, 1.0, 1.0]
    tensor.data = tensor
    assert given == [(tensor, tensor)]
    torch.manual_seed(0)
    assert torch.equal(tensor.normal_().full_tensor(), torch.empty(4).normal_(generator=torch.manual_seed(0)))
    undo()
    assert len(met) >= 2
    assert tensor.sum().item() != 6.0
    assert len(read) == 3
    _torch.store().set(f"numbers/{rank}", "here")
    _torch.store().wait([f"numbers/{each}" for each in range(world_size)])

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

    model = fully_shard(Tied(), mesh=mesh)
    model.unshard()
    weight, end = model.one.weight, _torch.keep_gathered(model)
    model.reshard()
    assert weight.untyped_storage().nbytes() == weight.nbytes
    end()
    assert weight.untyped_storage().nbytes() == 0
    begun: list[int] = []
    _torch.call_before_backward([model], lambda: begun.append(1))
    ended: list[int] = []
    _torch.call_after_schedule(model, lambda: ended.append(1))
    model.forward = lambda x: model.one(x)
    model(torch.ones(1, 4)).sum().backward()
    assert begun == [1]
    assert ended == []
    model._get_fsdp_state()._root_post_backward_final_callback()  # as schedules of torch's pipelining do
    assert ended == [1]
    model.forward = lambda x: model.one(x).view(-1)
    _torch.follow_views(model)
    out = model(torch.ones(1, 4))
    out *= 2
    gradients: list[Any] = []
    _torch.call_with_gradient(out, gradients.append)
    out *= 3
    model.reshard()
    out.sum().backward()
    assert gradients == [None]
    assert begun == [1, 1]
    ((_, sharded, gathered, places),) = _torch.sharded_places(model)
    assert sharded is model.one.weight
    assert gathered is weight
    assert places == [(model.one, "weight"), (model.two, "weight")]
    assert _torch.places_in_unit(model) == [places]
    cast = _torch.cast_floating({"x": [torch.ones(1), torch.arange(2)]}, torch.bfloat16)
    assert [each.dtype for each in cast["x"]] == [torch.bfloat16, torch.int64]


@on_ranks(2)
def test_averaging(rank: int, world_size: int) -> None:
    """torch's averaging functions on lists of parameters and buffers."""
    from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

    mesh = init_device_mesh("cpu", (world_size,))
    for model in registry.models():  # of an earlier test in this process: its handlers stand in the table already
        model.meshes.add(mesh)
    undo = _torch.average_mixed_lists(is_any)
    for function in (get_ema_multi_avg_fn(0.5), get_swa_multi_avg_fn()):
        for mixed in (True, False):
            old, new = ([DTensor.from_local(torch.full((2,), v), mesh, [Shard(0)])] for v in (0.0, 4.0))
            if mixed:
                old, new = [torch.zeros(3), *old, torch.zeros(2)], [torch.full((3,), 4.0), *new, torch.full((2,), 4.0)]
            function(old, new, torch.tensor(1))
            assert {value for each in old for value in _torch.local(each).tolist()} == {2.0}
    undo()


def _fail(*_: Any) -> None:
    raise ValueError


@on_ranks(2)
def test_attention_goes_around_a_ring(rank: int, world_size: int) -> None:
    """It has the values and gradients of whole sequences, of which ranks have a part each or, balanced, rank r of n the
    parts r and 2·n - 1 - r of 2·n; the options of torch stay."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options

    before = dict(vars(_cp_options))
    for dtype, close, scale, balanced in (
        (torch.float64, 1e-14, 0.3, False),
        (torch.float32, 2e-6, 0.3, False),
        (torch.bfloat16, 3e-2, 0.3, False),
        (torch.float64, 1e-14, None, True),
    ):
        generator = torch.Generator().manual_seed(0)
        full = [torch.randn(2, 3, 8, 4, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
        query, key, value = (tensor.clone().requires_grad_() for tensor in full[:3])
        expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        expected.backward(full[3])
        numbers = (rank, 2 * world_size - 1 - rank) if balanced else (2 * rank, 2 * rank + 1)
        local = [torch.cat([tensor.chunk(2 * world_size, 2)[n] for n in numbers], 2) for tensor in full]
        inputs = [tensor.requires_grad_() for tensor in local[:3]]
        made = _torch.ring_attention(*inputs, torch.distributed.group.WORLD, scale, balanced=balanced)
        made.backward(local[3])
        pairs = [(made, expected)] + [(a.grad, b.grad) for a, b in zip(inputs, (query, key, value), strict=True)]
        for actual, whole in pairs:
            parts = torch.cat([whole.chunk(2 * world_size, 2)[n] for n in numbers], 2)
            assert actual.dtype == dtype
            torch.testing.assert_close(actual, parts, rtol=close, atol=close)
    assert vars(_cp_options) == before


def test_ring_attention_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="no ring attention for meta"):
        _torch.ring_attention(*(torch.empty(1, 1, 2, 2, device="meta") for _ in range(3)), None)


def test_hook_dictionaries_are_where_they_are_expected() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert _torch.gradient_hooks(parameter) == (None, None)
    first = parameter.register_hook(lambda g: g)
    second = parameter.register_post_accumulate_grad_hook(lambda p: None)
    before, after = _torch.gradient_hooks(parameter)
    assert (len(before), len(after)) == (1, 1)
    other = nn.Parameter(torch.zeros(2))
    _torch.set_gradient_hooks(other, (before, after))
    assert all(one is two for one, two in zip(_torch.gradient_hooks(other), (before, after), strict=True))
    third = parameter.register_post_accumulate_grad_hook(_fail)
    _torch.call_first(parameter, third)
    assert next(iter(after.values())) is _fail
    for handle in (first, second, third):
        handle.remove()
    assert not any(_torch.gradient_hooks(parameter))
    assert set(parameter.__dict__) <= _torch.PARAMETER_ATTRIBUTES


def test_functions_of_torch_ask_first() -> None:
    asked: list[Any] = []

    def differentiate(engine: Any, inputs: Any, create_graph: bool, allow_unused: bool, accumulate: bool) -> Any:
        asked.append((create_graph, allow_unused, accumulate))
        return engine(inputs, allow_unused, accumulate)

    undo = _torch.together(
        _torch.differentiate_with(differentiate),
        _torch.check_functional_calls(lambda module, tensors: asked.append((module, list(tensors)))),
    )
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    (grad,) = torch.autograd.grad(model(x).sum(), [model.weight], allow_unused=True)
    model(x).sum().backward(inputs=[model.bias])
    torch.func.functional_call(model, {"bias": torch.zeros(2)}, x)
    undo()
    torch.autograd.grad(model(x).sum(), [model.weight])
    assert grad.tolist() == [[1, 1], [1, 1]]
    assert asked == [(False, True, False), (False, True, True), (model, ["bias"])]


def test_patches_are_undone_but_for_those_that_somebody_has_wrapped() -> None:
    calls: list[Any] = []
    before = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad, nn.parallel.DistributedDataParallel.__init__
    undo = _torch.together(_torch.call_after_zero_grad(calls.append), _torch.check_replicas(calls.append))
    model = nn.Linear(2, 2)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    with contextlib.suppress(ValueError):  # without a process group, if no test before this one has made one
        nn.parallel.DistributedDataParallel(model)
    assert calls == [model, optimizer, model]
    undo()
    assert before == (
        torch.optim.Optimizer.zero_grad,
        nn.Module.zero_grad,
        nn.parallel.DistributedDataParallel.__init__,
    )
    undo = _torch.replace(nn.Module, "zero_grad", 1)
    undo_other = _torch.replace(nn.Module, "zero_grad", 2)
    undo()
    assert nn.Module.zero_grad == 2
    undo_other()
    nn.Module.zero_grad = before[1]  # type: ignore[method-assign]


def test_registries_and_hooks_of_modules_and_optimizers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    assert list(_torch.own_modules(model)) == ["0", "1"]
    shared = nn.Sequential(model, nn.Sequential(model[0], nn.ReLU()), model)
    assert _torch.every_module(shared) == list(shared.modules())
    assert list(_torch.own_parameters(model[0])) == ["weight", "bias"]
    assert list(_torch.own_buffers(model[1])) == ["running_mean", "running_var", "num_batches_tracked"]
    assert isinstance(model[1], _torch.BatchNorm)
    first = model.register_forward_pre_hook(lambda *_: None)
    model.register_forward_hook(lambda *_: None)
    assert list(_torch.forward_pre_hooks(model)) == [first.id]
    assert _torch.count_forward_hooks(model) == (1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = optimizer.register_step_pre_hook(lambda *_: None)
    after = optimizer.register_step_post_hook(lambda *_: None)
    assert [list(hooks) for hooks in _torch.step_hooks(optimizer)] == [[before.id], [after.id]]


def test_operators_and_lists() -> None:
    operator = torch.ops.aten.add.Tensor
    assert (_torch.schema_of(operator).name, _torch.schema_of(operator).overload_name) == ("aten::add", "Tensor")
    assert _torch.packet_of(operator) is torch.ops.aten.add
    tensors = [torch.ones(4), torch.ones(9)]
    assert [float(norm) for norm in _torch.foreach_norm(tensors, 2.0)] == [2, 3]
    _torch.foreach_mul_(tensors, 2.0)
    assert float(tensors[0].sum()) == 8
    assert _torch.storage_number(tensors[0].untyped_storage()) == _torch.storage_identity(tensors[0][1:])


@on_ranks(1)
def test_gradients_are_aligned(rank: int, world_size: int) -> None:
    """Gradients of a model on one rank do not lie in one buffer, but each where memory begins."""
    model = Stack()
    fully_shard(model)
    _torch.align_gradients(model)
    model(torch.randn(2, 8)).sum().backward()
    grads = [_torch.local(p.grad) for p in model.parameters() if p.grad is not None]
    assert len(grads) == len(list(model.parameters()))
    assert all(grad.data_ptr() % 64 == 0 for grad in grads)


@on_ranks(2)
def test_shards_in_memory_and_the_records_of_gradients(rank: int, world_size: int) -> None:
    """Shards of a unit lie behind one another, each with its own version and storage, gradients too; gradients have
    their parameters' records; what is not reduced is found and dropped."""
    model = Stack()
    fully_shard(model)
    values = [p.full_tensor() for p in model.parameters()]
    _torch.join_shards(model, small=0)
    locals_ = _torch.shards_of(model.parameters())
    assert all(a is _torch.local(b) for a, b in zip(locals_, model.parameters(), strict=True))
    assert len({_torch.storage_identity(local) for local in locals_}) == len(locals_)
    assert len({_torch.memory_identity(local) for local in locals_}) == 1
    flat = torch.cat([local.flatten() for local in locals_])
    assert torch.equal(_torch.flat_memory(locals_[0], len(flat)), flat)
    sharded: Any = list(model.parameters())
    for dtype in (flat.dtype, torch.float64):  # as the parameters, and otherwise
        parts = _torch.shards_over(flat.to(dtype), sharded)
        assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(parts, sharded, strict=True))
        assert torch.equal(_torch.flat_memory(_torch.local(parts[1]), 1), flat[len(locals_[0].view(-1)) :][:1])
        assert len({_torch.storage_identity(_torch.local(part)) for part in parts}) == len(parts)
    assert all(torch.equal(p.full_tensor(), value) for p, value in zip(model.parameters(), values, strict=True))
    versions = [_torch.version(local) for local in locals_]
    with torch.no_grad():
        locals_[0].add_(1)
    assert [_torch.version(local) for local in locals_[1:]] == versions[1:]
    model(torch.randn(2, 8)).sum().backward()
    members: Any = list(model.parameters())
    grads = [p.grad for p in members]
    assert all(_torch.own_storage(_torch.local(grad)) is _torch.local(grad) for grad in grads)
    model.set_requires_gradient_sync(False)
    model(torch.randn(2, 8)).sum().backward()
    assert _torch.has_unreduced(model)
    _torch.drop_unreduced(model, [id(p) for p in members[1:]])
    assert _torch.has_unreduced(model)
    _torch.drop_unreduced(model)
    assert not _torch.has_unreduced(model)
    assert all(a is b for a, b in zip(_torch.specs_of(grads), _torch.specs_of(members), strict=True))
    assert _torch.specs_of([torch.ones(2)]) == [None]
    shards = _torch.shards_placed_alike(grads)
    assert shards is not None
    assert all(shard is _torch.local(grad) for shard, grad in zip(shards, grads, strict=True))
    assert isinstance(_torch.timeout_of(torch.distributed.group.WORLD), datetime.timedelta)
    begun = _torch.collectives_begun()
    torch.distributed.barrier()
    assert _torch.collectives_begun() == begun + 1
    assert _torch.unit_in(sys._getframe()) is None
    assert _torch.is_placed_as(grads[0], members[0])
    elsewhere = DTensor.from_local(torch.ones(2), members[0].device_mesh, [Replicate()])
    wide = DTensor.from_local(torch.ones(2).double(), members[0].device_mesh, members[0].placements)
    for other in (elsewhere, wide, torch.ones(2)):
        assert _torch.shards_placed_alike([*grads, other]) is None
    assert not _torch.is_placed_as(elsewhere, members[0])
    part = torch.arange(20.0)[4:20].view(4, 4)
    made = _torch.dtensor_over(part, members[0], torch.Size((4 * world_size, 4)), (4, 1))
    assert _torch.local(made).data_ptr() == part.data_ptr()
    assert torch.equal(copy.deepcopy(made).to_local(), part)
    assert torch.equal(copy.deepcopy(made.detach()).to_local(), part)
    placed = _torch.dtensor_from(part, made.device_mesh, made.placements)
    assert (placed.shape, placed.placements) == (made.shape, made.placements)
    assert _torch.local(placed) is part or _torch.local(placed).data_ptr() == part.data_ptr()


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


def test_fake_tensors_and_real_ones_among_them() -> None:
    assert not _torch.makes_fake_tensors()
    with _torch.fake_tensors():
        assert _torch.makes_fake_tensors()
        fake = torch.ones(8)
        with _torch.real_tensors():
            assert not _torch.makes_fake_tensors()
            real = torch.ones(8)
    assert [_torch.is_fake(each) for each in (fake, real)] == [True, False]
    assert [_torch.is_plain(each) for each in (fake, real, nn.Parameter(real))] == [True, True, False]
    with Watching() as watching, _torch.unwatched():
        torch.ones(1).add(1)
    assert watching.seen == []
    starts = _torch.addresses([fake[2:], fake, torch.ones(1)])
    assert starts[0] - starts[1] == 8
    assert _torch.addresses([real[1:]]) == [real.data_ptr() + 4]


def test_resizes_are_seen() -> None:
    seen: list[tuple[int, int]] = []
    storage = torch.ones(4).untyped_storage()
    with _torch.watching_resizes(lambda storage, before: seen.append((before, storage.nbytes()))):
        storage.resize_(0)
        storage.resize_(32)
    storage.resize_(0)
    assert seen == [(16, 0), (0, 32)]


class Watching(_torch.DispatchMode):
    """Notes of each operator who called it, and whether anybody else holds its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool, bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = func._schema.name.removeprefix("aten::"), next(iter(args), None)
        held_once = isinstance(first, torch.Tensor) and _torch.is_held_once(first)
        frame = sys._getframe()
        by_mode, by_engine = _torch.called_by_mode(frame), _torch.engine_calls(frame.f_back)
        self.seen.append((name, by_mode, by_engine, held_once))
        return func(*args, **(kwargs or {}))


class HandingOn(_torch.DispatchMode):
    """Hands operators on to the mode around it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_who_calls_an_operator() -> None:
    x = torch.ones(3, requires_grad=True)
    with Watching() as watching:
        (x * 2 + x.exp()).sum().backward()
    added = [each for each in watching.seen if each[0] == "add"]
    assert [by_engine for *_, by_engine, _ in added] == [False, True]  # the second adds two gradients of x
    assert not any(by_mode for _, by_mode, *_ in watching.seen)
    with Watching() as watching, HandingOn():
        x.detach().exp()
    assert all(by_mode for _, by_mode, *_ in watching.seen)


def test_who_holds_a_gradient() -> None:
    """The first of two gradients is held by nobody else, but where a hook has kept a part of it."""
    for keeps in (False, True):
        x, kept = torch.ones(3, requires_grad=True), []
        products = [x * 2, x * 3]
        for each in products if keeps else []:
            each.grad_fn.register_hook(lambda given, _, kept=kept: kept.append(given[0][:1]))
        with Watching() as watching:
            torch.autograd.backward(products, [torch.ones(3), torch.ones(3)])
        (added,) = [each for each in watching.seen if each[0] == "add"]
        assert added[-1] is not keeps


def test_one_process_stands_for_a_rank_of_many() -> None:
    before = torch.distributed.is_initialized()
    with _torch.simulated_world(5, 64):
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (5, 64)
        half = torch.distributed.new_group(list(range(32)))
        assert _torch.group_named(half.group_name) is half
        mesh = init_device_mesh("cpu", (64,))
        with _torch.fake_tensors(), KnownValues(), _torch.one_chunk():
            model = Stack()
            rows = model.first.weight.shape[0]
            fully_shard(model, mesh=mesh)
            assert model.first.weight.to_local().shape[0] == int(rows > 5)
            seen: list[str] = []
            _torch.initialise(model)
            _torch.watch_communication(model, seen.append, lambda: seen.append("left"))
            model(torch.randn(2, 8)).sum().backward()
    assert seen[:2] == ["unshard", "left"]
    assert {"wait_for_unshard", "post_backward"} <= set(seen)
    assert seen.count("left") * 2 == len(seen)
    assert torch.distributed.is_initialized() == before


def test_a_mode_for_many_operators_sees_them_and_knows_devices_of_fake_tensors() -> None:
    class Seen(_torch.SimulationMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (known := _torch.device_asked(func, args)) is not None:
                devices.append(known)
                return known
            operators.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    devices: list[torch.device] = []
    operators: list[str] = []
    with _torch.fake_tensors():
        tensor = torch.ones(3)
        with Seen():
            assert torch.ops.prim.device.default(tensor) == torch.device("cpu")
            assert tensor.exp().shape == (3,)
    assert devices == [torch.device("cpu")]
    assert operators == ["aten::exp"]


def test_what_a_fake_operator_returns_depends_on_all_that_its_arguments_are() -> None:
    with _torch.fake_tensors():
        x = torch.ones(4, 6)
        trained = torch.ones(4, 6, requires_grad=True)
        again = [torch.relu(each) for each in (x, x.t(), x[1:], x.half(), trained, trained.detach(), trained.t())]
        assert [each.stride() for each in again] == [(6, 1), (1, 6), (6, 1), (6, 1), (6, 1), (6, 1), (1, 6)]
        assert [each.dtype for each in again].count(torch.float16) == 1
        assert [each.requires_grad for each in again] == [False, False, False, False, True, False, True]
        assert (x * 2).dtype == (x * 2.0).dtype == torch.float32
        whole = torch.ones(4, dtype=torch.int64)
        assert [(whole * by).dtype for by in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
        assert whole.sum(0).shape == ()
        assert whole.sum(0, keepdim=True).shape == (1,)


def test_a_fake_result_that_is_remembered_is_like_the_first() -> None:
    functions = (torch.relu, torch.t, lambda each: each[1:], lambda each: each.split(2)[1], torch.Tensor.detach)
    with _torch.fake_tensors():
        torch.ones(1, device="cuda").exp().exp()  # of another device
        x = torch.ones(5, 11, requires_grad=True)
        for function in functions:
            first, again = function(x), function(x)
            assert vars(again) == vars(first)
            for what in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
                assert getattr(again, what) == getattr(first, what)
            assert (again.stride(), again.storage_offset()) == (first.stride(), first.storage_offset())
            shares = [_torch.storage_identity(each) == _torch.storage_identity(x) for each in (first, again)]
            assert shares == [function is not torch.relu] * 2


class _Runs(_torch.SimulationMode):
    """Runs each operator by ``run_fake``, and keeps nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (known := _torch.device_asked(func, args)) is not None:
            return known
        return _torch.run_fake(func, args, kwargs or {})


def test_an_operator_that_was_seen_before_is_run_without_the_dispatcher_alike() -> None:
    calls: list[Any] = [
        lambda x: torch.relu(x),
        lambda x: x.t()[1:],
        lambda x: x.split(2),
        lambda x: x.unbind(0),
        lambda x: torch.ops.aten._unsafe_view(x, [11, 5]),
        lambda x: torch.ops.aten.native_layer_norm(x, [11], None, None, 1e-5),
        lambda x: x.add_(1),
        lambda x: torch._foreach_add([x, x], 1),
        lambda x: torch._foreach_mul_([x], 2),
        lambda x: x[torch.zeros(3, dtype=torch.int64)],
        lambda x: torch.where(x[:, 0] > 0, 1.0, x[:, 0]),
    ]

    def facts(result: Any, of: torch.Tensor) -> list[Any]:
        shared = _torch.storage_identity(of)
        return [
            (t.shape, t.dtype, t.stride(), t.storage_offset(), t.device, _torch.storage_identity(t) == shared, t is of)
            for t in (_torch.leaves_of(result) if result is not None else [])
        ]

    with _torch.fake_tensors():
        x = torch.ones(5, 11)
        plain = [facts(call(x), x) for call in calls]
    with _torch.fake_tensors(), _Runs():
        x = torch.ones(5, 11)
        for _ in range(2):
            assert [facts(call(x), x) for call in calls] == plain
        freed = [weakref.ref(part) for part in x.split(2)]
        assert not any(reference() for reference in freed)


def test_collectives_of_simulated_ranks_return_their_tensors_again() -> None:
    with _torch.simulated_world(0, 8), _torch.fake_tensors(), _Runs():
        part, whole = torch.ones(8), torch.ones(64)
        for _ in range(2):
            for work in (
                dist.all_gather_into_tensor(whole, part, async_op=True),
                dist.reduce_scatter_tensor(part, whole, async_op=True),
                dist.all_reduce(part, async_op=True),
                dist.all_to_all_single(whole, whole.clone(), async_op=True),
            ):
                assert work is not None
                work.wait()


def test_an_operator_is_not_remembered_where_a_value_or_another_mode_matters() -> None:
    with _torch.fake_tensors(), Watching() as watching, _Runs():
        torch.ones(3).exp()
        torch.ones(3).exp()
    assert [name for name, *_ in watching.seen].count("exp") == 2
    with _torch.fake_tensors(), _Runs():
        x = torch.ones(2, 3)
        for rows in ((3, 2), (2, 3), (3, 2)):
            x.t_()
            assert x.shape == rows


def test_meshes_that_are_cut_already_are_joined_once() -> None:
    with _torch.simulated_world(0, 8):
        both = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
        model = Stack()
        data, along = both["data"], both["tensor"]
        for module in (model.first, model.last):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), along, [Shard(0)]))
        with _torch.meshes_joined_once():
            fully_shard([model.first, model.last], mesh=data)
        meshes = [module.weight.device_mesh for module in (model.first, model.last)]
        assert meshes[0] is meshes[1]
        assert meshes[0].shape == (4, 2)


def test_what_dtensor_makes_to_find_out_shapes_is_not_seen() -> None:
    class Seen(_torch.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(each, DTensor) for each in types):
                return NotImplemented
            shapes.update(
                tuple(each.shape) for each in _torch.leaves_of((args, kwargs)) if isinstance(each, torch.Tensor)
            )
            return func(*args, **(kwargs or {}))

    shapes: set[tuple[int, ...]] = set()
    with _torch.simulated_world(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("never_used_before",))
        with _torch.fake_tensors(), _torch.unseen_propagation():
            tensor = DTensor.from_local(torch.ones(3, 5), mesh, [Shard(0)], run_check=False)
            with Seen():
                assert tensor.neg().shape == (6, 5)
    assert (6, 5) not in shapes
    assert (3, 5) in shapes


@on_ranks(2)
def test_what_is_offloaded_is_known_of_the_meta_device_too(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        resting, computing = Stack(), Stack()
    trueshard.shard(resting, offload="cpu")
    trueshard.shard(computing)
    assert _torch.offloaded(resting) == {id(parameter) for parameter in resting.parameters()}
    assert _torch.offloaded(computing) == set()


def test_threads_stand_for_ranks() -> None:
    """Sums and gathers of threads; one that raises leaves none waiting."""

    def collect(rank: int, group: Any) -> Any:
        total = torch.full((6,), float(rank))
        dist.all_reduce(total, group=group)
        parts = gather_parts(torch.tensor([float(rank)]), group)
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(6.0), group=group)
        return total[0].item(), parts.flatten().tolist(), part.tolist(), (group.rank(), group.size())

    found = _torch.run_as_ranks(3, collect)
    assert found == [(3.0, [0.0, 1.0, 2.0], [6.0 * rank, 6.0 * rank + 3], (rank, 3)) for rank in range(3)]

    def fail(rank: int, group: Any) -> None:
        if rank == 1:
            raise KeyError("one")
        dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(KeyError, match="one"):
        _torch.run_as_ranks(3, fail)


@on_ranks(2)
def test_data_parallel_tells_that_it_runs(rank: int, world_size: int) -> None:
    class Asked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(_torch.in_data_parallel())
            return super().forward(x)

    seen: list[bool] = []
    model = Asked(2, 2)
    nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert seen == [True, False]


class Splitting(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.utils.data.get_worker_info() is not None
        _torch.hide_worker()
        yield torch.utils.data.get_worker_info() is not None


def test_a_worker_can_be_hidden_from_a_stream() -> None:
    loader = torch.utils.data.DataLoader(Splitting(), batch_size=None, num_workers=1)
    assert list(loader) == [True, False]
