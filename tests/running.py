"""Runs of `trueshard train` for tests, as a user starts them: real processes, a real text, a tiny model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import forks

LIMIT = 120
"""Seconds that a run may take."""
CONFIG = """
[run]
dir = "run"
[model]
architecture = "llama"
[model.fields]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[tokenizer]
vocab_size = 400
[data]
path = "text"
[train]
steps = 40
seed = 11
sequence_length = 32
batch_size = 8
checkpoint_every = 20
[optimizer]
lr = 1e-2
[schedule]
decay = "constant"
[sample]
tokens = 0
"""
TORCHRUN = ("-m", "torch.distributed.run")


def environment(**more: str) -> dict[str, str]:
    """That of a fresh terminal: no launcher's variables, one thread a process."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in launcher and not key.startswith(("SLURM", "TORCHELASTIC", "PET_"))
    }
    return kept | {"OMP_NUM_THREADS": "1"} | more


def project(folder: Path) -> Path:
    """A folder with a text of some ten kilobytes and the tiny configuration."""
    folder.mkdir(parents=True)
    text = Path(sysconfig.get_path("stdlib")) / "json"
    shutil.copytree(text, folder / "text", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "train.toml").write_text(CONFIG)
    return folder


def start(
    folder: Path,
    *options: str,
    python: tuple[str, ...] = ("-m", "trueshard"),
    prefix: tuple[str, ...] = (),
    **variables: str,
) -> subprocess.Popen[str]:
    """Start `trueshard train` in `folder`, in a session of its own, as a terminal would; no fork with a `prefix`."""
    return forks.Popen(
        [*prefix, sys.executable, *python, "train", "train.toml", *options],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], limit: float = LIMIT) -> tuple[int, str, str]:
    """Wait for the end of a run: its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for each in [*processes_below(process.pid), psutil.Process(process.pid)]:
            each.kill()
        raise
    return process.returncode, out, err


def run(folder: Path, *options: str, **more: Any) -> str:
    """Run to a good end; returns stdout."""
    code, out, err = end(start(folder, *options, **more))
    assert code == 0, out + err
    return out


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of the run, the last line left out if it is not complete."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every record."""
    return [(record["step"], record["loss"], record["grad_norm"]) for record in metrics(folder)]


def processes_below(pid: int) -> list[psutil.Process]:
    """All that a process has started, and what those have."""
    return psutil.Process(pid).children(recursive=True)


def workers_of(pid: int) -> list[psutil.Process]:
    """The ranks that a launcher has started, in their order."""
    return sorted(psutil.Process(pid).children(), key=lambda each: each.pid)


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait until something is so, while a run goes on."""
    deadline = time.monotonic() + LIMIT
    while not reached():
        assert process.poll() is None, end(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_steps(folder: Path, process: subprocess.Popen[str], steps: int) -> None:
    """Wait until a run has taken so many steps."""
    wait_until(process, lambda: len(metrics(folder)) >= steps)


def kill(process: psutil.Process) -> None:
    """`kill -9`."""
    process.send_signal(signal.SIGKILL)
