"""The price of ``shard(exact=True)``: time and bytes of a step, over the same step without it.

- Both models are sharded alike, live in the same processes and train on the same microbatches. They are timed in
  alternation, as ``benchmarks.paired`` says.
- A step is two microbatches, of which the second reduces, clipping, AdamW and ``zero_grad``.
- Bytes are counted from the collectives, in a step that is not timed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from benchmarks.llama import Shape, loss_of
from benchmarks.paired import Ratio, clocked, few, fours
from benchmarks.processes import on_ranks
from benchmarks.table import Table, Tell
from tests.traffic import Traffic

MICROBATCHES = 2
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """One row."""

    label: str
    shape: Shape
    ranks: int
    fours: int
    """Samples: four steps each."""


_SMALL = Shape(layers=8, hidden=64, intermediate=128, heads=4, vocabulary=256)
_MIDDLE = Shape(layers=8, hidden=384, intermediate=1024, heads=6, vocabulary=8192, tokens=256)
CASES = (
    Case("0.4M, 2 ranks", _SMALL, 2, 60),
    Case("0.4M, 4 ranks", _SMALL, 4, 30),
    Case("20M, 2 ranks", _MIDDLE, 2, 10),
    Case("20M, 4 ranks", _MIDDLE, 4, 5),
)


def run(tell: Tell, quick: bool = False) -> Table:
    """Every case, over gloo processes."""
    rows, numbers = [], []
    for case in CASES[: 1 if quick else None]:
        measured = on_ranks(measure, case.ranks, case, few(case.fours, quick))[0]
        wall, processor = (Ratio.of(torch.tensor(ratios)) for ratios in (measured.wall, measured.processor))
        parts = [f"{measured.exact[kind] / measured.plain[kind]:.2f}" for kind in ("gradients", "all")]
        rows.append((case.label, *wall.cells(), processor.cells()[0], *parts))
        numbers.append(asdict(case) | asdict(measured))
        tell(f"{case.label}: {wall.cells()[0]} of the time, {parts[0]} of the gradients' bytes")
    return Table(
        name="exact",
        title="Price of exact sums, over the same step without them",
        note=(
            "Llama models, float32, AdamW, two microbatches a step, sharded by `shard()` with and without "
            "`exact=True`; two sequences of 16 or of 256 tokens a microbatch. Steps alternate in one run, and four "
            "steps make a sample. Medians of the samples' ratios, with their 95% interval by bootstrap; the spread is "
            "the 10th to the 90th percentile. Processor time is that of one process, which other programs on the "
            "machine disturb less, and so does having more ranks than cores. Bytes are what a rank receives: of "
            "gradients, and of the whole step."
        ),
        columns=(
            "parameters",
            "wall time",
            "95% interval",
            "spread",
            "processor time",
            "bytes of gradients",
            "bytes of a step",
        ),
        rows=tuple(rows),
        numbers=numbers,
    )


@dataclass(frozen=True)
class Found:
    """One rank's samples."""

    wall: list[float]
    """Ratios of wall time, exact over plain, one a sample."""
    processor: list[float]
    plain: dict[str, float]
    """Bytes received in a step: of "gradients", and "all"."""
    exact: dict[str, float]


def measure(case: Case, samples: int) -> Found:
    """Run one case on this rank."""
    import trueshard

    models = [case.shape.build() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    for which in range(2):
        trueshard.shard(models[which], optimizers[which], exact=bool(which))

    def take(which: int) -> None:
        model, optimizer = models[which], optimizers[which]
        for number in range(MICROBATCHES):
            with trueshard.accumulate(model, last=number == MICROBATCHES - 1):
                (loss_of(model, case.shape.batch(MICROBATCHES * dist.get_rank() + number)) / MICROBATCHES).backward()
        trueshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    measured = fours(lambda which: clocked(lambda: take(which)), warm_up=WARM_UP, samples=samples)
    wall, processor = (measured[:, 1] / measured[:, 0]).T.tolist()
    received = []
    for which in range(2):
        with Traffic() as traffic:
            take(which)
        received.append({"gradients": traffic.received["reduce_scatter"], "all": traffic.total})
    return Found(wall, processor, *received)
