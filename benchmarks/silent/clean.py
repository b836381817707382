"""Runs without a bug: models of the tests' catalogue under several ways to train, for false alarms."""

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

from benchmarks.silent.frame import STEPS, record
from benchmarks.silent.trial import Compared
from benchmarks.table import Tell

SAMPLES = 4
WAYS = ("ddp", "ddp, accumulating", "fsdp2", "shard()", "one process, accumulating")
"""Ways to train that are one process's whole batch, up to the order of sums."""


def catalogue() -> dict[str, Any]:
    """Return the cases of the tests: how to make a small model, a batch for it, and its loss."""
    path = str(Path(__file__).parents[2] / "tests")
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


def alarms(tell: Tell, runs: int) -> tuple[int, list[str], list[str]]:
    """Return the number of runs held against one process, the false alarms, and runs that raise an error.

    Args:
        tell: shows progress.
        runs: how many to make at most.
    """
    done, wrong, refused = 0, list[str](), list[str]()
    for number, name in enumerate(list(catalogue())[:runs]):
        way = WAYS[number % len(WAYS)]
        with tempfile.TemporaryDirectory() as folder:
            compare = Compared(functools.partial(train, name), Path(folder))
            found = compare.of(1 if way.startswith("one") else 2, way=way)
        ended = bool(found.differs and not found.where)
        done += not ended
        (refused if ended else wrong).extend([f"{name}, {way}: {found.words}"] * found.differs)
        tell(f"clean: {name}, {way}: {found.words or 'no alarm'}")
    return done, wrong, refused
