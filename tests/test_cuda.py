"""What only a CUDA device shows: memory on two devices, streams, NCCL. On GPUs, or on emulated ones (`make cuda`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import trueshard
from cases import on
from gathering import parameters
from models import CASES, rows
from parity import DEVICE, Pool, Ranks, assert_same
from stepping import accumulate
from trueshard import _torch

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
    "Adafactor": (adafactor, {}),
    "a hook": (adamw, {}, "llama", halve_a_gradient),
    "experts": (adamw, {}, "qwen3_moe"),
    "tensor": (adamw, {"tensor": 2}),
    "tensor and sequence": (adamw, {"tensor": {"ranks": 2, "sequence": True}}),
    "replicas": (adamw, {"mesh": ("replicate", "shard")}),
    "replicas, exact": (adamw, {"mesh": ("replicate", "shard"), "exact": True}),
}
SHORT = {"AdamW, offloaded"}


@pytest.mark.parametrize("feature", [each if each in SHORT else pytest.param(each, marks=rest) for each in TRAINING])
def test_training(devices: Ranks, feature: str) -> None:
    devices.run(trains_alike, *TRAINING[feature], timeout=120.0)


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
