"""A real trainer on a model of a few weights, and files of runs, for what shows them."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from torch import nn

import trueshard
from trueshard.train.callbacks import Callback
from trueshard.train.trainer import Trainer


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
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in records))
    return folder


def rewarded(step: int, **more: Any) -> dict[str, Any]:
    """A step of reinforcement learning: the reward rises from 0.1 to 0.7, the loss is about 0."""
    reward = 0.1 + 0.6 * (1 - math.exp(-step / 30)) + 0.03 * math.sin(step * 2.4)
    evaluated = {"evaluation_reward": reward - 0.02} if step % 10 == 0 else {}
    return record(
        step,
        loss=-0.01 * math.sin(step),
        reward=reward,
        reward_std=0.4 - 0.2 * reward,
        reward_exact=reward / 2,
        samples_equal=step // 20,
        refilled=0,
        entropy=1.2 * math.exp(-step / 60) + 0.02 * math.cos(step * 1.7),
        kl_reference=0.002 * step,
        clipped_low=0.01 + 0.005 * math.cos(step),
        clipped_high=0.03 + 0.01 * math.sin(step),
        mismatch_mean=2e-3 * (1 + 0.2 * math.sin(step)),
        mismatch_max=6e-2 * (1 + 0.4 * math.cos(step * 1.3)),
        length_mean=18 + step / 10 + math.sin(step * 3),
        length_max=40,
        weights_version=step - 1,
        **evaluated,
        **more,
    )


def answer(step: int, prompt: int, sample: int, **more: Any) -> dict[str, Any]:
    """A line of `samples.jsonl`: digits to sort, sorted better in later steps."""
    chance = random.Random(f"{step}/{prompt}/{sample}")
    chosen = random.Random(prompt)
    digits = [chosen.randrange(10) for _ in range(7)]
    right = sorted(digits)
    attempt = [digit if chance.random() < 0.5 + step / 130 else chance.randrange(10) for digit in right]
    pieces = ["<think>", "\n", *(f" {digit}" for digit in digits), "\n", "</think>", "\n"]
    pieces += [piece for digit in attempt for piece in (" ", str(digit))] + ["<|end|>"]
    logprobs = [math.log(min(1.0, chance.betavariate(6, 1) + 1e-9)) for _ in pieces]
    exact, part = float(attempt == right), sum(a == b for a, b in zip(attempt, right, strict=True)) / len(right)
    return {
        "step": step,
        "prompt": prompt,
        "sample": sample,
        "group": 0,
        "text": "".join(pieces[:-1]),
        "prompt_text": f"Sort these digits, and answer with them alone.\n{' '.join(map(str, digits))}",
        "tokens": list(range(100, 100 + len(pieces))),
        "pieces": pieces,
        "own": [not 2 <= i < 4 for i in range(len(pieces))],
        "logprobs": logprobs,
        "trained_logprobs": [logprob + chance.gauss(0, 0.01) - (chance.random() < 0.02) * 0.4 for logprob in logprobs],
        "reward": round(0.5 * exact + 0.5 * part, 4),
        "parts": {"exact": exact, "place": round(part, 4)},
        "advantage": chance.gauss(0, 1),
        "finished": chance.random() < 0.95,
        "weights_version": step - 1,
        "used": True,
        **more,
    }


def answers(steps: int, prompts: int = 4, samples: int = 8) -> list[dict[str, Any]]:
    """The answers of a run; those to prompt 3 are all alike from step 40 on."""
    lines = []
    for step in range(1, steps + 1):
        for prompt in range(prompts):
            alike = prompt == 3 and step >= 40
            lines += [
                answer(step, prompt, sample, **({"reward": 1.0, "advantage": 0.0, "used": False} if alike else {}))
                for sample in range(samples)
            ]
    return lines


def write_samples(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Put answers into the folder of a run."""
    file = folder / "samples.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def data_of(text: str) -> dict[str, Any]:
    """The figures in a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    return json.loads(match[1], parse_constant=pytest.fail)  # type: ignore[no-any-return]


def assert_drawn(picture: Path, pixels: int, *colours: str) -> None:
    """Each colour, such as "#2f5fd0", has more than so many pixels of a picture."""
    levels = (imread(picture)[..., :3] * 255).round().astype(int)
    for colour in colours:
        assert (abs(levels - list(bytes.fromhex(colour[1:]))).max(-1) < 8).sum() > pixels, colour
