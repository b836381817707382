"""Prints what a snapshot at each step costs two ranks of 20 million parameters, beside a plain copy of as many bytes.

    torchrun --nproc-per-node 2 tests/snapshot_seconds.py

For docs/how-to/lost-processes.md. Steps with snapshots and without take turns; what is said is rank 0's.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import trueshard
from trueshard.checkpoint.snapshot_parts import checksum_of, folder_of, parts_in

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.llama import loss_of
from benchmarks.peers.lost import SHAPE

TURNS, STEPS, COPIES = 5, 6, 9
SHARE = 0.03
"""What a snapshot may add to a step."""


def copies(nbytes: int) -> tuple[float, float]:
    """Seconds of a plain copy to /dev/shm, and of a pass for the checksum; all ranks at once."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        target = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)

    def seconds(function: Callable[[], object]) -> float:
        taken = []
        for _ in range(COPIES):
            dist.barrier()
            began = time.perf_counter()
            function()
            taken.append(time.perf_counter() - began)
        return median(taken)

    return (
        seconds(lambda: target.copy_(source)),
        seconds(lambda: checksum_of(target)),
    )


def main() -> None:
    """Train, with snapshots and without; then copy."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run, step = tempfile.mkdtemp() if dist.get_rank() == 0 else "", 0
    everyone = [run]
    dist.broadcast_object_list(everyone)
    model = SHAPE.build()
    optimizer = torch.optim.AdamW(model.parameters())
    trueshard.shard(model, optimizer)
    snapshots, rank = trueshard.Snapshots(everyone[0]), dist.get_rank()
    steps: dict[bool, list[float]] = {True: [], False: []}
    processors: dict[bool, list[float]] = {True: [], False: []}
    still: list[float] = []

    def train(keep: bool) -> None:
        nonlocal step
        before = time.process_time()
        for _ in range(STEPS):
            step, began = step + 1, time.perf_counter()
            loss_of(model, SHAPE.batch(2 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if keep:
                snapshots.wait()
                saving = time.perf_counter()
                snapshots.save(step, model=model, optimizer=optimizer)
                still.append(time.perf_counter() - saving)
            steps[keep].append(time.perf_counter() - began)
        snapshots.wait()
        processors[keep].append((time.process_time() - before) / STEPS)

    for turn in range(TURNS + 1):
        if turn == 1:  # the first is not counted
            for values in (*steps.values(), *processors.values(), still):
                values.clear()
        for keep in (False, True) if turn % 2 else (True, False):
            dist.barrier()
            train(keep)
    nbytes = next(part.size for part in parts_in(folder_of(everyone[0])) if part.rank == rank)
    plain, checksum = copies(nbytes)
    both = plain + checksum
    without, kept = median(steps[False]), median(steps[True])
    processor = median(processors[True]) - median(processors[False])
    snapshots.close()
    if rank == 0:
        print(
            f"A rank keeps {nbytes / 1e6:.0f} MB. A step takes {without:.3f} s, {kept:.3f} s with a snapshot "
            f"({kept / without - 1:+.1%}): it stands still for {median(still) * 1e3:.0f} ms, and a snapshot takes "
            f"{processor * 1e3:.0f} ms of a processor.\n"
            f"As many bytes copied plainly to /dev/shm, by both ranks at once: {plain * 1e3:.0f} ms, "
            f"{nbytes / plain / 1e9:.1f} GB/s, {plain / without:.1%} of a step. A pass for the checksum: "
            f"{checksum * 1e3:.0f} ms.\n"
            f"{SHARE:.0%} of a step are {SHARE * without * 1e3:.0f} ms: at each step from {both / SHARE:.1f} s a step "
            f"on; here with memory_every = {math.ceil(both / without / SHARE)}."
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
