"""Tokens a second and memory of Llama shapes on one GPU, eager and compiled, beside a hand-written loop: absolute.

- The plain loop has no FSDP: it computes under autocast in bfloat16 with float32 weights, as many do on one GPU.
  ``fully_shard`` by hand and ``shard()`` are what they are on a group of one: float32 weights, bfloat16 computing.
- Each way is a process of its own: what another reserved is not its memory. Time is taken between two points at which
  the device has nothing left to do.
- ``measure(device="cpu", …)`` runs the same lines, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.llama import Shape, blocks_of, loss_of, shard_by_hand
from benchmarks.peers import OURS, reason
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell

WARM_UP, STEPS = 5, 20
SHAPES = {
    "1B": Shape(16, 2048, 8192, 32, 128256, key_value_heads=8, sequences=4, tokens=2048),
    "8B": Shape(32, 4096, 14336, 32, 128256, key_value_heads=8, sequences=1, tokens=2048),
}
"""As Llama 3.2 1B and Llama 3.1 8B, with untied embeddings."""
LOOP, BY_HAND = "plain loop", "by hand"
WAYS = (LOOP, BY_HAND, OURS)


@dataclass(frozen=True)
class Case:
    """One row."""

    way: str
    shape: Shape
    compile: bool = False
    device: str = "cuda"


@dataclass(frozen=True)
class Found:
    """What one process measured."""

    tokens: float = 0
    """Tokens a second."""
    seconds: float = 0
    """Of a step, the mean of all."""
    allocated: int = 0
    """``max_memory_allocated()``, bytes; 0 on a CPU."""
    reserved: int = 0
    """``max_memory_reserved()``, bytes."""
    loss: float = 0
    """Of the last step, nats: the same for all ways."""
    failed: str = ""
    """The error instead, such as of memory that is not there."""


def run(tell: Tell, quick: bool = False) -> Table:
    """Every shape and way, eager and compiled, on one GPU."""
    rows, numbers, over = [], [], []
    for label, shape in list(SHAPES.items())[: 1 if quick else None]:
        for compile in (False, True):
            by_way = {}
            for way in WAYS:
                case = Case(way, shape, compile)
                (by_way[way],) = on_ranks(measure, 1, case, 1 if quick else WARM_UP, 2 if quick else STEPS)
                rows.append((f"{label}, {'compiled' if compile else 'eager'}", way, *_cells(by_way[way])))
                numbers.append(asdict(case) | asdict(by_way[way]))
                tell(f"{rows[-1][0]}, {way}: {rows[-1][2]}")
            over += _over(rows[-1][0], by_way)
    return Table(
        name="cuda",
        title="Llama shapes on one GPU",
        note=(
            f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'No GPU'}. Llama 3.2 1B's and Llama 3.1 "
            "8B's shapes with untied embeddings, float32 weights, computing in bfloat16, fused AdamW, clipping. The "
            "plain loop has no FSDP and computes under autocast; by hand is `fully_shard` on a group of one. Means of "
            f"{STEPS} steps after {WARM_UP}; memory is torch's own `max_memory_allocated()` and "
            "`max_memory_reserved()`. Each way has a process of its own. An error in a cell is torch's own."
        ),
        columns=("model", "way", "tokens/s", "step, s", "allocated, GiB", "reserved, GiB", "loss"),
        rows=tuple(rows),
        numbers=numbers,
        over=over,
    )


def _cells(measured: Found) -> tuple[str, ...]:
    if measured.failed:
        return (measured.failed, "", "", "", "")
    memory = (f"{size / 2**30:.2f}" for size in (measured.allocated, measured.reserved))
    return (f"{measured.tokens:,.0f}", f"{measured.seconds:.4f}", *memory, f"{measured.loss:.4f}")


def _over(label: str, by_way: dict[str, Found]) -> list[Over]:
    ours = by_way[OURS]
    pairs = [(peer, by_way[peer]) for peer in (LOOP, BY_HAND) if not (ours.failed or by_way[peer].failed)]
    return [Over(f"step, {label}", peer, f"{ours.seconds / measured.seconds:.3f}") for peer, measured in pairs]


def measure(case: Case, warm_up: int, steps: int) -> Found:
    """One way on this process, which is rank 0 of one."""
    if case.device == "cuda":
        torch.cuda.set_device(0)
    try:
        return _measured(case, warm_up, steps)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return Found(failed=reason(error))


def _measured(case: Case, warm_up: int, steps: int) -> Found:
    with torch.device(case.device):
        model = case.shape.build()
    model, optimizer, clip, inside = _prepared(case, model)
    batches = [case.shape.batch(seed).to(case.device) for seed in range(warm_up + steps)]
    losses = []

    def step(batch: torch.Tensor) -> None:
        with inside():
            loss = loss_of(model, batch)
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for batch in batches[:warm_up]:
        step(batch)
    _settle(case.device)
    began = time.perf_counter()
    for batch in batches[warm_up:]:
        step(batch)
    _settle(case.device)
    seconds = (time.perf_counter() - began) / steps
    on_gpu = case.device == "cuda"
    return Found(
        tokens=case.shape.sequences * case.shape.tokens / seconds,
        seconds=seconds,
        allocated=torch.cuda.max_memory_allocated() if on_gpu else 0,
        reserved=torch.cuda.max_memory_reserved() if on_gpu else 0,
        loss=losses[-1].item(),
    )


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


Ready = tuple[nn.Module, torch.optim.Optimizer, Callable[..., object], Callable[[], Any]]


def _prepared(case: Case, model: Any) -> Ready:
    """Model, optimizer, what clips, and what forward runs inside."""
    import trueshard

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    if case.way == OURS:
        made, mesh = optimizer(), init_device_mesh(case.device, (1,))
        trueshard.shard(model, made, mesh=mesh, mixed_precision="bf16", compile=case.compile)
        return model, made, trueshard.clip_grad_norm_, nullcontext
    if case.compile:
        for block in blocks_of(model):
            block.compile()
    clip = torch.nn.utils.clip_grad_norm_
    if case.way == BY_HAND:
        shard_by_hand(model, 1, bf16=True, mesh=init_device_mesh(case.device, (1,)))
        return model, optimizer(), clip, nullcontext
    return model, optimizer(), clip, lambda: torch.autocast(case.device, torch.bfloat16)
