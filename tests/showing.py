"""A real trainer on a model of a few weights, and files of runs, for what shows them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trueshard
from trueshard.train.trainer import Callback, Trainer


def trainer(callbacks: Sequence[Callback], steps: int, folder: Path | None = None, **more: Any) -> Trainer:
    """Trains 8 → 16 → 1 on five batches, with a checkpoint of each second step in `folder` if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(5)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if torch.distributed.is_initialized():
        trueshard.shard(model, optimizer)
    if folder is not None:
        more |= {"checkpoints": trueshard.Checkpoints(folder / "checkpoints", keep_last=9), "checkpoint_every": 2}
    return Trainer(model, optimizer, batches, loss=squared, steps=steps, callbacks=callbacks, **more)


def squared(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


class Lost(Callback):
    """Ends the run in a step, as an exception would, when the checkpoints that were begun are complete."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        self.path = path

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if record["step"] < self.step:
            return
        deadline = time.monotonic() + 30
        while not self.path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise InterruptedError


def record(step: int, **more: Any) -> dict[str, Any]:
    """A step as `metrics.jsonl` has it: the loss falls, the rates are even."""
    return {
        "step": step,
        "loss": 2 + 8 * math.exp(-step / 20) + 0.1 * math.sin(step * 2.4),
        "grad_norm": 1 + 0.1 * math.cos(step),
        "lr": 1e-3 / step,
        "tokens": 4096 * step,
        "step_tokens": 4096,
        "seconds": 0.25,
        "data_wait": 0.01,
        "tokens_per_second": 16384.0,
        "memory_allocated": (1 << 30) + step,
        **more,
    }


def write_run(folder: Path, records: Sequence[dict[str, Any]]) -> Path:
    """The folder of a run with these steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder
