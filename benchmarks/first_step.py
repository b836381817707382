"""The time to the end of the first step: from a process that has its imports behind it, through building and sharding.

- Every sample has fresh processes, and the ways take turns. The slowest rank counts.
- Building is part of it, since transformers builds and shards in one. It reads the weights from a file, where the
  others initialise them; so there is a second way of TrueShard's that does too, and that one is held against it.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.llama import Shape
from benchmarks.paired import Ratio, few
from benchmarks.peers import OURS, WAYS, ours, reason
from benchmarks.peers.recipe import Recipe
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell

RANKS = 2
SAMPLES = 8
FROM_FILE = "TrueShard, from the file"
ALL = {**WAYS, FROM_FILE: ours.prepare_from_file}
SHAPE = Shape(layers=16, hidden=384, intermediate=1024, heads=6, vocabulary=8192)
SMALL = replace(SHAPE, layers=2, hidden=48, intermediate=128, vocabulary=256)


@dataclass(frozen=True)
class Began:
    """One rank's first step by one way."""

    prepared: float = 0
    """Seconds until the model and its optimizer were sharded."""
    stepped: float = 0
    """Seconds until the first step had ended."""
    failed: str = ""
    """The error instead."""


def run(tell: Tell, quick: bool = False) -> Table:
    """Every way; ``quick``: of a small model."""
    by_way: dict[str, list[Began]] = {way: [] for way in ALL}
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(SMALL if quick else SHAPE, Path(folder) / "model")
        on_ranks(recipe.write, 1)
        for i in range(few(SAMPLES, quick)):
            for way in list(ALL)[:: -1 if i % 2 else 1]:
                by_way[way].append(max(on_ranks(begin, RANKS, way, recipe), key=lambda start: start.stepped))
            tell(", ".join(f"{way} {began[-1].stepped:.2f} s" for way, began in by_way.items() if began[-1].stepped))
    rows, over = [], []
    for peer, began in by_way.items():
        if peer in (OURS, FROM_FILE):
            continue
        if began[0].failed:
            rows.append((peer, began[0].failed, "", "", "", ""))
            over.append(Over("time to the first step", peer, "cannot"))
            continue
        pairs = list(zip(by_way[FROM_FILE if peer == "transformers" else OURS], began, strict=True))
        to_step = Ratio.of(torch.tensor([a.stepped / b.stepped for a, b in pairs]))
        to_shards = Ratio.of(torch.tensor([a.prepared / b.prepared for a, b in pairs]))
        rows.append((peer, *to_step.cells(), *to_shards.cells()[:2]))
        over.append(Over("time to the first step", peer, to_step.short()))
    return Table(
        name="first_step",
        title="Time to the end of the first step, over each peer's",
        note=(
            f"A Llama of {SHAPE.layers} blocks and 33M parameters over {RANKS} gloo processes, AdamW, clipping. From a "
            "process that has its imports behind it: building the model, sharding it, the first step; beside it until "
            "it is sharded. The weights are initialised; transformers reads them from a file, and TrueShard does so "
            f"too where it is held against that. Fresh processes for each of {SAMPLES} samples, ways in turn, the "
            "slowest rank; medians of the ratios, TrueShard over the peer, with their 95% interval by bootstrap and "
            "the 10th to the 90th percentile."
        ),
        columns=("over", "first step ended", "95% interval", "spread", "sharded", "95% interval"),
        rows=tuple(rows),
        numbers=[{"way": way, "samples": [asdict(start) for start in began]} for way, began in by_way.items()],
        over=over,
    )


def begin(way: str, recipe: Recipe) -> Began:
    """One way on this rank, to the end of its first step."""
    dist.barrier()
    began = time.perf_counter()
    try:
        training = ALL[way](recipe)
        prepared = time.perf_counter() - began
        training.step(recipe.shape.batch(dist.get_rank()))
    except Exception as error:
        if way in (OURS, FROM_FILE):
            raise
        return Began(failed=reason(error))
    return Began(prepared, time.perf_counter() - began)
