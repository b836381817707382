"""Run a program on the emulated device, and gather what all its processes report."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulated_cuda import build, environment, reports


@dataclass(frozen=True)
class Run:
    """A program that has ended."""

    code: int
    output: str
    """with what it wrote to stderr; empty if it was not captured"""
    faults: list[str]
    """of all processes, each once, with how often it was seen"""
    waits: Counter[str]
    """How often the host waited for the device, by what waited and where; empty if that was not asked for"""


def run(
    command: Sequence[str],
    *,
    devices: int,
    processes: int | None = None,
    waits: bool = False,
    capture: bool = True,
    variables: dict[str, str] | None = None,
    **more: Any,
) -> Run:
    """Run a command on so many devices; `processes`: the command is a Python script, run so often by torchrun.

    `variables`: for the environment; `more`: for `subprocess.run`. Compiles the emulator if that has not been done, and
    raises RuntimeError if there is no compiler.
    """
    words = list(command)
    if processes is not None:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *words]
    with tempfile.TemporaryDirectory(prefix="emulated-cuda-") as folder:
        own = environment(build.build(), devices, Path(folder), waits)
        interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if capture else {}
        done = subprocess.run(words, env={**os.environ, **interface, **own, **(variables or {})}, **out, **more)
        seen = reports.read(Path(folder))
        return Run(done.returncode, done.stdout or "", reports.counted_faults(seen), reports.waits(seen))
