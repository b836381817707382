"""The seconds of ``shard()`` beside ``fully_shard``'s own: of an 8B-shaped model, and of many small parameters.

- Llama 3.1 8B is on the meta device: its shapes without its memory. Of many small parameters what counts is what is
  done for each of them, on the host: matrices of 16 × 16, each a module, in blocks that are units.
- One process stands for rank 0 of several. Each time is the first call in a fresh process, as in a user's run; the ways
  take turns. The modules that either needs are imported before.
- By hand: ``fully_shard`` on each block and the root, and FSDP2's own initialisation, which a hand-written loop pays in
  its first forward, and ``shard()`` at once.
- ``shard()`` also takes an optimizer, which the hand-written version does not: its time counts.
- After it come steps of AdamW, as torch chooses it, each behind a forward and a backward. Collectives are not answered,
  so the values mean nothing; the host does what it does in training.
- Times are of the processor, which other programs on the machine do not disturb. Garbage is collected as in a user's
  program: what imports left is looked through with the rest. ``shard()`` pauses it, by hand it runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.llama import Shape, shard_by_hand
from benchmarks.paired import few
from benchmarks.processes import on_simulated_ranks
from benchmarks.table import Table, Tell

RUNS = 5
STEPS = 3
SIDE = 16
"""Rows and columns of a small matrix."""

_8B = Shape(layers=32, hidden=4096, intermediate=14336, heads=32, key_value_heads=8, vocabulary=128256)


@dataclass(frozen=True)
class Case:
    """One row."""

    label: str
    ranks: int
    matrices: int = 0
    """Small matrices; 0: Llama, of which no step is taken."""
    blocks: int = 0
    runs: int = RUNS


CASES = (
    Case("Llama 3.1 8B, 1 rank", 1),
    Case("Llama 3.1 8B, 64 ranks", 64),
    Case("7,680 matrices in 64 blocks, 8 ranks", 8, 7680, 64),
    Case("30,720 matrices in 256 blocks, 8 ranks", 8, 30720, 256, 2),
)


def run(tell: Tell, quick: bool = False) -> Table:
    """Both ways of every case, in turns; ``quick``: few matrices."""
    rows, numbers = [], []
    for case in (CASES[0], Case("8 matrices in 2 blocks, 8 ranks", 8, 8, 2)) if quick else CASES:
        hand, ours = [], []
        for _ in range(few(case.runs, quick)):
            hand.append(on_simulated_ranks(seconds, case.ranks, case, False))
            ours.append(on_simulated_ranks(seconds, case.ranks, case, True))
        rows.append((case.label, *_cells(hand, ours)))
        numbers.append(asdict(case) | {"by_hand": hand, "shard": ours})
        tell(f"{case.label}: {rows[-1][3]} times the seconds by hand")
    return Table(
        name="shard_time",
        title="Seconds of `shard()` beside `fully_shard`",
        note=(
            "Llama 3.1 8B's shapes on the meta device, and matrices of 16 × 16, with AdamW; one process is rank 0 of a "
            f"simulated group. Medians of {RUNS} fresh processes each ({CASES[-1].runs} for the last row), in turns; "
            "in parentheses the least and the largest ratio. Processor time. By hand with FSDP2's own initialisation, "
            "which comes in the first forward there. Comparing values between ranks comes on top, and takes time in "
            "proportion to their bytes. Steps: the optimizer's first and later ones, and these over those by hand, on "
            "DTensors. Garbage is collected as in a user's program; `shard()` pauses that."
        ),
        columns=("model", "fully_shard, s", "shard(), s", "ratio", "first step, s", "later steps, s", "over by hand"),
        rows=tuple(rows),
        numbers=numbers,
    )


def _cells(hand: list[list[float]], ours: list[list[float]]) -> list[str]:
    ratios = [b[0] / a[0] for a, b in zip(hand, ours, strict=True)]
    cells = [f"{statistics.median(times[0] for times in way):.2f}" for way in (hand, ours)]
    cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if len(hand[0]) == 1:
        return [*cells, "", "", ""]
    first = statistics.median(times[1] for times in ours)
    later, by_hand = (statistics.median(s for times in way for s in times[2:]) for way in (ours, hand))
    return [*cells, f"{first:.3f}", f"{later:.3f}", f"{later / by_hand:.3f}"]


class Block(nn.Module):
    """``matrices`` layers, float32 ``[SIDE, SIDE]``."""

    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(matrices)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, SIDE]`` → ``[n, SIDE]``."""
        return nn.functional.rms_norm(self.layers(x), (SIDE,))


def seconds(case: Case, sharded: bool) -> list[float]:
    """Processor time of sharding, by ``shard()`` or by hand; of small matrices, then that of each optimizer step."""
    from trueshard import _torch, shard

    gc.unfreeze()  # what stands around a benchmark froze what imports left, which no training loop does
    model: Any
    if case.matrices:
        model = nn.Sequential(*(Block(case.matrices // case.blocks) for _ in range(case.blocks)))
    else:
        with torch.device("meta"):
            model = _8B.build()
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.process_time()
    if sharded:
        shard(model, optimizer)
    elif case.matrices:
        mesh = init_device_mesh("cpu", (case.ranks,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        _torch.initialise(model)
    else:
        shard_by_hand(model, case.ranks)
    spent = [time.process_time() - began]
    if not sharded:
        optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS if case.matrices else 0):
        model(torch.randn(4, SIDE)).pow(4).mean().backward()
        began = time.process_time()
        optimizer.step()
        spent.append(time.process_time() - began)
        optimizer.zero_grad()
    return spent
