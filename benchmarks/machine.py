"""One line that says where figures were measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe() -> str:
    """Processor, cores that this process may use, Python and torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = platform.python_version()
    return f"{_processor()}, {cores} cores, {platform.system()}, Python {python}, torch {torch.__version__}"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
