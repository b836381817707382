"""The time of a training step, of clipping and of the optimizer's step, over those of each peer.

- All ways live in the same processes, train the same model on the same batches, and take turns, as
  ``benchmarks.paired`` says. A peer that fails has its error in its cell.
- Every loss is held against that of the hand-written loop: a step that computed something else is no result, and its
  cell says so.
- Every unit is freed after forward, in all ways that let one say so, since that is the one policy which all know.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.llama import Shape
from benchmarks.paired import Ratio, few, rounds
from benchmarks.peers import OURS, WAYS, reason
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import PIECES, REFERENCE, TOLERANCE, Training
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell

RANKS = 2
WARM_UP = 3
"""Steps of each before the first sample."""

# Nothing to compute, so that a step is the host's own work; and a model in which there is something to compute.
SMALL = Shape(layers=8, hidden=64, intermediate=128, heads=4, vocabulary=256)
MIDDLE = Shape(layers=8, hidden=384, intermediate=1024, heads=6, vocabulary=8192, tokens=64)


@dataclass(frozen=True)
class Case:
    """A model, and how often it is tried."""

    label: str
    recipe: Recipe
    samples: int


def cases(folder: Path) -> tuple[Case, ...]:
    """All of them; their weights go below ``folder``."""
    small, middle = Recipe(SMALL, folder / "small"), Recipe(MIDDLE, folder / "middle")
    return (
        Case("0.4M", small, 80),
        Case("20M", middle, 16),
        Case("20M, LoRA", replace(middle, lora=True), 16),
    )


def run(tell: Tell, quick: bool = False) -> Table:
    """Every case, over two gloo processes; ``quick``: the first."""
    rows: list[tuple[str, ...]] = []
    numbers, over = [], []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder))[: 1 if quick else None]:
            if not case.recipe.folder.exists():
                on_ranks(case.recipe.write, 1)
            ranks = on_ranks(measure, RANKS, case.recipe, few(case.samples, quick))
            for peer in WAYS:
                if peer == OURS:
                    continue
                made = _rows(case, peer, ranks[0])
                rows += [cells for cells, _ in made]
                over += [row for _, row in made]
            numbers.append({"case": case.label, "ranks": [asdict(rank) for rank in ranks]})
            tell(f"{case.label}: " + ", ".join(f"{row[2]} {row[3]}" for row in rows if row[:2] == (case.label, "step")))
    return Table(
        name="peers_step",
        title="Time of a step, over each peer's",
        note=_note(),
        columns=("model", "figure", "over", "wall time", "95% interval", "spread", "processor time", "95% interval"),
        rows=tuple(rows),
        numbers=numbers,
        over=over,
    )


@dataclass(frozen=True)
class Found:
    """One rank's samples."""

    seconds: dict[str, list[list[list[float]]]]
    """way → ``[samples, PIECES, clocks]``, of two steps each."""
    apart: dict[str, float]
    """way → the largest difference of its losses from those by hand, nats."""
    failed: dict[str, str]
    """way → the error that it raised."""


def measure(recipe: Recipe, samples: int) -> Found:
    """Run all ways on this rank."""
    trainings: dict[str, Training] = {}
    failed: dict[str, str] = {}
    for way, prepare in WAYS.items():
        try:
            training = prepare(recipe)
            training.step(recipe.shape.batch(dist.get_rank()))
        except Exception as error:
            if way in (OURS, REFERENCE):
                raise
            failed[way] = reason(error)
        else:
            trainings[way] = training
    losses: dict[str, list[float]] = {way: [] for way in trainings}
    ways = list(trainings)

    def one(which: int) -> torch.Tensor:
        way = ways[which]
        batch = recipe.shape.batch(dist.get_world_size() * (1 + len(losses[way])) + dist.get_rank())
        dist.barrier()
        loss, seconds = trainings[way].step(batch)
        losses[way].append(loss)
        return seconds

    seconds = rounds(one, len(ways), warm_up=WARM_UP, samples=samples)
    return Found(
        {way: seconds[:, i].tolist() for i, way in enumerate(ways)},
        {way: max(abs(a - b) for a, b in zip(losses[way], losses[REFERENCE], strict=True)) for way in ways},
        failed,
    )


def _rows(case: Case, peer: str, measured: Found) -> list[tuple[tuple[str, ...], Over]]:
    """Of one peer, a row for each piece; one alone where there is nothing to compare."""
    short, why = "", ""
    if peer in measured.failed:
        short, why = "cannot", measured.failed[peer]
    elif measured.apart[peer] > TOLERANCE:
        short, why = "trains something else", f"trains something else: losses {measured.apart[peer]:.0e} apart"
    if short:
        return [((case.label, PIECES[0], peer, why, "", "", "", ""), Over(f"{PIECES[0]}, {case.label}", peer, short))]
    ours, theirs = (torch.tensor(measured.seconds[way]) for way in (OURS, peer))
    rows: list[tuple[tuple[str, ...], Over]] = []
    for i, piece in enumerate(PIECES):
        wall, processor = (Ratio.of(ours[:, i, clock] / theirs[:, i, clock]) for clock in (0, 1))
        cells = (case.label, piece, peer, *wall.cells(), *processor.cells()[:2])
        rows.append((cells, Over(f"{piece}, {case.label}", peer, wall.short())))
    return rows


def _note() -> str:
    return (
        f"Llama models over {RANKS} gloo processes, AdamW, float32, gradients clipped to a norm of one; every unit is "
        "freed after forward. By hand: `fully_shard` on each block and the root, torch's optimizer and "
        "`torch.nn.utils.clip_grad_norm_`. Accelerate: `Accelerator.prepare`, told that it is on an accelerator, since "
        "on CPUs its plugin runs DDP. transformers: `from_pretrained` with `DistributedConfig(fsdp_size=…)`, which "
        "keeps the final norm and the head gathered. Lightning Fabric: `ModelParallelStrategy`, whose function shards "
        "as by hand; FSDP1 is its `FSDPStrategy`. LoRA: rank 8 on all linear layers of the blocks. All ways take turns "
        "in one run; medians of the rounds' ratios, TrueShard over the peer, with their 95% interval by bootstrap; the "
        "spread is the 10th to the 90th percentile. Below one, TrueShard takes less. Clipping and the optimizer's step "
        "are clocked inside the step. An error in a cell is the peer's own. A cell says that something else was "
        f"trained where a loss was more than {TOLERANCE:.0e} nats from that by hand."
    )
