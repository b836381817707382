"""A rehearsal on a CPU, where the profiler tells what was allocated."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trueshard.planner import ledger
from trueshard.planner.hardware import Hardware
from trueshard.planner.simulation import rehearse
from trueshard.planner.simulation.environment import without_garbage_collection
from trueshard.planner.simulation.rehearse import STEPS, Pair
from trueshard.planner.simulation.simulate import simulate
from trueshard.planner.workload import Job

_NAME = "rehearsed steps"


def rehearsed(job: Job, hardware: Hardware) -> tuple[Pair, Pair]:
    """Return peak bytes of tensors, and seconds of a step without communication."""
    made = simulate(dataclasses.replace(job, on_cpu=True))
    allocated, seconds = _measured(dataclasses.replace(job, plan=made.plan))
    live = max(ledger.peak(made.first).bytes, ledger.peak(made.steady).bytes)
    return Pair(live, allocated), Pair(rehearse.seconds_alone(made, hardware), seconds)


def _measured(job: Job) -> tuple[int, float]:
    """Return peak bytes allocated, and median seconds of a step after the first."""
    with rehearse.world(job, "cpu") as mesh:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step = rehearse.ready(job, mesh, torch.device("cpu"))
            with without_garbage_collection(), record_function(_NAME):
                for _ in range(STEPS):
                    step()
        later = []
        for _ in range(STEPS - 1):  # without the profiler, which takes time itself
            start = time.perf_counter()
            step()
            later.append(time.perf_counter() - start)
    return _peak_allocated(profiler), statistics.median(later)


def _peak_allocated(profiler: profile) -> int:
    """Return the highest sum, during the steps, of bytes allocated since the profiler started."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    start = min(event["ts"] for event in events if event.get("name") == _NAME)
    live_addresses: set[int] = set()
    live = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        count, address = event["args"]["Bytes"], event["args"]["Addr"]
        if count > 0:
            live_addresses.add(address)
        elif address not in live_addresses:  # allocated before the profiler started
            continue
        else:
            live_addresses.remove(address)
        live += count
        peak = max(peak, live) if event["ts"] >= start else live
    return peak
