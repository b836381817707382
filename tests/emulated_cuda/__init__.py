"""An emulated CUDA device for a CPU build of PyTorch: docs/emulated-cuda.md says what it shows, and what it cannot.

    PYTHONPATH=tests python -m emulated_cuda.build      # compiles it for the torch at hand, and prints the folder

    from emulated_cuda import build, environment
    folder = build.build()
    subprocess.run([sys.executable, "train.py"], env=os.environ | environment(folder, devices=2, reports=reports))

A program that is started in this environment has `torch.cuda.is_available()`, so many devices, and NCCL.
"""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = "EMULATED_CUDA"
"""Environment variable: the folder of the compiled libraries. Where it is set, `import torch` brings the device."""
DEVICES = "EMULATED_CUDA_DEVICES"
"""How many; 8 at most"""
REPORTS = "EMULATED_CUDA_REPORTS"
"""A folder into which each process writes what it sees; see `reports.read`"""
WAITS = "EMULATED_CUDA_WAITS"
"""1: reports hold each time that the host waits for the device, too"""
MEMORY = "EMULATED_CUDA_MEMORY"
"""Bytes that each process may have of a device; 79 GiB if it is not set"""


def environment(folder: Path, devices: int, reports: Path | None = None, waits: bool = False) -> dict[str, str]:
    """Return the variables that put a program, and all that it starts, on the emulated device."""
    path = [str(HERE / "site"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {FOLDER: str(folder), DEVICES: str(devices), "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}
    if reports is not None:
        variables[REPORTS] = str(reports)
    return variables | ({WAITS: "1"} if waits else {})
