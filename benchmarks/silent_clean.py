"""Runs without a bug: models of the tests' catalogue in several ways to train, held against one process.

What is said of such a run is a false alarm. Each model's reference is recorded once, for all ways.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.silent import in_place as of_section
from benchmarks.silent.frame import STEPS, record
from benchmarks.silent.trial import Compared
from benchmarks.table import Table, Tell

SAMPLES = 4
EVERY, MODELS = 15, 6
"""Of the catalogue every so-many-th model, and how many."""
WAYS = ("ddp", "ddp, accumulating", "fsdp2", "shard()", "one process, accumulating")
"""Ways to train that are one process's whole batch, up to the order of sums."""


def catalogue() -> dict[str, Any]:
    """Return the cases of the tests: how to make a small model, a batch for it, and its loss."""
    path = str(Path(__file__).parents[1] / "tests")
    if path not in sys.path:
        sys.path.append(path)
    from models import CASES

    return CASES


def train(name: str, way: str = "") -> None:
    """Train a case in that way on this rank."""
    case, rank, ranks = catalogue()[name], dist.get_rank(), dist.get_world_size()
    model = case.build(0)
    optimizer = AdamW(model.parameters(), lr=1e-3, foreach=False)
    called, apart = model, functools.partial(nullcontext[None])
    if way.startswith("ddp"):
        called = DistributedDataParallel(model, find_unused_parameters=True)
        apart = called.no_sync
    elif way == "fsdp2":
        fully_shard(model)
        optimizer = AdamW(model.parameters(), lr=1e-3, foreach=False)
    elif way == "shard()":
        import trueshard

        trueshard.shard(model, optimizer)
    record(model, optimizer)
    for step in range(STEPS):
        batch = case.batch(SAMPLES, step)
        mine = {key: value.chunk(ranks)[rank] for key, value in batch.items()}
        parts = 2 if "accumulating" in way else 1
        for part in range(parts):
            context: Callable[[], AbstractContextManager[Any]] = nullcontext if part == parts - 1 else apart
            with context():
                loss = case.loss(called, {key: value.chunk(parts)[part] for key, value in mine.items()})
                (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def run(tell: Tell, quick: bool = False) -> Table:
    """Train some models in every way; ``quick``: one."""
    names = list(catalogue())[::EVERY][: 1 if quick else MODELS]
    rows: dict[str, list[str]] = {way: [] for way in WAYS}
    numbers = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            compare = Compared(functools.partial(train, name), Path(folder))
            for way in WAYS:
                found = compare.of(1 if way.startswith("one") else 2, way=way)
                cell = "alarm" if found.where else "raises an error" if found.differs else "no alarm"
                rows[way].append(cell)
                numbers.append({"model": name, "way": way, "cell": cell, "words": found.words})
                tell(f"{name}, {way}: {found.words or cell}")
    cells = [cell for row in rows.values() for cell in row]
    return Table(
        name="silent_clean",
        title="Clean runs, and what is said of them",
        note=(
            f"Models of the tests' catalogue, 3 steps of AdamW on 2 gloo processes or one, held against one process by "
            f"`verify_runs`: {len(cells)} runs, {cells.count('alarm')} false alarms."
        ),
        columns=("trained by", *names),
        rows=tuple((way, *row) for way, row in rows.items()),
        numbers=numbers,
        words=True,
    )


in_place = of_section
