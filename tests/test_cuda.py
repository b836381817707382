"""What only a CUDA device shows: memory on two devices, streams, NCCL. On GPUs, or on emulated ones (`make cuda`)."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import TopPLogitsWarper

import trueshard
from cases import on
from emulated_cuda import FOLDER
from emulated_cuda.reports import counting
from gathering import parameters, whole
from models import CASES, rows
from parity import DEVICE, Pool, Ranks, assert_same
from planning import Setting
from stepping import accumulate
from trueshard import _torch, distributed
from trueshard.checkpoint import saving
from trueshard.checkpoint.hashing import hash_here
from trueshard.checkpoint.snapshot_parts import ROOT
from trueshard.optim import exact
from trueshard.optim.shards import group_shards
from trueshard.planner.hardware import hardware
from trueshard.planner.simulation.rehearse import rehearse
from trueshard.train.losses import summed
from trueshard.train.reducing import over_ranks
from trueshard.train.rl.engine import drawn, nucleus
from trueshard.train.rl.vllm import copied_weights

if DEVICE != "cuda":
    pytest.skip("runs on a CUDA device: `make cuda` emulates one", allow_module_level=True)

RTOL, ATOL, STEPS, SAMPLES = 2e-3, 2e-4, 3, 12
rest = pytest.mark.rest
Optimizers = list[torch.optim.Optimizer]


@pytest.fixture(scope="session")
def devices(pool: Pool) -> Ranks:
    """Two devices; where there is one, that."""
    return Ranks(min(2, torch.cuda.device_count()), pool)


def adamw(model: nn.Module, **settings: Any) -> Optimizers:
    return [torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01, eps=1e-3, **settings)]


def muon(model: nn.Module) -> Optimizers:
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for p in model.parameters() if not any(p is other for other in inner)]
    return [torch.optim.Muon(inner, lr=1e-3), torch.optim.AdamW(others, lr=1e-3, eps=1e-3)]


def adafactor(model: nn.Module) -> Optimizers:
    return [torch.optim.Adafactor(model.parameters(), lr=1e-3)]


def halve_a_gradient(model: nn.Module) -> None:
    model.get_parameter("model.layers.0.mlp.up_proj.weight").register_hook(lambda grad: grad * 0.5)


def train(name: str, model: nn.Module, optimizers: Optimizers, place: tuple[int, int], parts: int = 1) -> None:
    """Some clipped steps on this place's samples, in microbatches; with float16 under a scaler."""
    case, device = CASES[name], torch.device("cuda")
    clip = trueshard.clip_grad_norm_ if isinstance(model, FSDPModule) else nn.utils.clip_grad_norm_
    for step in range(STEPS):
        batch = {key: value.to(device) for key, value in rows(case.batch(SAMPLES, step), *place).items()}
        for part in range(parts):
            with accumulate(model, last=part == parts - 1):
                (case.loss(model, rows(batch, part, parts)) / parts).backward()
        clip(model.parameters(), 0.5)
        for each in optimizers:
            each.step()
            each.zero_grad()


def trains_alike(
    rank: int,
    world_size: int,
    make: Callable[[nn.Module], Optimizers],
    words: dict[str, Any],
    name: str = "llama",
    change: Callable[[nn.Module], None] | None = None,
) -> None:
    """Hold sharded training against the plain model on the whole batch."""
    trained = []
    for is_sharded in (False, True):
        model = CASES[name].build(0).cuda()
        optimizers = make(model)
        if change is not None:
            change(model)
        if is_sharded:
            if "mesh" in words:
                words |= {"mesh": init_device_mesh("cuda", (world_size, 1), mesh_dim_names=words["mesh"])}
            trueshard.shard(model, *optimizers, **words)
        shares = is_sharded and "tensor" not in words
        train(name, model, optimizers, (rank, world_size) if shares else (0, 1), parts=2)
        trained.append(parameters(model))
    assert_same(trained[1], trained[0], rtol=RTOL, atol=ATOL)


TRAINING: dict[str, tuple[Any, ...]] = {
    "AdamW": (adamw, {}),
    "AdamW, offloaded": (adamw, {"offload": "cpu"}),
    "AdamW, exact": (adamw, {"exact": True}),
    "Muon": (muon, {}),
    "Muon, offloaded": (muon, {"offload": "cpu"}),
    "Adafactor": (adafactor, {}),
    "a hook": (adamw, {}, "llama", halve_a_gradient),
    "a hook, offloaded": (adamw, {"offload": "cpu"}, "llama", halve_a_gradient),
    "experts": (adamw, {}, "qwen3_moe"),
    "experts, offloaded": (adamw, {"offload": "cpu"}, "qwen3_moe"),
    "tensor": (adamw, {"tensor": 2}),
    "tensor and sequence": (adamw, {"tensor": {"ranks": 2, "sequence": True}}),
    "replicas": (adamw, {"mesh": ("replicate", "shard")}),
    "replicas, exact": (adamw, {"mesh": ("replicate", "shard"), "exact": True}),
}
SHORT = {"AdamW, offloaded"}


@pytest.mark.parametrize("feature", [each if each in SHORT else pytest.param(each, marks=rest) for each in TRAINING])
def test_training(devices: Ranks, feature: str) -> None:
    devices.run(trains_alike, *TRAINING[feature], timeout=120.0)


@rest
def test_training_exactly_and_offloaded_on_one_device(pool: Pool) -> None:
    Ranks(1, pool).run(trains_alike, adamw, {"exact": True, "offload": "cpu"})


RINGS = [(torch.float32, 20), (torch.float32, 64), (torch.bfloat16, 20)]


@pytest.mark.parametrize("balanced", [False, pytest.param(True, marks=rest)])
@on("devices")
def test_ring_attention(rank: int, world_size: int, balanced: bool) -> None:
    """Whatever the kernels of the dtype return beside the output, and wherever they pad."""
    numbers = (rank, 2 * world_size - 1 - rank) if balanced else (2 * rank, 2 * rank + 1)
    for dtype, length in RINGS:
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(1, 3, length, 16, generator=generator).to("cuda", dtype) for _ in range(3)]
        out = attention(*(each.requires_grad_() for each in whole))
        out.float().square().sum().backward()
        parts = torch.arange(length, device="cuda").chunk(2 * world_size)
        here = torch.cat([parts[number] for number in numbers])
        own = [each.detach()[:, :, here].contiguous().requires_grad_() for each in whole]
        ring = _torch.ring_attention(*own, dist.group.WORLD, balanced=balanced)
        ring.float().square().sum().backward()
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        assert_same(ring.detach(), out.detach()[:, :, here], **tolerance)
        assert_same([each.grad for each in own], [each.grad[:, :, here] for each in whole], **tolerance)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@rest
@pytest.mark.parametrize("setting", ["fused", "capturable", "foreach"])
@on("devices")
def test_resuming_puts_counts_of_steps_where_the_kernel_reads_them(
    rank: int, world_size: int, tmp_path: Path, setting: str
) -> None:
    """A fused kernel reads them on the device without a check."""
    models = []
    for seed in (0, 1):
        model = CASES["llama"].build(seed).cuda()
        (optimizer,) = adamw(model, **{setting: True})
        trueshard.shard(model, optimizer)
        models.append((model, optimizer))
    (model, optimizer), (other, its) = models
    train("llama", model, [optimizer], (rank, world_size))
    trueshard.save(tmp_path / "saved", model=model, optimizer=optimizer)
    trueshard.load(tmp_path / "saved", model=other, optimizer=its)
    devices = [{state["step"].device for state in each.state.values()} for each in (optimizer, its)]
    assert devices[0] == devices[1]
    train("llama", model, [optimizer], (rank, world_size))
    train("llama", other, [its], (rank, world_size))
    assert_same(parameters(other), parameters(model))


@rest
@on("devices")
def test_a_scaler_finds_an_infinite_gradient_of_offloaded_shards(rank: int, world_size: int) -> None:
    """The scale and what was found travel to the host as the scaler sends them: without waiting."""
    case = CASES["llama"]
    model = case.build(0).cuda()
    (optimizer,) = adamw(model)
    trueshard.shard(model, optimizer, offload="cpu", mixed_precision="fp16")
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    batch = {key: value.cuda() for key, value in rows(case.batch(SAMPLES, 0), rank, world_size).items()}
    losses = []
    for step in range(4):
        loss = case.loss(model, batch)
        scaler.scale(loss).backward()
        if step == 1 and rank == 0:
            next(model.parameters()).grad.to_local().view(-1)[0] = torch.inf
        before = parameters(model)
        scaler.unscale_(optimizer)
        trueshard.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 1:
            assert_same(parameters(model), before)
            assert scaler.get_scale() == 32.0
        losses.append(loss.item())
    assert losses[3] < losses[0]


@rest
@pytest.mark.parametrize("offload", ["none", "cpu"])
@on("devices")
def test_parameters_are_written_to_and_compared(rank: int, world_size: int, offload: str) -> None:
    model = CASES["llama"].build(0)
    name = "model.layers.0.mlp.up_proj.weight"
    before = model.get_parameter(name).detach().clone()
    trueshard.shard(model.cuda(), offload=offload)
    parameter = model.get_parameter(name)
    with torch.no_grad():
        assert (parameter - before.to(parameter.device)).abs().sum().item() == 0
        parameter[0] = 1.0
        before[0] = 1.0
        assert_same(parameters(model)[name], before)
        parameter.copy_(2 * before.to(parameter.device))
        assert_same(parameters(model)[name], 2 * before)
        parameter.data = before.to(parameter.device)
        parameter.add_(before.to(parameter.device))
        assert_same(parameters(model)[name], 2 * before)
        parameter.normal_()
    assert parameter.to_local().device.type == ("cpu" if offload == "cpu" else "cuda")


@rest
@on("devices")
def test_weights_are_read_on_side_streams(rank: int, world_size: int) -> None:
    """As vLLM's producer does it: it asks for the next tensor inside one of two streams, in turn."""
    model = CASES["llama"].build(0).cuda()
    optimizers = adamw(model)
    trueshard.shard(model, *optimizers)
    train("llama", model, optimizers, (rank, world_size))
    expected, read = parameters(model), {}
    pairs = copied_weights(model)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for number in itertools.count():
        stream = streams[number % 2]
        stream.synchronize()
        with torch.cuda.stream(stream):
            some = list(itertools.islice(pairs, 3))
            read |= {name: tensor.clone() for name, tensor in some}
        if not some:
            break
    torch.cuda.synchronize()
    assert_same(whole(read), {name: expected[name] for name in read})
    train("llama", model, optimizers, (rank, world_size))


@rest
@on("devices")
def test_checkpoints_beside_a_default_device(rank: int, world_size: int, tmp_path: Path) -> None:
    model = CASES["llama"].build(0).cuda()
    (optimizer,) = adamw(model)
    trueshard.shard(model, optimizer)
    train("llama", model, [optimizer], (rank, world_size))
    expected = parameters(model)
    torch.set_default_device("cuda")
    trueshard.save(tmp_path / "saved", model=model, optimizer=optimizer, wait=False).wait()
    trueshard.load(tmp_path / "saved", model=model, optimizer=optimizer)
    torch.set_default_device(None)
    assert_same(parameters(model), expected)


class Unknown(torch.optim.SGD):
    """Of no class of torch's, so that it is tried on stand-ins."""


@rest
@pytest.mark.parametrize("words", [{}, {"tensor": 2}], ids=["shards", "tensor"])
@on("devices")
def test_what_is_tried_beside_a_default_device(rank: int, world_size: int, words: dict[str, Any]) -> None:
    """Trials take place on the CPU: an optimizer's at ``shard()``, that of ranks' parts in the first pass, too."""
    case, trained = CASES["llama"], []
    for device in (None, "cuda"):
        model = case.build(0).cuda()
        optimizer = Unknown(model.parameters(), lr=0.1)
        batch = {key: value.cuda() for key, value in case.batch(SAMPLES, 0).items()}
        torch.set_default_device(device)
        trueshard.shard(model, optimizer, **words)
        case.loss(model, batch).backward()
        optimizer.step()
        torch.set_default_device(None)
        trained.append(parameters(model))
    assert_same(*trained)


class Drawn:
    """Samples drawn on torch's default device."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


@rest
@on("devices")
def test_a_loader_beside_a_default_device(rank: int, world_size: int) -> None:
    """What samples draw there follows from the seed, too, and the training's own draws are left alone."""
    torch.set_default_device("cuda")
    torch.manual_seed(5)
    expected = torch.rand(1)
    passes = []
    for seed in (5, 6):  # of the training
        torch.manual_seed(seed)
        passes.append([trueshard.gather(batch) for batch in trueshard.loader(Drawn(), world_size)])
        assert (torch.rand(1) == expected) == (seed == 5)
    torch.set_default_device(None)
    assert passes[0][0].device.type == "cuda"
    assert torch.equal(*map(torch.cat, passes))
    assert len(torch.cat(passes[0]).unique()) == 16


@rest
def test_an_offloaded_job_is_rehearsed() -> None:
    job = Setting("perceptron", words={"offload": "cpu"}).job()
    assert rehearse(job, hardware("h100")).seconds.measured > 0


def tied_over_stages(rank: int, world_size: int) -> torch.Tensor:
    mesh = init_device_mesh("cuda", (1, world_size), mesh_dim_names=("shard", "stage"))
    torch.manual_seed(rank)
    stage = nn.Linear(6, 6).cuda()
    trueshard.shard(stage, plan=trueshard.Plan(pipeline=True), mesh=mesh["shard"])
    has_copy = rank in (0, world_size - 1)
    trueshard.tie_over(mesh["stage"], {"weight": stage.weight if has_copy else None})
    return stage.weight.to_local()


@rest
def test_ties_over_three_stages_of_which_one_has_no_copy(pool: Pool) -> None:
    """NCCL makes the communicator of the stages in a call that all of them make."""
    if torch.cuda.device_count() < 3:
        pytest.skip("needs three GPUs")
    first, middle, last = Ranks(3, pool).run(tied_over_stages)
    assert torch.equal(first, last)
    assert not torch.equal(first, middle)


class DrawsLater(torch.optim.SGD):
    draws = False

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.draws:
            torch.rand(1, device="cuda")


@rest
@on("devices")
def test_draws_of_an_optimizer_on_the_device_are_noticed(rank: int, world_size: int) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = DrawsLater(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer)
    for draws in (False, True):
        optimizer.draws = draws
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        with pytest.warns(UserWarning, match="drew random numbers") if draws else contextlib.nullcontext():
            optimizer.step()


def shards_on_the_cpu(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert model.weight.device_mesh.device_type == "cpu"


@rest
def test_a_group_of_gloo_alone_is_one_of_the_cpu(pool: Pool) -> None:
    Ranks(1, pool).run(shards_on_the_cpu, group=False)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@rest
def test_likeliest_tokens_are_chosen_by_deterministic_kernels() -> None:
    logs = torch.randn(16, 100, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    for top_p in (0.01, 0.5, 0.9):
        with deterministic():
            found = nucleus(logs.cuda(), top_p).cpu()
        assert torch.equal(found, TopPLogitsWarper(top_p)(torch.empty(0), logs))


@rest
@on("devices")
def test_experts_without_a_deterministic_kernel_are_refused_by_name(rank: int, world_size: int) -> None:
    with deterministic():
        model = CASES["qwen3_moe"].build(0).cuda()
        model.set_experts_implementation("grouped_mm")
        optimizers = adamw(model)
        with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts.*set_experts_implementation"):
            trueshard.shard(model, *optimizers, exact=True)
        model.set_experts_implementation("eager")
        trueshard.shard(model, *optimizers, exact=True)
        train("qwen3_moe", model, optimizers, (rank, world_size))


@rest
def test_exact_norms_and_hashes_take_large_pieces() -> None:
    """The bits are those of the CPU's small pieces; the operations do not grow with the elements."""
    values = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    norms, hashes, costs = [], [], []
    for device in ("cuda", "cpu"):
        here = values.to(device)
        with counting() as cost:
            norms.append(exact.norm(group_shards([here]), 2.0, here.numel()))
        costs.append(cost)
        with counting() as cost:
            hashes.append(hash_here(here))
        costs.append(cost)
    assert torch.equal(*(norm.cpu() for norm in norms))
    assert hashes[0] == hashes[1]
    if FOLDER in os.environ:
        assert [each.operations for each in costs] == [NORM, HASH, 0, 0]
        assert [each.waits.total() for each in costs] == [0, 1, 0, 0]


NORM, HASH = 55, 35
"""Operations of two pieces: with pieces of a CPU's cache it would be 1,100 and 2,500."""


def huge_gradient(model: nn.Module) -> None:
    inputs = torch.full((2, 8), 1e4, device="cuda")
    model(inputs).sum().backward()


@rest
@on("devices")
def test_a_sum_beyond_the_range_of_exact_is_told_before_anything_is_saved(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """The device is not waited for, so the step that has it ends first."""
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer, exact=True)
    with trueshard.accumulate(model, last=False):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    for told in (
        lambda: trueshard.save(tmp_path / "saved", model=model, optimizer=optimizer),
        lambda: trueshard.state_hash(model),
        lambda: huge_gradient(model),
    ):
        optimizer.zero_grad()
        with trueshard.accumulate(model, last=False):
            huge_gradient(model)
        huge_gradient(model)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(OverflowError, match=r"gradients of 'weight' .* give it the exponent"):
            told()
    assert not (tmp_path / "saved").exists()


@rest
@pytest.mark.parametrize("few", [1, 128])
@on("devices")
def test_many_ranks_add_up_on_their_devices(rank: int, world_size: int, few: int) -> None:
    """Of few, the hosts do."""
    model = CASES["llama"].build(0).cuda()
    optimizers = muon(model)
    trueshard.shard(model, *optimizers)
    before, distributed.FEW_HOSTS = distributed.FEW_HOSTS, few
    try:
        with counting() as cost:
            assert trueshard.token_mean(model, rank + 1).total == world_size * (world_size + 1) // 2
        assert over_ranks([rank, 1.5], torch.device("cuda", rank)) == [sum(range(world_size)), 1.5 * world_size]
        train("llama", model, optimizers, (rank, world_size))
    finally:
        distributed.FEW_HOSTS = before
    if FOLDER in os.environ and world_size > 1:
        assert cost.waits.total() == (2 if few == 1 else 0)


@rest
@on("devices")
def test_saves_are_staged_in_the_same_pinned_memory(rank: int, world_size: int, tmp_path: Path) -> None:
    model = CASES["llama"].build(0).cuda()
    (optimizer,) = adamw(model)
    trueshard.shard(model, optimizer)
    places = []
    for number in range(2):
        train("llama", model, [optimizer], (rank, world_size))
        saved = trueshard.save(tmp_path / str(number), model=model, optimizer=optimizer, wait=False)
        expected = parameters(model)
        train("llama", model, [optimizer], (rank, world_size))
        saved.wait()
        places.append(saving._staging._pinned.data_ptr())
        assert saving._staging._pinned.is_pinned()
        trueshard.load(tmp_path / str(number), model=model, optimizer=optimizer)
        assert_same(parameters(model), expected)
    assert places[0] == places[1]


@rest
@on("devices")
def test_saves_in_the_background_hold_what_was_there_while_training_goes_on(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """One after the other, each begun while the one before may still be written, at several optimizers."""
    model = CASES["llama"].build(0).cuda()
    optimizers = muon(model)
    trueshard.shard(model, *optimizers)
    named = dict(zip(("muon", "adamw"), optimizers, strict=True))
    hashes = []
    for number in range(6):
        train("llama", model, optimizers, (rank, world_size))
        hashes.append(trueshard.state_hash(model, named))
        saved = trueshard.save(tmp_path / str(number), model=model, optimizer=named, wait=False)
    train("llama", model, optimizers, (rank, world_size))
    saved.wait()
    for number, expected in enumerate(hashes):
        trueshard.load(tmp_path / str(number), model=model, optimizer=named)
        assert trueshard.state_hash(model, named) == expected


@rest
@pytest.mark.parametrize("offload", ["none", "cpu"])
@on("devices")
def test_a_snapshot_is_what_was_on_the_device(rank: int, world_size: int, offload: Any, tmp_path: Path) -> None:
    """Training goes on at once, over the memory that is copied from."""
    os.environ[ROOT] = str(tmp_path)
    model = CASES["llama"].build(0).cuda()
    (optimizer,) = adamw(model, fused=True)
    trueshard.shard(model, optimizer, offload=offload)
    snapshots, expected = trueshard.Snapshots("device"), []
    for step in (1, 2):
        train("llama", model, [optimizer], (rank, world_size))
        snapshots.save(step, model=model, optimizer=optimizer)
        expected = [parameters(model)]
    train("llama", model, [optimizer], (rank, world_size))
    expected.append(parameters(model))
    assert trueshard.Snapshots("device").load(model=model, optimizer=optimizer, after=2) is None
    snapshots.load(model=model, optimizer=optimizer)
    assert snapshots.step == 2
    assert_same(parameters(model), expected[0])
    train("llama", model, [optimizer], (rank, world_size))
    assert_same(parameters(model), expected[1])
    dist.barrier()
    snapshots.close()
    del os.environ[ROOT]


@rest
def test_the_loss_of_a_head_adds_up_in_place() -> None:
    """Products in bfloat16, added to a float32 sum by the kernel itself."""
    found = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        head = nn.Linear(32, 96, bias=False).to(torch.bfloat16)
        hidden = torch.randn(40, 32, dtype=torch.bfloat16)
        targets = torch.arange(40) % 96
        head, hidden = head.to(device), hidden.to(device).requires_grad_()
        loss = summed(head, hidden, targets.to(device))
        loss.backward()
        found.append([each.detach().float().cpu() for each in (loss, hidden.grad, head.weight.grad)])
    assert_same(found[0], found[1], rtol=2e-2, atol=2e-2)


@rest
def test_tokens_are_drawn_by_deterministic_kernels() -> None:
    logs = torch.randn(16, 100, generator=torch.Generator().manual_seed(0))
    numbers = torch.linspace(0, 1 - 2.0**-53, 16, dtype=torch.float64)
    expected = torch.searchsorted(logs.softmax(1).double().cumsum(1), numbers[:, None], right=True)[:, 0]
    with deterministic():
        tokens = drawn(logs.cuda(), numbers).cpu()
    assert torch.equal(tokens, expected.clamp(max=99))
