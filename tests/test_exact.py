"""``shard(exact=True)``: the same bits on one process and on many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import exactness
import trueshard
from cases import as_on_one_device, on_ranks, raises_on_ranks
from exactness import dealt, summed_loss
from messages import lacking, naming
from models.handmade import Scalar, Stack
from parity import Pool, Ranks, assert_same
from trueshard.checkpoint.format import MANIFEST, Manifest
from trueshard.sharding import exact

STEPS = 3


@pytest.mark.parametrize("name", ["whole_ones", pytest.param("tied_blocks", marks=pytest.mark.rest)])
def test_training_gives_the_same_bits_on_any_number_of_ranks(
    name: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks, ranks4: Ranks
) -> None:
    (expected,) = alone.run(exactness.train, name, STEPS, {})
    for ranks, shape in ((ranks2, None), (ranks3, None), (ranks4, None), (ranks4, (2, 2))):
        for found in ranks.run(exactness.train, name, STEPS, {}, shape):
            assert_same(found, expected)


ARITHMETIC: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"mixed_precision": "bf16"}}
LAYOUTS: dict[int, list[tuple[int, tuple[int, int] | None, dict[str, Any]]]] = {
    8: [
        (4, (2, 2), {"reshard_after_forward": "never", "activation_checkpointing": "full"}),
        (4, None, {"reshard_after_forward": 2}),
        (4, (4, 1), {"offload": "cpu", "activation_checkpointing": "selective"}),
    ],
    6: [
        (1, None, {"reshard_after_forward": "always", "activation_checkpointing": "selective"}),
        (2, (2, 1), {"reshard_after_forward": "never", "activation_checkpointing": "selective"}),
        (2, None, {"reshard_after_forward": "last_layer", "offload": "cpu"}),
        (3, None, {"reshard_after_forward": "always", "activation_checkpointing": "full", "offload": "cpu"}),
    ],
}
"""Microbatches of a step → the layouts that have one result at so many: ranks, the shape of their mesh, and options
that change where tensors live and when they are there."""
OF_THE_MATRIX = ("llama", "gpt2_with_dropout", "mixtral", "vit", "lora", "tied", "uneven")


def cells() -> list[Any]:
    quick = pytest.param("gpt2_with_dropout", "bfloat16", 8, LAYOUTS[8][:1], 3)
    # All layouts meet all models: some in the one dtype, and the others in the other.
    rest = [
        pytest.param(name, dtype, count, LAYOUTS[count], 5)
        for place, name in enumerate(OF_THE_MATRIX)
        for dtype, count in zip(ARITHMETIC, (8, 6) if place % 2 else (6, 8), strict=True)
    ]
    return [quick, *rest]


@pytest.mark.rest
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "dtype", "microbatches", "layouts", "steps"), cells())
def test_no_option_of_memory_changes_a_bit(
    name: str, dtype: str, microbatches: int, layouts: Any, steps: int, pool: Pool
) -> None:
    (expected,) = Ranks(1, pool).run(exactness.train, name, steps, ARITHMETIC[dtype], None, microbatches, timeout=120)
    for count, shape, options in layouts:
        options = ARITHMETIC[dtype] | options
        for found in Ranks(count, pool).run(exactness.train, name, steps, options, shape, microbatches, timeout=120):
            assert_same(found, expected)


@on_ranks(1)
def test_one_microbatch_on_one_rank_is_plain_pytorch(rank: int, world_size: int) -> None:
    """One microbatch a step: the same bits as a model that this library has not touched."""
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Scalar()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if sharded:
            trueshard.shard(model, optimizer, exact=True)
        for step in range(3):
            summed_loss(model, step, 0).backward()
            optimizer.step()
            grads = {name: p.grad for name, p in model.named_parameters()}
            found.append(exactness.digest({**grads, **{f"new {name}": p for name, p in model.named_parameters()}}))
            optimizer.zero_grad()
    assert found[:3] == found[3:]


@pytest.mark.parametrize("count", [2, 4])
@as_on_one_device("count", rtol=0.0, atol=0.0)
def test_a_loss_divided_by_powers_of_two_is_exact_without_token_mean(rank: int, world_size: int) -> dict[str, Any]:
    """A loop of one's own that divides the loss by the number of its microbatches."""
    torch.manual_seed(0)
    model = Scalar()
    trueshard.shard(model, exact=True)
    own = dealt(rank, world_size, 8)
    for number in own:
        with trueshard.accumulate(model, last=number == own[-1]):
            (summed_loss(model, 0, number) / len(own)).backward()
    return exactness.digest({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def too_large(rank: int, world_size: int, factor: float) -> None:
    torch.manual_seed(0)
    model = Scalar()
    trueshard.shard(model, exact=True)
    (factor * summed_loss(model, 0, rank)).backward()


@pytest.mark.rest
def test_a_gradient_beyond_the_range_is_an_error_that_names_the_parameter(ranks2: Ranks) -> None:
    ranks2.run(too_large, 1.0)
    for message in ranks2.raises(too_large, 1e6, match="OverflowError"):
        assert "exact" in message
        assert any(f"'{name}'" in message for name, _ in Scalar().named_parameters())


@on_ranks(2)
def test_a_gradient_that_is_not_finite_stays_so(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Stack()
    trueshard.shard(model, exact=True)
    loss = summed_loss(model, 0, rank)
    (loss * (float("inf") if rank else 1.0)).backward()
    found = {name: bool(p.grad.full_tensor().isfinite().all()) for name, p in model.named_parameters()}
    assert not any(found.values())


def reduced_twice(rank: int, world_size: int, zero: bool) -> None:
    torch.manual_seed(0)
    model = Scalar()
    trueshard.shard(model, exact=True)
    for number in range(2):
        if zero:
            model.zero_grad(set_to_none=False)
        summed_loss(model, 0, number).backward()


def test_a_second_reduction_onto_the_first_is_refused(ranks2: Ranks) -> None:
    ranks2.run(reduced_twice, True)
    ranks2.raises(reduced_twice, False, match="accumulate")


def hooked(rank: int, world_size: int) -> None:
    model = Scalar()
    model.first.weight.register_hook(lambda grad: None)
    trueshard.shard(model, exact=True)
    with trueshard.accumulate(model, last=False):
        summed_loss(model, 0, 0).backward()


class Normalised(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(8)


def test_what_cannot_be_exact_is_refused_by_name(alone: Ranks, ranks2: Ranks) -> None:
    ranks2.raises(hooked, match="hooks")
    refused: list[tuple[nn.Module, dict[str, Any], str]] = [
        (Stack(), {"tensor": 2}, "tensor=2"),
        (Stack(), {"pipeline": True}, "pipeline"),
        (Stack(), {"mixed_precision": trueshard.MixedPrecision(compute="float16")}, "float16"),
        (Stack().half(), {}, "'first.weight'"),
        (Normalised(), {}, "'batch'"),
    ]
    for model, options, named in refused:
        with pytest.raises(ValueError, match=naming(named)):
            exact.refuse(model, trueshard.Plan(exact=True, **options))


def with_whole_ones(shape: Any, seed: int = 0, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model with parameters that every rank has whole, sharded over a mesh of ``shape``, and its optimizer."""
    torch.manual_seed(seed)
    model = Scalar()
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = shape and torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    trueshard.shard(model, optimizer, mesh=mesh, **options)
    return model, optimizer


def hashes(rank: int, world_size: int, shape: tuple[int, int] | None, flip: bool) -> dict[str, str]:
    model, optimizer = with_whole_ones(shape)
    if flip and rank == 0:
        model.first.weight.to_local().detach().view(torch.int32)[0, 0] ^= 1
    return dict(trueshard.state_hash(model, optimizer))


def test_a_hash_does_not_depend_on_the_layout_and_one_bit_changes_it(
    alone: Ranks, ranks3: Ranks, ranks4: Ranks
) -> None:
    (expected,) = alone.run(hashes, None, False)
    assert ranks3.run(hashes, None, False) == [expected] * 3
    assert ranks4.run(hashes, (2, 2), False) == [expected] * 4
    for found in ranks3.run(hashes, None, True):
        assert [key for key in expected if found[key] != expected[key]] == ["model/first.weight"]


def flipped(rank: int, world_size: int, shape: tuple[int, int], wrong: int | None, whole: bool) -> None:
    model, optimizer = with_whole_ones(shape)
    summed_loss(model, 0, rank).backward()
    optimizer.step()
    if rank == wrong:
        parameter = model.scale if whole else model.last.weight
        local = optimizer.state[parameter]["exp_avg"].to_local()
        local.view(torch.int32).view(-1)[0] ^= 1 << 20
    trueshard.check_replicas(model, optimizer)


def test_one_flipped_bit_names_the_tensor_and_the_rank(ranks3: Ranks, ranks4: Ranks) -> None:
    ranks4.run(flipped, (2, 2), None, False)
    for message in ranks4.raises(flipped, (4, 1), 2, False, match="ReplicasDiffer"):
        assert lacking(message, "rank 2 holds", "'optimizer/last.weight/exp_avg'", "ranks 0, 1, 3") == []
    for message in ranks4.raises(flipped, (2, 2), 3, False, match="ReplicasDiffer"):
        assert lacking(message, "ranks 1 and 3", "'optimizer/last.weight/exp_avg'") == []
    for message in ranks3.raises(flipped, (1, 3), 1, True, match="ReplicasDiffer"):
        assert lacking(message, "rank 1 holds", "'optimizer/scale/exp_avg'") == []


def saved_or_loaded(rank: int, world_size: int, folder: str, load: bool) -> dict[str, str]:
    model, optimizer = with_whole_ones(None, int(load), exact=True)
    if load:
        trueshard.load(folder, model=model, optimizer=optimizer)
    else:
        trueshard.token_mean(model, 1)
        summed_loss(model, 0, rank).backward()
        optimizer.step()
        trueshard.save(folder, model=model, optimizer=optimizer)
    return dict(trueshard.state_hash(model, optimizer))


@pytest.mark.rest
def test_a_checkpoint_holds_the_hashes_of_what_was_in_memory(ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (expected, _) = ranks3.run(saved_or_loaded, str(folder), False)[:2]
    assert ranks2.run(saved_or_loaded, str(folder), True) == [expected] * 2
    assert trueshard.check(folder).tensors
    file = folder / MANIFEST
    manifest = Manifest.parse(file.read_bytes(), "")
    assert manifest.about["hashes"] == expected
    manifest.about["hashes"]["model/scale"] = "0" * 16
    file.write_bytes(manifest.to_bytes())
    with pytest.raises(trueshard.DamagedCheckpoint, match=naming("'model/scale'")):
        trueshard.check(folder)
    ranks2.raises(saved_or_loaded, str(folder), True, match=naming("'model/scale'"))


@pytest.mark.rest
def test_the_planner_counts_the_bytes_of_exact_sums() -> None:
    plans = [trueshard.plan(Stack, ranks=2, batch=torch.randn(2, 8), exact=exact) for exact in (False, True)]
    received = [plan.forecast.received_by_collective["reduce_scatter"] for plan in plans if plan.forecast]
    assert received[1] == 2 * received[0] > 0
    assert plans[1].exact


@pytest.mark.rest
@pytest.mark.timeout(400)
def test_compiled_blocks_have_the_same_bits(pool: Pool) -> None:
    (expected,) = Ranks(1, pool).run(exactness.train, "llama", 2, {"compile": True}, timeout=300)
    for found in Ranks(3, pool).run(exactness.train, "llama", 2, {"compile": True}, timeout=300):
        assert_same(found, expected)


@as_on_one_device(3, rtol=0.0, atol=0.0)
def test_what_is_changed_after_sharding_adds_up_exactly(rank: int, world_size: int) -> dict[str, Any]:
    """A state dict that is assigned, a module that is added, a copy: what comes later adds up exactly, too."""
    torch.manual_seed(0)
    model = Stack()
    trueshard.shard(model, exact=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.extra = nn.Linear(8, 8)
    model.last.register_forward_hook(lambda module, args, output: output + model.extra(args[0]))
    own = dealt(rank, world_size, 6)
    mean = trueshard.token_mean(model, len(own))
    for number in own:
        with trueshard.accumulate(model, last=number == own[-1]):
            mean(summed_loss(model, 0, number)).backward()
    norm = float(trueshard.clip_grad_norm_(model.parameters(), 0.1))
    return {"norm": norm} | exactness.digest({name: p.grad for name, p in model.named_parameters()})


@raises_on_ranks(2, "threads")
def test_ranks_with_different_numbers_of_threads_are_refused(rank: int, world_size: int) -> None:
    torch.set_num_threads(1 + rank)
    try:
        trueshard.shard(Stack(), exact=True)
    finally:
        torch.set_num_threads(1)


@on_ranks(2)
def test_a_backward_that_is_cut_short_changes_nothing_after_it(rank: int, world_size: int) -> None:
    """Gradients of a plain loss and of a mean are the same after it."""
    torch.manual_seed(0)
    model = Stack()
    trueshard.shard(model, exact=True)

    def gradients(loss: torch.Tensor) -> dict[str, str]:
        loss.backward()
        found = exactness.digest({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
        return found

    of_a_loss = gradients(summed_loss(model, 0, rank))
    mean = trueshard.token_mean(model, 3)
    of_a_mean = gradients(mean(summed_loss(model, 0, rank)))
    handle = model.first.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mean(summed_loss(model, 1, rank)).backward()
    handle.remove()
    model.zero_grad()
    assert of_a_loss != of_a_mean == gradients(mean(summed_loss(model, 0, rank)))
    assert gradients(summed_loss(model, 0, rank)) == of_a_loss
