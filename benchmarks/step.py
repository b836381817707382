"""The time of a training step, against the same model sharded by hand.

- Both models live in the same processes and train on the same batches. They are timed in alternation, as
  ``benchmarks.paired`` says; beside the interval stand the samples' own 10th and 90th percentile.
- A step is forward, backward, clipping (where said), AdamW and ``zero_grad``. Both losses are compared at every step:
  a faster step that computed something else would be no result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.llama import Shape, loss_of, shard_by_hand
from benchmarks.paired import Ratio, clocked, few, fours
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell

RANKS = 2
WARM_UP = 3
"""Steps of each model before the first sample: the first ones allocate, and make optimizer state."""


@dataclass(frozen=True)
class Case:
    """One row."""

    label: str
    shape: Shape
    fours: int
    """Samples: four steps each."""
    policy: str = "default"
    embedding_alone: bool = False
    """The hand-written version has the embedding as a unit of its own, too."""
    clip: bool = False
    """Each clips gradients in its own way: torch's ``clip_grad_norm_`` by hand, TrueShard's with ``shard()``."""


# Nothing to compute, so that a step is the host's own work; and a model in which there is something to compute.
_SMALL = Shape(layers=8, hidden=64, intermediate=128, heads=4, vocabulary=256)
_MIDDLE = Shape(layers=8, hidden=384, intermediate=1024, heads=6, vocabulary=8192, tokens=64)

CASES = (
    Case("0.4M, default", _SMALL, 400),
    Case("0.4M, always", _SMALL, 200, policy="always"),
    Case("0.4M, always, embedding alone in both", _SMALL, 200, policy="always", embedding_alone=True),
    Case("0.4M, default, clipping", _SMALL, 200, clip=True),
    Case("20M, default", _MIDDLE, 30),
    Case("20M, always", _MIDDLE, 30, policy="always"),
)


def run(tell: Tell, quick: bool = False) -> Table:
    """Every case, over two gloo processes."""
    rows, numbers, over = [], [], []
    for case in CASES[: 1 if quick else None]:
        case = replace(case, fours=few(case.fours, quick))
        measured = on_ranks(measure, RANKS, case)[0]
        cells: list[str] = []
        for ratios in (measured.wall, measured.processor):
            cells += Ratio.of(torch.tensor(ratios)).cells()
        del cells[-1]  # the spread of processor time
        over.append(Over(f"step: {case.label}", "by hand", Ratio.of(torch.tensor(measured.wall)).short()))
        rows.append((case.label, *cells, str(case.fours), f"{measured.losses_apart:.0e}"))
        numbers.append(asdict(case) | asdict(measured))
        tell(f"{case.label}: {cells[0]}")
    return Table(
        name="step",
        title="Time of a step, over a hand-written `fully_shard` loop",
        note=(
            f"Llama models over {RANKS} gloo processes, AdamW, float32. By hand: `fully_shard` on each block, then on "
            "the root, with the same `reshard_after_forward`. Below one, TrueShard is faster. Where the root is freed, "
            "TrueShard gathers the embedding by itself, one more collective and fewer bytes: one row gives the "
            "hand-written version the same units. The steps of both "
            "alternate in one run, and four steps make a sample. Medians of the samples' ratios, with their 95% "
            "interval by bootstrap; the spread is the 10th to the 90th percentile. Processor time is that of one "
            "process, which other programs on the machine disturb less. The last column is the largest difference "
            "between the two losses of a step."
        ),
        columns=(
            "parameters, policy",
            "wall time",
            "95% interval",
            "spread",
            "processor time",
            "95% interval",
            "samples",
            "losses apart",
        ),
        rows=tuple(rows),
        numbers=numbers,
        over=over,
    )


@dataclass(frozen=True)
class Found:
    """One rank's samples."""

    wall: list[float]
    """Ratios of wall time, ours over by hand, one a sample."""
    processor: list[float]
    """Ratios of processor time."""
    losses_apart: float
    """The largest difference between the losses of a step, nats."""


def measure(case: Case) -> Found:
    """Run one case on this rank."""
    import trueshard

    by_hand, ours = case.shape.build(), case.shape.build()
    shard_by_hand(by_hand, RANKS, case.policy, embedding_alone=case.embedding_alone)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in (by_hand, ours)]
    trueshard.shard(ours, optimizers[1], reshard_after_forward=case.policy)
    clips: list[Callable[..., torch.Tensor]] = [torch.nn.utils.clip_grad_norm_, trueshard.clip_grad_norm_]
    losses: list[list[float]] = [[], []]

    def step(which: int) -> torch.Tensor:
        """One step; its seconds by the wall's and the processor's clock."""
        model = (by_hand, ours)[which]
        batch = case.shape.batch(RANKS * len(losses[which]) + dist.get_rank())
        kept: list[torch.Tensor] = []

        def run() -> None:
            loss = loss_of(model, batch)
            loss.backward()
            if case.clip:
                clips[which](model.parameters(), 1.0)
            optimizers[which].step()
            optimizers[which].zero_grad()
            kept.append(loss)

        seconds = clocked(run)
        losses[which].append(kept[0].item())
        return seconds

    samples = fours(step, warm_up=WARM_UP, samples=case.fours)
    wall, processor = (samples[:, 1] / samples[:, 0]).T.tolist()
    return Found(wall, processor, max(abs(a - b) for a, b in zip(*losses, strict=True)))
