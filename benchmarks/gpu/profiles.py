"""Waits of the host, launches, and communication that nothing hides, of one step: counted, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Spans = list[tuple[float, float]]
"""(begin, end) in microseconds, in order and apart."""


@dataclass(frozen=True)
class Counts:
    """Of one step."""

    waits: int
    """Calls in which the host waits for the device."""
    launches: int
    """Kernels and copies that the host gave to the device; on a CPU operators."""
    busy: float
    """Seconds in which the device had work."""
    communication: float
    """Seconds in which a kernel of NCCL ran."""
    exposed: float
    """Of these, seconds in which nothing else ran."""


def counted(step: Callable[[], Any], device: str) -> Counts:
    """Run ``step`` once under the profiler, with the work of the device before and after it done."""
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    events: Any = profiled.events()
    names = [event.name for event in events if event.device_type == DeviceType.CPU]
    waits = sum(name.endswith("Synchronize") for name in names) - on_gpu  # the last one is ours
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    launches = len(kernels) if on_gpu else sum(name.startswith("aten::") for name in names)
    spans = {
        is_nccl: joined((e.time_range.start, e.time_range.end) for e in kernels if ("nccl" in e.name) == is_nccl)
        for is_nccl in (True, False)
    }
    sent = _total(spans[True])
    busy = _total(joined([*spans[True], *spans[False]]))
    return Counts(waits, launches, busy * 1e-6, sent * 1e-6, (busy - _total(spans[False])) * 1e-6)


def joined(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return what ``spans`` cover together."""
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def _total(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
