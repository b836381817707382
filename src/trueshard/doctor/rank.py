"""One of the processes that try out whether ranks reach each other; writes what it has done, a line of JSON each.

- A line is written when a task is done, so that of a process that hangs it is known where.
- Ranks meet in a file: what may fail here is the backend's own network, not a port that somebody else has.
- Each result is compared with what it must be.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASKS = ("start", "join", "all-gather", "reduce-scatter", "shard() and a step", "leave")
"""What each rank does, in this order."""
ELEMENTS = {"gloo": 2**20, "nccl": 2**24}
"""Elements of float32 that each rank gives to a collective."""
REPEATS = 5
NEAR = 1e-4
"""How far a sharded step may be from an unsharded one: the order of sums, and no more."""


def main(folder: str, backend: str, rank: str, ranks: str, patience: str) -> None:
    """Do all tasks, and write them to `folder/RANK.jsonl`.

    Args:
        folder: where ranks meet.
        backend: "gloo" or "nccl".
        rank: this one's.
        ranks: how many there are.
        patience: seconds that a collective may take.
    """
    began = time.perf_counter()
    file = Path(folder) / f"{rank}.jsonl"

    def done(task: str, wrong: str = "", **more: Any) -> None:
        nonlocal began
        line = {"task": task, "seconds": time.perf_counter() - began, "wrong": wrong, **more}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        began = time.perf_counter()

    os.environ.update(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=rank)
    try:
        _all(Path(folder), backend, int(rank), int(ranks), float(patience), done)
    except Exception as error:  # whatever it is, it belongs into the report
        done("error", " ".join(f"{type(error).__name__}: {error}".split())[:400])
        sys.stdout.flush()
        os._exit(1)  # another rank may wait in a collective, which would keep this one from leaving


def _all(folder: Path, backend: str, rank: int, ranks: int, patience: float, done: Callable[..., None]) -> None:
    import torch
    import torch.distributed as dist

    import trueshard.api  # noqa: F401 (its time counts as that of the start)

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    done("start")
    store = dist.FileStore(str(folder / "meeting"), ranks)
    limit = datetime.timedelta(seconds=patience)
    # As in training: what rests on the CPU goes by gloo beside NCCL.
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    dist.init_process_group(backends, store=store, rank=rank, world_size=ranks, timeout=limit)
    dist.all_reduce(torch.ones(1, device=device))
    done("join")
    for task, collective in (("all-gather", _all_gather), ("reduce-scatter", _reduce_scatter)):
        seconds, received, right = collective(ELEMENTS[backend], rank, ranks, device)
        done(task, "" if right else "the result is wrong", received=received, each=seconds)
    done("shard() and a step", _step(rank, ranks, device))
    dist.destroy_process_group()
    done("leave")


def _all_gather(elements: int, rank: int, ranks: int, device: Any) -> tuple[float, int, bool]:
    """(Seconds, bytes received, right?) of gathering `elements` of every rank."""
    import torch
    import torch.distributed as dist

    own = torch.arange(elements, dtype=torch.float32, device=device) % 1000 + rank
    whole = torch.zeros(ranks * elements, device=device)
    seconds = _timed(lambda: dist.all_gather_into_tensor(whole, own), device)
    right = all(torch.equal(part - other, own - rank) for other, part in enumerate(whole.chunk(ranks)))
    return seconds, (ranks - 1) * own.nbytes, right


def _reduce_scatter(elements: int, rank: int, ranks: int, device: Any) -> tuple[float, int, bool]:
    """(Seconds, bytes received, right?) of summing `ranks * elements` over ranks, of which each keeps its part."""
    import torch
    import torch.distributed as dist

    part = torch.arange(elements, dtype=torch.float32, device=device) % 1000
    whole = torch.cat([part + other + rank for other in range(ranks)])
    own = torch.zeros(elements, device=device)
    seconds = _timed(lambda: dist.reduce_scatter_tensor(own, whole), device)
    right = torch.equal(own, ranks * (part + rank) + sum(range(ranks)))
    return seconds, (ranks - 1) * own.nbytes, right


def _timed(function: Callable[[], Any], device: Any) -> float:
    """The median of a few runs, after one that is not counted."""
    import torch

    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _step(rank: int, ranks: int, device: Any) -> str:
    """What is wrong with a sharded step, beside one process's on the batch of all ranks; empty if nothing."""
    import torch
    from torch import nn

    import trueshard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)).to(device)
    whole, batch = copy.deepcopy(model), torch.randn(4 * ranks, 24, device=device)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    trueshard.shard(model, optimizers[0], units=["0", "2"])
    own = batch[4 * rank : 4 * (rank + 1)]
    for each, optimizer, samples in ((model, optimizers[0], own), (whole, optimizers[1], batch)):
        each(samples).square().mean().backward()
        optimizer.step()
    sharded: list[Any] = list(model.parameters())
    pairs = zip(sharded, whole.parameters(), strict=True)
    difference = max((one.full_tensor() - two).abs().max().item() for one, two in pairs)
    return "" if difference <= NEAR else f"parameters are off by {difference:.2g} after the step"
