"""The first module at which a sharded run leaves the reference is named, forward and backward."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import forks
from messages import lacking
from trueshard.verification.compare import Comparison, TensorStore, Tolerances
from trueshard.verification.modules import Apart, Measure, Recorder, locate

MODEL = """
import torch, torch.distributed as dist
from torch import nn

def is_odd():
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1

class Longer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1.1 if is_odd() else 1)

class Down(nn.Linear):
    fault, calls = "", 0
    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        if self.fault == "forward" and is_odd():
            y = y * 1.01
        if self.fault == "late" and is_odd() and self.calls > 1:
            y = y + 0.01
        return Longer.apply(y) if self.fault == "backward" else y

class Block(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(16), nn.Linear(16, 32), Down(32, 16), nn.Dropout(0.2)
        self.down.fault = self.fault = fault
    def forward(self, x):
        h = self.up(self.norm(x))
        if self.fault == "between" and is_odd():
            h = h * 1.02
        return x + self.drop(self.down(torch.nn.functional.gelu(h)))

def made(fault):
    model = nn.Sequential(nn.Embedding(50, 16), Block(), Block(fault), Block(), nn.Linear(16, 50))
    if fault == "hook":
        sharded = dist.is_initialized() and dist.get_world_size() > 1
        model[2].up.weight.register_hook(lambda gradient: gradient * 2 if sharded else gradient)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    def loss(model, batch):
        value = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        return value * 1.5 if fault == "loss" and is_odd() else value
    return model, optimizer, torch.randint(0, 50, (9, 6)), loss
"""
FAULTS = {
    "forward": ("2.down", "forward", 1, ("its input agrees", "0.01 of the scale", "float64")),
    "late": ("2.down", "forward", 2, ("its input agrees",)),
    "backward": ("2.down", "backward", 1, ("its output's gradient agrees", "0.1 of the scale")),
    "between": ("2", "forward", 1, ("the input of 2.down", "the code of the module itself")),
    "hook": ("2.up", "gradient", 1, ("'2.up.weight'", "2 times what it should be")),
    "loss": ("", "loss", 1, ("outside of the model", "0.5 of the scale")),
}


@pytest.mark.rest
@pytest.mark.parametrize(("fault", "options"), [*((fault, ()) for fault in FAULTS), ("forward", ("--exact",))])
def test_the_first_module_that_differs_is_named_with_pass_step_and_rank(
    tmp_path: Path, fault: str, options: tuple[str, ...]
) -> None:
    file, page = tmp_path / "model.py", tmp_path / "page.html"
    file.write_text(MODEL + f"\n\ndef broken():\n    return made({fault!r})\n")
    command = [sys.executable, "-m", "trueshard", "verify", f"{file}:broken", "--nproc", "3", "--steps", "2", "--json"]
    result = forks.run([*command, "--html", str(page), *options], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, result.stdout + result.stderr
    first = json.loads(result.stdout)["first"]
    module, where, step, words = FAULTS[fault]
    assert (first["module"], first["where"], first["step"]) == (module, where, step)
    assert first["rank"] == (None if fault == "hook" else 1)
    assert lacking(first["words"], *(words[:1] if options else words)) == []
    assert lacking(page.read_text(), "First: ", f"step {step}") == []


class Half(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.inner(x) * self.factor}


def seen(model: nn.Module, sink: object, scale: float = 1.0) -> None:
    with Recorder(model, sink).watching() as recorder:  # type: ignore[arg-type]
        for microbatch in range(2):
            recorder.begin(0, microbatch)
            x = torch.ones(2, 4, requires_grad=True) + microbatch
            loss = sum((model[1](part)["y"] + part).square().sum() for part in model[0](x).split(1))  # type: ignore
            recorder.end_forward(loss)
            (loss * scale).backward()


def test_a_module_that_is_called_twice_and_a_scaled_loss_are_told_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), Half(0.5)])
    store = TensorStore(tmp_path)
    seen(model, lambda at, tensor: store.write(at.side, 1, at.key, tensor))
    assert len(store.names("output", 1)) == 2 * (1 + 2 * 2)  # microbatches × (once, and twice two modules)
    assert len(store.names("input gradient", 1)) == len(store.names("output gradient", 1)) == 10

    same = Measure(store, 1, Tolerances({}, 1e-5, {}))
    seen(model, same, scale=7.0)
    assert max(same.noise.values()) < 1e-6  # gradients are those of the loss, whatever it is scaled by
    assert same.passed
    assert Apart.of(same.passed) == []
    assert locate([[]], [gradient("0.weight", 1e-7, 1.0)], 1, "") is None

    model[1].factor = 0.6
    other = Measure(store, 1, Tolerances({}, 1e-5, {}))
    seen(model, other)
    result = locate([[], Apart.of(other.passed)], (), 1, "")
    assert result is not None
    assert (result.module, result.where, result.rank) == ("1", "forward", 1)  # its inner layer agrees
    assert result.words.startswith("0.2 of the scale; its input agrees")
    assert Apart.of(other.passed)[0].comparison.relative == pytest.approx(0.2, rel=1e-4)

    summed = locate([[], []], [gradient("0.weight", 0.5, 0.5), gradient("1.inner.bias", 0.1, 0.9)], 3, "")
    assert summed is not None
    assert (summed.module, summed.where, summed.step) == ("0", "gradient", 3)
    assert "0.5 times what it should be" in summed.words
    assert "is 0.5 of the scale apart" in summed.words


def gradient(name: str, relative: float, factor: float) -> Comparison:
    return Comparison("gradients", 1, name, relative, relative, 1e-5, factor=factor)
