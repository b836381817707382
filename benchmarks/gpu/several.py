"""``python -m benchmarks.gpu.several NAME``: what several devices show; each measure starts its own ranks."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.measures import FUSED, SMALL, WARM_UP, Training, settle, shape_of
from benchmarks.gpu.profiles import counted
from benchmarks.gpu.session import leave
from benchmarks.llama import Shape
from benchmarks.processes import on_ranks

MESSAGES = (1 << 20, 1 << 24, 1 << 28)
"""Bytes that a rank holds of what is gathered."""
AXES: Mapping[str, dict[str, Any]] = {
    "shards": {},
    "two copies": {"replicate": 2},
    "tensor 2": {"tensor": 2},
    "context 2": {"context": 2},
}
"""Label → options of ``shard()``."""
DIES_AT, LIMIT = 3, 120.0
"""Step at which a rank is killed or hangs, and seconds in which the others must have ended."""


def bandwidth(ranks: int, device: str, small: bool) -> None:
    """Bytes a second of collectives, of bus by NCCL's convention, beside what the planner's table says."""
    result: dict[str, Any] = {}
    for size in MESSAGES[: 1 if small else None]:
        result[f"{size >> 20} MiB"] = on_ranks(_bandwidth, ranks, device, size)[0]
        leave(result)


def _bandwidth(device: str, size: int) -> dict[str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank)
    part = torch.ones(size // 4, device=device)
    gathered = torch.empty(ranks * part.numel(), device=device)
    double = torch.ones(ranks * part.numel() // 2, device=device, dtype=torch.float64)
    out = torch.empty(part.numel() // 2, device=device, dtype=torch.float64)
    share = (ranks - 1) / ranks
    ways: dict[str, tuple[Callable[[], Any], float]] = {
        "all-gather": (lambda: dist.all_gather_into_tensor(gathered, part), gathered.nbytes * share),
        "reduce-scatter, float32": (lambda: dist.reduce_scatter_tensor(part, gathered), gathered.nbytes * share),
        "reduce-scatter, float64": (lambda: dist.reduce_scatter_tensor(out, double), double.nbytes * share),
        "all-to-all": (
            lambda: dist.all_to_all_single(torch.empty_like(part), part),
            part.nbytes * share,
        ),
        "all-reduce": (lambda: dist.all_reduce(part), 2 * part.nbytes * share),
    }
    result = {}
    for name, (collective, moved) in ways.items():
        seconds = []
        for _ in range(10):
            settle(device)
            began = time.perf_counter()
            collective()
            settle(device)
            seconds.append(time.perf_counter() - began)
        result[name] = moved / statistics.median(seconds)
    if device == "cuda":
        from trueshard.planner.hardware import hardware_here

        table = hardware_here(torch.device(device, rank))
        result["planner"] = table.link_bandwidth * table.link_efficiency
    return result


def axes(ranks: int, device: str, small: bool) -> None:
    """Tokens a second, peaks, waits, launches and exposed communication of each way to spread a model."""
    result: dict[str, Any] = {}
    shape = shape_of("1B", small) if small or ranks < 8 else shape_of("8B", small)
    for label, words in AXES.items():
        try:
            result[label] = on_ranks(_axis, ranks, shape, device, words)[0]
        except Exception as error:  # a row that says why
            result[label] = {"failed": str(error).strip().splitlines()[-1][:200]}
        leave(result)


def _axis(shape: Shape, device: str, words: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    copies = words.pop("replicate", 0)
    if copies:
        sizes = (copies, dist.get_world_size() // copies)
        words["mesh"] = dist.init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
    training = Training(replace(shape, sequences=1), device, FUSED, **words)
    training.seconds(WARM_UP)
    seconds = statistics.median(training.seconds())
    batch = training.batch()
    counts = counted(lambda: training.step(batch), device)
    apart = dist.get_world_size() // (words.get("tensor", 1) * words.get("context", 1))
    peak = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {"seconds": seconds, "tokens": shape.tokens * apart / seconds, "reserved": peak} | asdict(counts)


def killed(ranks: int, device: str, small: bool) -> None:
    """Seconds until the others have ended after a rank was killed, and what they said."""
    leave(_lost(ranks, device, "kill"))


def hung(ranks: int, device: str, small: bool) -> None:
    """Seconds until the others have ended, or said so, after a rank stopped coming, and what they said."""
    leave(_lost(ranks, device, "hang"))


def _lost(ranks: int, device: str, how: str) -> dict[str, Any]:
    from trueshard.launching import last_lines, run_ranks

    logs = Path(os.environ["RESULT"]).with_suffix(".logs")
    began = time.time()
    command = [sys.executable, "-m", "benchmarks.gpu.several", "lose", how, "--device", device]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    run_ranks(command, ranks, environment=address, logs=logs, limit=LIMIT)
    moments = [float(line.split()[1]) for line in logs_lines(logs) if line.startswith("lost ")]
    return {
        "seconds": time.time() - max(moments, default=began),
        "limit": LIMIT,
        "said": {rank: last_lines(logs, rank)[-600:] for rank in range(ranks)},
    }


def logs_lines(logs: Path) -> list[str]:
    return [line for file in logs.glob("**/*.log") for line in file.read_text(errors="replace").splitlines()]


def lose(how: str, device: str) -> None:
    """Train until the last rank dies or hangs; run on every rank."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    training = Training(SMALL, device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(10_000):
        if rank == ranks - 1 and step == DIES_AT:
            print(f"lost {time.time()}", flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10 * LIMIT)
        training.step()
        settle(device)


MEASURES: Mapping[str, Callable[[int, str, bool], None]] = {
    "bandwidth": bandwidth,
    "axes": axes,
    "killed": killed,
    "hung": hung,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=(*MEASURES, "lose"))
    parser.add_argument("how", nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.name == "lose":
        lose(options.how, options.device)
    else:
        ranks = torch.cuda.device_count() if options.device == "cuda" else 2
        MEASURES[options.name](ranks, options.device, options.small)


if __name__ == "__main__":
    main()
