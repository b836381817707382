"""A step of TRL's ``SFTTrainer`` with TrueShard, over those with DDP and with Accelerate's FSDP2: time and memory.

- Every turn is a training of its own in fresh processes, since Accelerate's state is one for a process; the ways take
  turns, forwards and backwards. A turn's figure is the median of its steps, without the first ones; the slowest rank
  counts.
- The peak is the highest in the last of a few steps, of what the allocator gave out from before the model was built.
- Losses are held against those under DDP.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.paired import Ratio, few
from benchmarks.peers import OURS, reason
from benchmarks.peers.fine_tuning import DDP, WAYS, train
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.trainers import MARK
from benchmarks.peers.training import TOLERANCE
from benchmarks.peers_step import MIDDLE
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell
from tests.meter import gloo_lets_go, meter

RANKS = 2
TURNS = 5
STEPS = 14
"""Of a turn."""
WARM_UP = 4
"""Of these, the first ones, which do not count."""
METERED = 3
"""Steps of a training of which the last's memory is counted: the first makes the optimizer's state."""
CLOCKS = ("step, s", "processor time of a step, s")


@dataclass
class Found:
    """What one way took."""

    turns: list[list[float]]
    """Median seconds of a step of each turn, by ``CLOCKS``."""
    peak: int = 0
    """Bytes of a rank."""
    losses: tuple[list[float], ...] = ()
    """Of each rank, of one turn."""
    failed: str = ""


def run(tell: Tell, quick: bool = False) -> Table:
    """All ways, with all parameters trained and with adapters alone; ``quick``: one short turn of the first."""
    rows: list[tuple[str, ...]] = []
    numbers: list[dict[str, Any]] = []
    over: list[Over] = []
    for label, lora in (("20M", False), ("20M, LoRA", True))[: 1 if quick else None]:
        recipe = Recipe(MIDDLE, Path(), lora=lora)
        by_way = {way: Found([]) for way in WAYS}
        for turn in range(few(TURNS, quick)):
            for way in WAYS[:: -1 if turn % 2 else 1]:
                _take_turn(by_way[way], way, recipe, WARM_UP + 2 if quick else STEPS)
            tell(f"{label}: " + ", ".join(f"{way} {_told(measured)}" for way, measured in by_way.items()))
        for way, measured in by_way.items():
            if not measured.failed:
                measured.peak = max(on_ranks(peak, RANKS, way, recipe))
        for way in WAYS:
            if way != OURS:
                made = _rows(label, way, by_way)
                rows += [cells for cells, _ in made]
                over += [one for _, one in made]
        numbers.append({"case": label, **{way: vars(measured) for way, measured in by_way.items()}})
    return Table(
        name="sft_step",
        title="A step of TRL's `SFTTrainer`, over DDP and Accelerate's FSDP2",
        note=_note(),
        columns=("model", "figure", "TrueShard", "over", "its figure", "ratio", "95% interval"),
        rows=tuple(rows),
        numbers=numbers,
        over=over,
    )


def peak(way: str, recipe: Recipe) -> int:
    """Return the bytes that tensors of this rank hold at the peak of the last of a few steps."""
    gc.collect()

    def whole() -> Iterator[Any]:
        yield lambda: train(way, recipe, METERED)

    # Without oneDNN: how much it takes beside its results depends on the processor.
    with gloo_lets_go(), torch.backends.mkldnn.flags(enabled=False):
        (changes,) = meter(whole()).steps
    live = itertools.accumulate(change.bytes for change in changes)
    return max(held for held, change in zip(live, changes, strict=True) if MARK in change.inside)


def _take_turn(measured: Found, way: str, recipe: Recipe, steps: int) -> None:
    if measured.failed:
        return
    try:
        ranks = on_ranks(train, RANKS, way, recipe, steps)
    except Exception as error:
        if way in (OURS, DDP):
            raise
        measured.failed = reason(error)
        return
    assert {rank.sharded for rank in ranks} == {way != DDP}
    medians = torch.tensor([rank.steps[WARM_UP:] for rank in ranks], dtype=torch.float64).quantile(0.5, dim=1)
    measured.turns.append(medians.amax(0).tolist())
    measured.losses = tuple(rank.losses for rank in ranks)


def _told(measured: Found) -> str:
    return measured.failed or f"{measured.turns[-1][0]:.3f} s"


def _rows(label: str, way: str, by_way: dict[str, Found]) -> list[tuple[tuple[str, ...], Over]]:
    """Return rows of one peer, each with its cell of the summary; one row alone where there is nothing to compare."""
    ours, its = by_way[OURS], by_way[way]
    apart = (torch.tensor(its.losses) - torch.tensor(ours.losses)).abs().max().item() if its.losses else 0.0
    if its.failed or apart > TOLERANCE:
        why = its.failed or f"trains something else: losses {apart:.0e} apart"
        over = Over(f"step of SFT, {label}", way, "cannot" if its.failed else "trains something else")
        return [((label, "step, s", "", way, why, "", ""), over)]
    rows: list[tuple[tuple[str, ...], Over]] = []
    mine, theirs = (torch.tensor(measured.turns, dtype=torch.float64) for measured in (ours, its))
    for i, figure in enumerate(CLOCKS):
        ratio = Ratio.of(mine[:, i] / theirs[:, i])
        medians = [f"{measured[:, i].quantile(0.5).item():.3f}" for measured in (mine, theirs)]
        cells = (label, figure, medians[0], way, medians[1], *ratio.cells()[:2])
        rows.append((cells, Over(f"{figure.removesuffix(', s')} of SFT, {label}", way, ratio.short())))
    peaks = [f"{measured.peak / 2**20:.1f}" for measured in (ours, its)]
    ratio_of_peaks = f"{ours.peak / its.peak:.3f}"
    cells = (label, "MiB at the peak", peaks[0], way, peaks[1], ratio_of_peaks, "")
    return [*rows, (cells, Over(f"memory of SFT, {label}", way, ratio_of_peaks))]


def in_place(table: Table) -> str:
    """Return the part of docs/how-to/stay-in-trl.md that lies between the marks of this benchmark."""
    _, _, rest = table.markdown().partition("\n\n")
    return f"On {machine.describe()}:\n\n{rest}"


def _note() -> str:
    return (
        f"A Llama of 20M parameters, {MIDDLE.sequences} × {MIDDLE.tokens} tokens a rank, over {RANKS} gloo processes "
        "of one thread, by TRL's `SFTTrainer` without gradient checkpointing, bf16, logging or saving, and otherwise "
        "with its own settings: AdamW, gradients clipped to a norm of one. TrueShard: `ShardedTrainer` before it; "
        "every unit is freed after forward, as Accelerate's FSDP2 does by default. DDP does not look for unused "
        "parameters. On CPUs Accelerate quietly runs DDP where FSDP2 is asked for, so it is told that it is on an "
        "accelerator. LoRA: rank 8 on all linear layers of the blocks. Ratios are of TrueShard over the other, below "
        f"one it takes less: medians over {TURNS} turns of {STEPS} steps, of which {STEPS - WARM_UP} count. Memory is "
        "what tensors hold at the peak of a later step, by the allocator's own events, gloo's buffers left out. A cell "
        f"says that something else was trained where a loss was more than {TOLERANCE:.0e} nats from TrueShard's."
    )
