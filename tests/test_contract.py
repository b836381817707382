"""Contract lines 3 to 8: trainability, ties, dtypes, attachments, what FSDP2 refuses, ranks that disagree."""

from __future__ import annotations

import copy
import itertools
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import trueshard
from cases import as_on_one_device, on_ranks, raises_on_ranks
from gathering import parameters, whole
from handmade_training import Case, Report, batch, ids, prepared, take_steps
from messages import naming
from models import LAZY
from models.handmade import HANDMADE, Block, Buffers, Methods, Scalar, Stack, TiedBlocks, TiedLanguageModel
from parity import Ranks, assert_same
from resting import all_but
from stepping import accumulate, same, shard_over, take_step

# 3. Trainability


@as_on_one_device(atol=1e-5)
def test_what_is_frozen_never_moves_and_thaws(rank: int, world_size: int) -> Report:
    torch.manual_seed(0)
    model = Stack()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shard_over(world_size, model, optimizer)
    report: Report = {}
    for seed in range(6):
        if seed == 2:
            model.blocks[0].requires_grad_(True)
            model.first.requires_grad_(False)
        if seed == 4:
            model.requires_grad_(False)
            model.blocks[1].norm.requires_grad_(True)
        model(batch(seed, rank, world_size)).pow(2).mean().backward()
        report[f"without gradient {seed}"] = [n for n, p in model.named_parameters() if p.grad is None]
        take_step(optimizer)
        report[f"parameters {seed}"] = parameters(model)
    report["state"] = sorted(n for n, p in model.named_parameters() if optimizer.state.get(p))
    return report


# 4. Ties


@on_ranks(2, 3)
def test_a_tie_stays_one_object(rank: int, world_size: int) -> None:
    for build, one, two in (
        (TiedBlocks, "blocks.0.up.weight", "blocks.2.up.weight"),
        (TiedLanguageModel, "embed.weight", "head.weight"),
    ):
        torch.manual_seed(0)
        model = build()
        trueshard.shard(model)
        model((ids if build is TiedLanguageModel else batch)(0, rank, world_size)).sum().backward()
        every = dict(model.named_parameters(remove_duplicate=False))
        assert every[one] is every[two]
        assert len(every) == len(dict(model.named_parameters())) + 1
        saved = model.state_dict()
        assert saved[one].to_local().data_ptr() == saved[two].to_local().data_ptr()


class Ordered(TiedBlocks):
    """Calls its blocks in the order that it is told; the first and the last are one unit, since they share a weight."""

    order: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.last(x)


ORDERS = [(0, 1, 2, 0), (2, 0, 1), (2, 1, 2, 2, 0, 0), (0, 1), (1, 2), (2, 1, 0, 2, 0)]


@as_on_one_device(atol=1e-5)
def test_modules_of_one_unit_are_called_in_any_order_and_again(rank: int, world_size: int) -> Report:
    report: Report = {}
    for policy in ("always", "default", "never"):
        torch.manual_seed(0)
        model = Ordered()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if world_size > 1:
            plan = trueshard.shard(model, optimizer, reshard_after_forward=policy)
            assert any(len(unit.modules) > 1 for unit in plan.units)
        for seed, model.order in enumerate(ORDERS):
            model(batch(seed, rank, world_size)).pow(2).mean().backward()
            missing = [name for name, p in model.named_parameters() if p.grad is None]
            take_step(optimizer)
            report[f"{policy} {seed}"] = {"parameters": parameters(model), "without gradient": missing}
    return report


class Distilled(nn.Module):
    """A student and a frozen teacher, each with tied embeddings; or all four are one parameter."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.student, self.teacher = TiedLanguageModel(1), TiedLanguageModel(2)
        self.teacher.requires_grad_(False)
        if shared:
            self.student.embed.weight = self.student.head.weight = self.teacher.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids).softmax(-1)
        return F.cross_entropy(self.student(input_ids).flatten(0, 1), wanted.flatten(0, 1))


@pytest.mark.rest
@as_on_one_device(2, atol=1e-05)
def test_a_student_and_its_teacher_keep_their_ties(rank: int, world_size: int, tmp_path: Path) -> Report:
    report: Report = {}
    for shared, policy in itertools.product((False, True), ("always", "default")):
        torch.manual_seed(0)
        model, again = Distilled(shared), Distilled(shared)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-3)
        if world_size > 1:
            trueshard.shard(model, optimizer, reshard_after_forward=policy)
            trueshard.shard(again)
        for seed in range(3):
            model(ids(seed, rank, world_size)).backward()
            take_step(optimizer)
        path = Path(tmp_path, f"{world_size} {shared} {policy}")
        trueshard.save(path, model=model)
        trueshard.load(path, model=again)
        for each in (model, again):
            ties = [each.student.embed.weight, each.student.head.weight]
            assert ties[0] is ties[1]
            assert each.teacher.embed.weight is each.teacher.head.weight
            assert (ties[0] is each.teacher.head.weight) == shared
        assert_same(parameters(again), parameters(model))
        report[f"{shared} {policy}"] = parameters(model)
    return report


# 5. Dtypes


@on_ranks(2)
def test_mixed_precision_never_touches_storage(rank: int, world_size: int) -> None:
    for word, compute in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        torch.manual_seed(0)
        model = Stack()
        model.blocks[1].up.weight.requires_grad_(False)
        plan = trueshard.shard(model, mixed_precision=word)
        inside: list[torch.dtype] = []
        model.blocks[0].up.register_forward_hook(
            lambda m, _, out, inside=inside: inside.extend((m.weight.dtype, out.dtype))
        )
        model(batch(0, rank, world_size)).pow(2).mean().backward()
        assert inside == [compute, compute]
        assert plan.mixed_precision == trueshard.MixedPrecision(compute=str(compute)[6:], reduce="float32")
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        assert sum(p.grad is not None for p in model.parameters()) == len(list(model.parameters())) - 1


class Packed(nn.Module):
    """Every 16-bit pattern in a frozen parameter, as quantised weights lie in one; many are no number in its dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(-1, 64)
        self.packed = nn.Parameter(every.view(dtype), requires_grad=False)
        self.linear = nn.Linear(8, 8)
        self.seen = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.packed.detach().clone()
        return self.linear(x)


def bits(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(torch.uint8)


@on_ranks(2)
def test_bytes_that_a_dtype_reads_as_no_number_keep_every_bit(rank: int, world_size: int, tmp_path: Path) -> None:
    for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8", "int8"):
        dtype = getattr(torch, name)
        for precision in (None, "bf16") if name in ("bfloat16", "uint8", "int8") else (None,):
            model = nn.Sequential(Packed(dtype), Packed(dtype))
            expected = bits(Packed(dtype).packed)
            trueshard.shard(model, units="Packed", mixed_precision=precision)
            model(torch.ones(2, 8)).float().sum().backward()
            path = Path(tmp_path, f"{name} {precision}")
            trueshard.save(path, model=model)
            with torch.no_grad():
                bits(model[0].packed).zero_()
            trueshard.load(path, model=model)
            for module in model:
                assert module.seen.dtype == dtype
                assert torch.equal(bits(module.seen), expected)
                assert torch.equal(bits(module.packed), expected.chunk(world_size)[rank])
                if dtype.itemsize > 1 or not dtype.is_floating_point:  # gloo itself gathers no float8
                    assert torch.equal(bits(module.packed.full_tensor()), expected)
            with torch.no_grad():
                model(torch.ones(2, 8))
            assert torch.equal(bits(model[0].seen), expected)


class Rotated(nn.Module):
    """A block that is given angles (float32), a complex and an integer tensor, and has buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 1 / 3))
        self.register_buffer("table", torch.full((8,), 1 / 7, dtype=torch.float64), persistent=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, angles: torch.Tensor, turns: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        self.seen = [each.dtype for each in (x, angles, turns, number, self.scale, self.table, self.linear.weight)]
        return self.linear(x.to(self.linear.weight.dtype))


class Rotating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rotated() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles, turns, number = torch.ones(8), torch.ones(8, dtype=torch.complex64), torch.ones(8, dtype=torch.long)
        for block in self.blocks:
            x = block(x, angles, turns, number)
        return x


@on_ranks(2)
def test_buffers_and_what_is_no_float_are_never_cast_and_inputs_as_the_policy_says(rank: int, world_size: int) -> None:
    half, full, double = torch.bfloat16, torch.float32, torch.float64
    as_written = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full, cast_forward_inputs=False)
    for word, angles in (("bf16", half), (as_written, full)):
        model = Rotating()
        buffers = whole(dict(model.named_buffers()))
        trueshard.shard(model, mixed_precision=word)
        model(torch.ones(2, 8)).float().sum().backward()
        first, second = (block.seen for block in model.blocks)
        assert first == [angles, angles, torch.complex64, torch.long, full, double, half]
        assert second == [half, angles, *first[2:]]
        assert_same(whole(dict(model.named_buffers())), buffers)


@on_ranks(2)
def test_another_trainable_dtype_in_a_block_is_a_unit_of_its_own(rank: int, world_size: int) -> None:
    model = HANDMADE["mixed"].build(0)
    before = {n: p.dtype for n, p in model.named_parameters()}
    plan = trueshard.shard(model)
    assert {n: p.dtype for n, p in model.named_parameters()} == before
    assert (plan.unit("blocks.0").dtype, plan.unit("blocks.0.norm").dtype) == ("bfloat16", "float32")


class Quantized(nn.Module):
    """A frozen weight of bytes and its scales, and an adapter of low rank that is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(outputs, 1) / 256, requires_grad=False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.codes.dtype == torch.uint8
        return F.linear(x, (self.codes.to(x.dtype) - 128) * self.scale.to(x.dtype)) + self.up(self.down(x))


@as_on_one_device()
def test_frozen_bytes_are_sharded_and_never_cast(rank: int, world_size: int) -> Report:
    for compute in ("bf16", None):
        torch.manual_seed(0)
        model = nn.Sequential(Quantized(8, 9), Quantized(9, 8))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        shard_over(world_size, model, optimizer, units="Quantized", mixed_precision=compute)
        take_steps(model, optimizer, rank, world_size)
        assert not model[0].codes.requires_grad
        assert model[0].codes.dtype == torch.uint8
    return parameters(model)


class TwoDtypes(nn.Module):
    """A weight and a bias of different dtypes in one module, which no choice of modules can part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)
        self.bias = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias.float()


@as_on_one_device(atol=1e-5)
def test_two_trainable_dtypes_in_one_module_work(rank: int, world_size: int) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(Stack(), TwoDtypes(), TwoDtypes())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if world_size > 1:
        plan = trueshard.shard(model, optimizer)
        assert [each.name for each in plan.replicated] == ["1.bias", "2.bias"]
    take_steps(model, optimizer, rank, world_size)
    return parameters(model)


# 6. Attachments


@as_on_one_device(atol=1e-05)
def test_attributes_and_hooks_survive(rank: int, world_size: int) -> Report:
    torch.manual_seed(0)
    model = Scalar()
    seen: list[tuple[str, tuple[int, ...]]] = []
    mask = torch.rand(8, 16) > 0.5
    for block in model.blocks:
        block.up.weight.tag = {"name": "up"}
        block.down.weight.register_hook(lambda g: g * mask)
        block.norm.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        block.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", tuple(p.shape))))
    model.scale.register_hook(lambda g: g.clamp(-0.02, 0.02))
    removed = model.first.weight.register_hook(lambda g: g * 100)
    model.last.register_forward_hook(lambda module, args, out: out * 2)
    model.last.register_full_backward_hook(lambda *_: seen.append(("backward", ())))
    tag = model.blocks[0].up.weight.tag
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_forward: list[Any] = []
    model.blocks[0].register_forward_pre_hook(lambda m, _: in_forward.append(getattr(m.up.weight, "tag", None)))
    shard_over(world_size, model, optimizer)
    assert model.blocks[0].up.weight.tag is tag
    for seed in range(3):
        if seed == 1:
            removed.remove()
        for part in range(2):
            with accumulate(model, last=part == 1):
                model(batch(seed * 2 + part, rank, world_size)).pow(2).mean().backward()
        take_step(optimizer)
    assert in_forward == [tag] * 6
    assert ("after", (8,)) in seen
    assert ("backward", ()) in seen
    return parameters(model)


class WithMethods(Methods):
    """Methods that call layers, that read a parameter without calling its module, and that only arrange."""

    def loss_by_weight(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), input_ids.flatten())

    def reset_head(self) -> None:
        with torch.no_grad():
            self.head.weight.fill_(0.5)


class Untied(WithMethods):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64, bias=False)


@as_on_one_device(atol=1e-5)
def test_methods_and_submodules_work_beside_forward(rank: int, world_size: int) -> Report:
    report: Report = {}
    for build in (WithMethods, Untied):
        for policy in ("always", "default", "never"):
            model, optimizer = prepared(world_size, build, reshard_after_forward=policy)
            for seed in range(3):
                x = ids(seed, rank, world_size)
                model.loss(x).backward()
                model.loss_by_weight(x).backward()
                model.encode(x).mean().backward()
                F.mse_loss(model.layers[0](model.embed(x)), torch.zeros(6 // world_size, 5, 8)).backward()
                take_step(optimizer)
                start = ids(seed, 0, 1)
                report[f"{build.__name__} {policy} {seed}"] = model.generate(start, 3)
            report[f"{build.__name__} {policy}"] = parameters(model)
            model.reset_head()
            assert (whole(model.head.weight) == 0.5).all()
    return report


# 7. What FSDP2 refuses


@as_on_one_device(atol=1e-5)
def test_a_deep_copy_trains_by_itself(rank: int, world_size: int) -> Report:
    torch.manual_seed(0)
    model = TiedBlocks()
    shard_over(world_size, model, activation_checkpointing="full", reshard_after_forward="always")
    untouched = parameters(model)
    twin = copy.deepcopy(copy.deepcopy(model))
    assert type(twin).forward is type(model).forward
    assert twin.blocks[0].up.weight is twin.blocks[2].up.weight
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    take_steps(twin, optimizer, rank, world_size)
    assert_same(parameters(model), untouched)
    return parameters(twin)


@as_on_one_device(atol=1e-5)
def test_double_backward_works(rank: int, world_size: int) -> Report:
    """A penalty on the input's gradient, with and without the loss beside it, under every policy."""
    report: Report = {}
    for policy in ("never", "default", "always"):
        model, optimizer = prepared(world_size, Stack, settings={"lr": 0.05}, reshard_after_forward=policy)
        for seed, kind in enumerate(["both", "plain", "penalty", "unused", "both", "plain"]):
            x = batch(seed, rank, world_size).requires_grad_(True)
            out = model(x)
            loss = out.pow(2).sum(1).mean()
            if kind != "plain":
                (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                penalty = grad.pow(2).sum(1).mean()
                loss = {"both": loss + penalty, "penalty": penalty, "unused": None}[kind]
            if loss is not None:
                loss.backward()
            take_step(optimizer)
            with torch.no_grad():
                report[f"{policy} {seed}"] = model(batch(9, 0, 1))
        report[policy] = parameters(model)
    return report


class Potential(Stack):
    """Gives energies and the forces that they make, as potentials between atoms do."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            energy = super().forward(x).square().sum(1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, force


@pytest.mark.parametrize(
    "between",
    all_but(
        ["in the forward"],
        ["a forward", "no_grad", "a backward", "a second penalty", "in the forward"],
    ),
)
@as_on_one_device()
def test_double_backward_works_with_other_passes_in_between(rank: int, world_size: int, between: str) -> Report:
    """Other passes between the two backwards of a gradient penalty."""
    report: Report = {}
    for policy in ("never", "default", "always"):
        torch.manual_seed(0)
        model = Potential() if between == "in the forward" else Stack()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
        shard_over(world_size, model, optimizer, reshard_after_forward=policy)
        for seed in range(3):
            x, y = (batch(seed + n, rank, world_size).requires_grad_(True) for n in (0, 10))
            if between == "in the forward":
                energy, force = model(x)
                (energy.mean() + force.square().sum(1).mean()).backward()
                model.eval()
                report[f"{policy} {seed}"] = model(batch(9, 0, 1))
                model.train()
            else:
                (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                if between == "a backward":
                    model(y).pow(2).sum(1).mean().backward()
                elif between == "no_grad":
                    with torch.no_grad():
                        report[f"{policy} {seed}"] = model(batch(9, 0, 1))
                elif between == "a second penalty":
                    (other,) = torch.autograd.grad(model(y).sum(), y, create_graph=True)
                    grad = grad + other
                loss = model(y).pow(2).sum(1).mean() if between != "a backward" else 0.0
                (loss + grad.pow(2).sum(1).mean()).backward()
            take_step(optimizer)
        report[policy] = parameters(model)
    return report


def aliased() -> nn.Module:
    model = Stack()
    model.last.weight = nn.Parameter(model.first.weight.detach().T)
    return model


def viewed_by_a_buffer() -> nn.Module:
    model = Stack()
    model.register_buffer("row", model.first.weight.detach()[1])
    model.register_buffer("copied", model.first.weight.detach()[1].clone())
    model.register_buffer("copied_too", model.copied[2:])
    return model


def with_embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, **options), nn.Linear(4, 4))


def gradients_of_another_dtype() -> nn.Module:
    model = Stack().bfloat16()
    parameter: Any = model.first.weight
    parameter.grad_dtype = torch.float32
    return model


UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: LAZY.build(0), naming("'1.weight'", "no shape", "once")),
    "aliased": (aliased, naming("'first.weight'", "'last.weight'", "memory", "same Parameter")),
    "viewed by a buffer": (viewed_by_a_buffer, naming("buffer 'row'", "'first.weight'", "copy")),
    "no forward": (lambda: nn.ModuleList([Block(), Block()]), naming("ModuleList", "forward")),
    "sparse": (lambda: with_embedding(sparse=True), naming("'0'", "sparse=False")),
    "renormed": (lambda: with_embedding(max_norm=1.0), naming("'0'", "max_norm")),
    "counted": (lambda: with_embedding(scale_grad_by_freq=True), naming("'0'", "scale_grad_by_freq")),
    "gradients of another dtype": (
        gradients_of_another_dtype,
        naming("'first.weight'", "torch.float32", "mixed_precision="),
    ),
}


@on_ranks(2)
def test_models_that_cannot_be_kept_are_refused_by_name(rank: int, world_size: int) -> None:
    for build, message in UNFIT.values():
        with pytest.raises(Exception, match=message):
            trueshard.shard(build())


def twice(rank: int, world_size: int) -> None:
    model = Stack()
    trueshard.shard(model)
    trueshard.shard(model)


def graph_on_gradients(rank: int, world_size: int) -> None:
    model = Stack()
    trueshard.shard(model)
    model(torch.randn(2, 8)).pow(2).sum().backward(create_graph=True)


def one_unit_alone(rank: int, world_size: int) -> None:
    model = Stack()
    trueshard.shard(model)
    copy.deepcopy(model.blocks[0])


def thawed_dtype(rank: int, world_size: int) -> None:
    model = Stack()
    model.blocks[0].norm.double().requires_grad_(False)
    model.blocks[0].forward = lambda x: model.blocks[0].down(model.blocks[0].up(x))
    trueshard.shard(model)
    model.blocks[0].norm.requires_grad_(True)
    model(torch.randn(2, 8))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (twice, r"sharded already"),
        (graph_on_gradients, naming("backward(create_graph=True)", "autograd.grad")),
        (one_unit_alone, "one unit"),
        (thawed_dtype, naming("'blocks.0'", "torch.float32", "torch.float64", "before shard")),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(case: Case, message: str, ranks2: Ranks) -> None:
    ranks2.raises(case, match=message)


# 8. Ranks agree


@as_on_one_device(atol=1e-5)
def test_training_goes_on_from_rank_0_and_says_so(rank: int, world_size: int) -> Report:
    torch.manual_seed(0)
    first = Buffers()
    torch.manual_seed(0 if world_size == 1 else rank)
    model = Buffers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batch(rank if world_size > 1 else 0, 0, 1)).pow(2).mean().backward()
    take_step(optimizer)
    said: list[str] = []
    if world_size > 1:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trueshard.shard(model, optimizer)
        said = [str(w.message) for w in caught]
        assert [" ".join(text.split()[:2]) for text in said] == [
            f"{len(list(first.parameters()))} parameters",
            "2 buffers",
            f"{len(list(first.parameters()))} tensors",
        ]
        assert "'first.weight'" in said[0]
    take_steps(model, optimizer, rank, world_size, range(2))
    return parameters(model) | whole(dict(model.named_buffers()))


def different_shapes(rank: int, world_size: int) -> None:
    trueshard.shard(Stack(width=8 + 2 * (rank == 1)))


def different_words(rank: int, world_size: int) -> None:
    trueshard.shard(Stack(), reshard_after_forward="always" if rank == 1 else "never")


def different_optimizers(rank: int, world_size: int) -> None:
    model = Stack()
    trueshard.shard(model, torch.optim.SGD(list(model.parameters())[rank:], lr=0.1))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (different_shapes, naming("rank 0", "'first.weight'", "(8, 8)", "rank 1", "(10, 8)")),
        (different_words, naming("reshard_after_forward", "'never'", "rank 1", "'always'")),
        (different_optimizers, naming("rank 0", "optimizer 0", "rank 1")),
    ],
)
def test_different_arguments_are_an_error_on_every_rank(case: Case, message: str, ranks3: Ranks) -> None:
    ranks3.raises(case, match=f"(?s){message}")


# Used on some ranks only


class Routed(nn.Module):
    """Each row of the batch goes to one expert; an expert without rows is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, choice = torch.zeros_like(x), (x[:, 0] * 10).long().abs() % 3  # the last expert is never chosen
        normed = self.norm(x)
        for i, expert in enumerate(self.experts):
            if (mask := choice == i).any():
                out[mask] = expert(normed[mask])
        return x + out


def routed(rank: int, world_size: int) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Routed(), Routed()])[0], Routed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    shard_over(world_size, model, optimizer, units="Routed")
    chosen: Report = {}
    for seed in range(4):
        x = batch(seed, rank, world_size)
        for part in range(2):
            with accumulate(model, last=part == 1):
                model(x + part).pow(2).mean().backward()
        chosen[f"without gradient {seed}"] = [n for n, p in model.named_parameters() if p.grad is None]
        take_step(optimizer)
    chosen["state"] = sorted(n for n, p in model.named_parameters() if optimizer.state.get(p))
    return chosen | parameters(model)


def test_experts_that_only_some_ranks_use_are_trained_alike(alone: Ranks, ranks2: Ranks, ranks3: Ranks) -> None:
    (expected,) = alone.run(routed)
    assert "1.experts.3.weight" in expected["without gradient 0"]
    same(routed, alone, [ranks2, ranks3], atol=1e-5)


class Split(nn.Module):
    """Two layers of one size, of which a rank uses one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.one, self.two, self.rank = nn.Linear(8, 8), nn.Linear(8, 8), rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if self.rank % 2 else self.two(x)


@raises_on_ranks(2, naming("'1.one.bias'", "gradient", "[0]"))
def test_gradients_that_would_be_mixed_up_are_an_error(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Split(rank), Block())
    trueshard.shard(model, units=["Block", "Split"])
    model(batch(0, rank, world_size)).pow(2).mean().backward()


@on_ranks(2)
def test_durations_are_logged(rank: int, world_size: int, tmp_path: Path) -> None:
    """At INFO, of sharding, saving and loading."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trueshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = Stack()
        trueshard.shard(model)
        trueshard.save(tmp_path / "saved", model=model)
        trueshard.load(tmp_path / "saved", model=model)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert len(said) == 3
    for line, word in zip(said, ("shard", "save", "load"), strict=True):
        assert word in line
        assert re.search(r"\d\.\d+ s$", line)
