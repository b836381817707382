"""Let torch's profiler see the emulated device: labels of the host become its kernels, collectives and waits.

A CPU build has no CUPTI. The times are those that the CPU's kernels took, one after the other on the host: they say
nothing of a device. What is counted, and by what name, is as on CUDA.
"""

from __future__ import annotations

from typing import Any

from torch.autograd import DeviceType
from torch.autograd.profiler import profile

KERNEL = "emulated kernel "
"""Begins the label of a kernel; kernels.cpp, copies.cpp and nccl.cpp write it."""


def adopt() -> None:
    """Replace what asks for CUPTI, and move the kernels' labels onto the device."""
    begin, parse = profile.__init__, profile._parse_kineto_results

    def begin_without_cupti(self: Any, *arguments: Any, use_device: str | None = None, **words: Any) -> None:
        begin(self, *arguments, use_device=None if use_device == "cuda" else use_device, **words)

    def parse_with_kernels(self: Any, *arguments: Any, **words: Any) -> Any:
        events = parse(self, *arguments, **words)
        for event in events:
            if event.name.startswith(KERNEL):
                event.device_type, event.name = DeviceType.CUDA, event.name.removeprefix(KERNEL)
        return events

    profile.__init__, profile._parse_kineto_results = begin_without_cupti, parse_with_kernels  # type: ignore[method-assign]
