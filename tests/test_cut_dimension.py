"""Where rows would be padded by much, a parameter is cut along another dimension, and all else is as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import test_experts
import trueshard
from cases import as_on_one_device, on_ranks
from checkpointing import scribble
from exactness import digest
from gathering import gradients, parameters, whole
from parity import Pool, Ranks, assert_same
from resting import all_but
from stepping import EPS, ByParameter, Mixed, OwnSGD, Whole, matrices, shard_over
from trueshard.plans import Plan
from trueshard.train.models.parameters import copy_module
from trueshard.train.models.quantized import QuantizedLinear

SAMPLES, WIDTH = 12, 144


class Experts(nn.Module):
    """Two stacked experts, whose other dimensions 2, 3 and 4 ranks divide, and two more, of which they divide none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.up = nn.Parameter(torch.randn(2, 12, WIDTH) / 12)
        self.down = nn.Parameter(torch.randn(2, WIDTH, 12) / 4)
        self.prime = nn.Parameter(torch.randn(2, 35, 11) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        hidden = torch.einsum("bw,ehw->beh", x, self.up).tanh()
        prime = torch.einsum("beh,eph->bep", hidden[..., :11], self.prime).tanh().mean(-1)
        return x + torch.einsum("beh,ewh,be->bw", hidden, self.down, weights + prime)


class Odd(nn.Module):
    """Few experts, convolutions of 3 channels, 5 heads and 2 classes; one parameter is frozen, one is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 10, 8)
        self.widen = nn.Linear(10, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.paint = nn.Conv2d(16, 3, 3, padding=1)
        self.heads = nn.Linear(WIDTH, 5)
        self.same = nn.Linear(WIDTH, 5)
        self.same.weight = self.heads.weight
        self.frozen = nn.Linear(WIDTH, 5, bias=False).requires_grad_(False)
        self.classes = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.widen(self.patches(x.view(-1, 3, 8, 8)).flatten(1))
        for layer in self.layers:
            x = layer(x)
        painted = self.paint(x.view(-1, 16, 3, 3)).flatten(1)
        heads = self.heads(x) * self.same(x.tanh()) + self.frozen(x)
        return torch.cat([painted, heads, self.classes(x)], 1)


def build() -> Odd:
    torch.manual_seed(0)
    return Odd()


def batch(step: int, rank: int, world_size: int) -> torch.Tensor:
    x = torch.randn(SAMPLES, 192, generator=torch.Generator().manual_seed(step))
    return x.chunk(world_size)[rank]


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    x = batch(step, rank, world_size).to(next(model.parameters()).dtype)
    return model(x).square().mean()


EXPERTS = {f"layers.{i}.{name}": 1 for i in (0, 1) for name in ("router.weight", "up", "down")}
HEADS = {"heads.weight": 1, "frozen.weight": 1}
CUT: dict[int, dict[str, int]] = {
    1: {},
    2: {"paint.weight": 1, **HEADS},
    3: {"patches.weight": 1, **EXPERTS, **HEADS, "classes.weight": 1},
    4: {"patches.weight": 2, **EXPERTS, "paint.weight": 1, **HEADS, "classes.weight": 1},
}
"""Ranks → the parameters that are not cut by rows, and their dimension."""


# What is chosen, and what a rank holds


@on_ranks(1, 2, 3, 4)
def test_a_parameter_is_cut_along_a_dimension_that_divides_where_its_rows_do_not(rank: int, world_size: int) -> None:
    """Each rank holds its share to the byte, of the shards and of the optimizer's state, and the plan says the rest."""
    model = build()
    whole_bytes = sum(p.nbytes for p in model.parameters())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    plan = trueshard.shard(model, optimizer)
    assert plan.cut_dimensions == CUT[world_size]
    assert Plan.from_json(plan.to_json()) == plan
    assert ("Cut along dimension 1, since rows would be padded: " in str(plan)) == (world_size > 1)
    held = 0
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        assert tuple(p.shape) == shapes[name]
        dim = CUT[world_size].get(name, 0)
        pieces = p._local_tensor.untyped_storage().nbytes() * world_size
        row = p[0].numel() * 4
        assert pieces == (p.numel() * 4 if dim else -(-shapes[name][0] // world_size) * world_size * row), name
        assert p.placements[0].dim == dim  # type: ignore[attr-defined]
        held += pieces
    assert held - whole_bytes == plan.padding
    loss_of(model, 0, rank, world_size).backward()
    optimizer.step()
    for p in model.parameters():
        if p.requires_grad:
            assert optimizer.state[p]["exp_avg"]._local_tensor.shape == p._local_tensor.shape


@on_ranks(4)
def test_a_plan_for_other_ranks_is_cut_for_these(rank: int, world_size: int) -> None:
    """As is one that somebody edited: the dimension follows from shapes and ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for_two = trueshard.shard(build(), mesh=mesh)
    assert for_two.cut_dimensions == CUT[2]
    plan = trueshard.shard(build(), plan=Plan.from_json(for_two.to_json()))
    assert plan.cut_dimensions == CUT[4]


# Training


class Rows(ByParameter):
    """Scales a row by its norm, of which it keeps a mean: rows are updated by themselves, columns are not."""

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        norms = p.grad.flatten(1).norm(dim=1) if p.ndim > 1 else p.grad.abs()
        state["norms"] = state.get("norms", torch.zeros_like(norms)).lerp(norms, 0.5)
        p.sub_(group["lr"] * p.grad / (state["norms"] + 0.1).view(-1, *[1] * (p.ndim - 1)))


def _others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


OPTIMIZERS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)],
    "rows": lambda model: [Rows(model.parameters())],
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.05)],
    "Muon": lambda model: [torch.optim.Muon(matrices(model), lr=0.02)],
    "SGD, for-loop": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)],
    "elements": lambda model: [OwnSGD(model.parameters())],
    "whole": lambda model: [Whole(model.parameters())],
    "mixed": lambda model: [Mixed([{"params": matrices(model)}, {"params": _others(model), "whole": True}])],
}


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range, rank: int, world_size: int) -> Any:
    norms = []
    for step in steps:
        loss_of(model, step, rank, world_size).backward()
        clip = nn.utils.clip_grad_norm_ if step % 2 else trueshard.clip_grad_norm_
        norms.append(whole(clip(model.parameters(), 0.1)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("count", all_but([3], [2, 3, 4]))
@pytest.mark.parametrize("name", all_but(["AdamW", "rows"], OPTIMIZERS))
@as_on_one_device("count")
def test_every_optimizer_steps_as_on_one_device(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Gradients, norms, parameters, and an averaged copy, whose shards are cut alike."""
    model = build()
    if name == "Muon":  # rounds gradients to bfloat16, which makes much of the order of a sum in float32
        model.double()
    optimizers = OPTIMIZERS[name](model)
    shard_over(world_size, model, *optimizers)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    loss_of(model, 9, rank, world_size).backward()
    found = {"gradients": gradients(model)}
    norms = train(model, optimizers, range(2), rank, world_size)
    averaged.update_parameters(model)
    norms += train(model, optimizers, range(2, 4), rank, world_size)
    averaged.update_parameters(model)
    if name in ("elements", "rows") and world_size > 2:
        # Who updates elements by themselves needs no owner for parts of rows; who needs a row does.
        states = [optimizers[0].state.get(p, {}) for n, p in model.named_parameters() if CUT[world_size].get(n)]
        cut = [value for state in states for value in state.values() if isinstance(value, DTensor)]
        assert len(cut) == (
            sum(p.requires_grad for p in map(model.get_parameter, CUT[world_size])) if name == "elements" else 0
        )
    return found | {"norms": norms, "parameters": parameters(model), "averaged": parameters(averaged.module)}


WORDS: dict[str, dict[str, Any]] = {
    "reshard to 2 ranks": {"reshard_after_forward": 2},
    "2 copies": {"mesh": (2, 2)},
    "never freed": {"reshard_after_forward": "never"},
    "recomputed": {"activation_checkpointing": "full", "reshard_after_forward": "always"},
    "offload": {"offload": "cpu"},
    "gradients as shards": {"accumulate_gradients": "sharded"},
}


@pytest.mark.parametrize("words", all_but(["reshard to 2 ranks"], WORDS))
@as_on_one_device(4)
def test_every_option_trains_as_on_one_device(rank: int, world_size: int, words: str) -> dict[str, Any]:
    """Accumulating over two microbatches, the first of which leaves its sums on the ranks."""
    options = dict(WORDS[words])
    if "mesh" in options and world_size > 1:
        options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    model.eval()
    shard_over(world_size, model, optimizer, **options)
    for step in range(3):
        for last in (False, True):
            context = trueshard.accumulate(model, last=last) if world_size > 1 else torch.enable_grad()
            with context:
                (loss_of(model, 2 * step + last, rank, world_size) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        outputs = model(batch(0, 0, 1))
    return {"parameters": parameters(model), "outputs": outputs}


@pytest.mark.parametrize("words", all_but([], ["reshard to 2 ranks", "recomputed"]))
@as_on_one_device(4)
def test_hooks_on_gradients_see_the_whole(rank: int, world_size: int, words: str) -> dict[str, Any]:
    model = build()
    shapes = []
    for name in ("layers.1.up", "patches.weight", "layers.0.prime"):
        model.get_parameter(name).register_hook(lambda grad: shapes.append(tuple(grad.shape)) or grad * 2)
    shard_over(world_size, model, **WORDS[words])
    loss_of(model, 0, rank, world_size).backward()
    return {"gradients": gradients(model), "shapes": shapes}


FEW = {
    ("qwen3_moe, 2 experts", ()): ("Shard(dim=1)",),
    ("qwen3_moe, 2 experts", ("experts", 2)): ("Shard(dim=1)", "Shard(dim=0)"),
    ("qwen3_moe, 3 experts", ("tensor", 2)): ("Shard(dim=2)", "_StridedShard(dim=1, sf=2)"),
    ("qwen3_moe, 3 experts", ("replicate", 2)): ("Replicate()", "Shard(dim=1)"),
}
"""(model, an axis of four ranks) → how gate and up projections of its experts are placed"""


@pytest.mark.parametrize(("name", "axis"), all_but([("qwen3_moe, 2 experts", ())], FEW, unpack=True))
def test_fewer_experts_than_ranks_on_every_axis(name: str, axis: Any, alone: Ranks, ranks4: Ranks) -> None:
    how = dict([axis]) if axis else {}
    for placements in ranks4.run(placed, name, how):
        assert placements == FEW[name, axis]
    test_experts.holds(ranks4, alone, name, how)


def placed(rank: int, world_size: int, name: str, how: dict[str, int]) -> tuple[str, ...]:
    model: Any = test_experts.build(name)
    copies = how.get("replicate", 1)
    mesh = init_device_mesh("cpu", (copies, world_size // copies), mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh} if copies > 1 else how
    trueshard.shard(model, **options)  # type: ignore[arg-type]
    parameter: Any = model.model.layers[0].mlp.experts.gate_up_proj
    assert parameter.to_local().nbytes == parameter.numel() * 8 * copies // world_size
    return tuple(map(repr, parameter.placements))


# Checkpoints, hashes, exact sums, whole weights


def save(rank: int, world_size: int, name: str, path: Path) -> tuple[Any, Any, Any]:
    model = build()
    optimizers = OPTIMIZERS[name](model)
    trueshard.shard(model, *optimizers)
    train(model, optimizers, range(2), rank, world_size)
    trueshard.save(path, model=model, optimizer=optimizers[0])
    found = parameters(model), dict(trueshard.state_hash(model, optimizers[0]))
    train(model, optimizers, range(2, 3), rank, world_size)
    return *found, parameters(model)


def load(rank: int, world_size: int, name: str, path: Path) -> tuple[Any, Any, Any]:
    model = build()
    optimizers = OPTIMIZERS[name](model)
    trueshard.shard(model, *optimizers)
    train(model, optimizers, range(1), rank, world_size)
    scribble(model, optimizers[0])
    trueshard.load(path, model=model, optimizer=optimizers[0])
    found = parameters(model), dict(trueshard.state_hash(model, optimizers[0]))
    train(model, optimizers, range(2, 3), rank, world_size)
    return *found, parameters(model)


@pytest.mark.parametrize(
    ("saved", "counts"), all_but([(4, (3,))], [(4, (3,)), (4, (1, 2, 4)), (3, (1, 2, 3, 4)), (1, (3, 4))], unpack=True)
)
@pytest.mark.parametrize("name", all_but(["AdamW"], ["AdamW", "rows", "Adafactor", "elements", "mixed"]))
def test_a_checkpoint_is_loaded_at_other_ranks_with_other_cuts(
    name: str, saved: int, counts: tuple[int, ...], pool: Pool, tmp_path: Path
) -> None:
    """Values and hashes to the last bit; and the next step, with the state that was loaded."""
    (values, hashes, later), *_ = Ranks(saved, pool).run(save, name, tmp_path / "saved")
    for count in counts:
        for found in Ranks(count, pool).run(load, name, tmp_path / "saved"):
            assert_same(found[0], values)
            assert found[1] == hashes
            assert_same(found[2], later, rtol=1e-4, atol=1e-6)


def exactly(rank: int, world_size: int, name: str) -> dict[str, Any]:
    model = build()
    optimizers = OPTIMIZERS[name](model)
    trueshard.shard(model, *optimizers, exact=True)
    own = range(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    for step in range(2):
        mean = trueshard.token_mean(model, len(own))
        for number in own:
            with trueshard.accumulate(model, last=number == own[-1]):
                mean(loss_of(model, step, number, SAMPLES)).backward()
        norm = trueshard.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return digest({"norm": whole(norm), **parameters(model)}) | dict(trueshard.state_hash(model, optimizers[0]))


@pytest.mark.parametrize("name", all_but([], ["AdamW", "rows", "Adafactor", "elements"]))
def test_exact_sums_give_the_same_bits(name: str, alone: Ranks, pool: Pool) -> None:
    (expected,) = alone.run(exactly, name)
    for count in (2, 3, 4):
        for found in Ranks(count, pool).run(exactly, name):
            assert found == expected


@on_ranks(4)
def test_whole_weights_are_those_of_the_shards(rank: int, world_size: int) -> None:
    """To engines, to a copy that is gathered, and in a full state dict of torch; the copy computes the same bits."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = build()
    trueshard.shard(model)
    expected = parameters(model)
    found = {
        name: t.clone() for names, tensors in trueshard.weights(model) for name, t in zip(names, tensors, strict=True)
    }
    assert_same({name: found[name] for name in expected}, expected)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        assert_same({name: full[name] for name in expected}, expected)
    with torch.no_grad(), trueshard.gathered(model) as copy:
        assert_same(parameters(copy), expected)
        assert torch.equal(copy(batch(0, 0, 1)), model.eval()(batch(0, 0, 1)))


@on_ranks(4)
def test_a_weight_that_is_cut_otherwise_than_its_codes_is_quantised(rank: int, world_size: int) -> None:
    """Codes of a row belong together, and a rank has no whole row of the weight."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 5))
    packed = nn.Sequential(QuantizedLinear(plain[0], "int8"))
    expected = packed[0].packed.detach().clone()
    assert trueshard.shard(plain).cut_dimensions != trueshard.shard(packed).cut_dimensions
    scribble(packed)
    copy_module(packed, plain)
    assert torch.equal(parameters(packed)["0.packed"], expected)
