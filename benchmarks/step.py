"""The time of a training step, against the same model sharded by hand.

- Both models live in the same processes and train on the same batches; steps alternate hand, ours, ours, hand, so that
  a drift of the machine falls on both alike. One such four is one sample: the ratio of the two sums.
- The median of the samples is reported, with a 95% interval by bootstrap and the samples' own 10th and 90th percentile.
  One is in the interval where no difference can be told.
- A step is forward, backward, clipping (where said), AdamW and ``zero_grad``. Both losses are compared at every step:
  a faster step that computed something else would be no result.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from benchmarks.llama import Shape, loss_of, shard_by_hand
from benchmarks.processes import on_ranks
from benchmarks.table import Table

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
    Case("0.4M, default", _SMALL, 150),
    Case("0.4M, default, embedding alone in both", _SMALL, 150, embedding_alone=True),
    Case("0.4M, always", _SMALL, 150, policy="always"),
    Case("0.4M, default, clipping", _SMALL, 100, clip=True),
    Case("20M, default", _MIDDLE, 30),
    Case("20M, always", _MIDDLE, 30, policy="always"),
)


def run() -> Table:
    """Every case, over two gloo processes."""
    rows, numbers = [], []
    for case in CASES:
        samples, apart = on_ranks(measure, RANKS, case)[0]
        ratios = torch.tensor(samples, dtype=torch.float64)
        low, high = interval(ratios)
        spread = ratios.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        rows.append(
            (
                case.label,
                f"{spread[1]:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{spread[0]:.3f} to {spread[2]:.3f}",
                str(len(samples)),
                f"{apart:.0e}",
            )
        )
        numbers.append({**asdict(case), "ratios": samples, "interval": [low, high], "largest_loss_difference": apart})
    return Table(
        name="step",
        title="Time of a step, over a hand-written `fully_shard` loop",
        note=(
            f"Llama models over {RANKS} gloo processes, AdamW, float32. By hand: `fully_shard` on each block, then on "
            "the root, with the same `reshard_after_forward`. Below one, TrueShard is faster. The steps of both "
            "alternate in one run; the interval is of the median, by bootstrap; the spread is the 10th to the 90th "
            "percentile of the samples, four steps each. The last column is the largest difference between the two "
            "losses of a step."
        ),
        columns=("parameters, policy", "median ratio", "95% interval", "spread", "samples", "losses apart"),
        rows=tuple(rows),
        numbers=numbers,
    )


def measure(case: Case) -> tuple[list[float], float]:
    """One rank's samples (ours over by hand), and the largest difference between the losses of a step."""
    import trueshard

    by_hand, ours = case.shape.build(), case.shape.build()
    shard_by_hand(by_hand, RANKS, case.policy, embedding_alone=case.embedding_alone)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in (by_hand, ours)]
    trueshard.shard(ours, optimizers[1], reshard_after_forward=case.policy)
    clips: list[Callable[..., torch.Tensor]] = [torch.nn.utils.clip_grad_norm_, trueshard.clip_grad_norm_]
    losses: list[list[float]] = [[], []]

    def step(which: int) -> float:
        model = (by_hand, ours)[which]
        batch = case.shape.batch(RANKS * len(losses[which]) + dist.get_rank())
        dist.barrier()
        began = time.perf_counter()
        loss = loss_of(model, batch)
        loss.backward()
        if case.clip:
            clips[which](model.parameters(), 1.0)
        optimizers[which].step()
        optimizers[which].zero_grad()
        seconds = time.perf_counter() - began
        losses[which].append(loss.item())
        return seconds

    for _ in range(WARM_UP):
        step(0), step(1)
    gc.collect()
    samples = []
    for _ in range(case.fours):
        first, second, third, fourth = step(0), step(1), step(1), step(0)
        samples.append((second + third) / (first + fourth))
    return samples, max(abs(a - b) for a, b in zip(*losses, strict=True))


def interval(samples: torch.Tensor, draws: int = 2000) -> tuple[float, float]:
    """95% interval of the median of ``samples``, float64 ``[n]``, by bootstrap."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, len(samples), (draws, len(samples)), generator=generator)
    medians = samples[chosen].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
