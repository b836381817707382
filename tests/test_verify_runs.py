"""Two runs of any program are compared, and the first place at which they part is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import forks
from messages import lacking
from trueshard.verification import recording, verify_runs

SCRIPT = """
import argparse, os
import torch, torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
for name, default in (("--batch", 2), ("--stack", "ddp"), ("--fault", ""), ("--steps", 4)):
    parser.add_argument(name, type=type(default), default=default)
options = parser.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
fault = options.fault if world > 1 else ""

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        return x + (y * 1.01 if fault == "module" and rank == 1 else y)

torch.manual_seed(rank if fault == "seed" else 0)
model = nn.Sequential(nn.Embedding(50, 16), Block(), Block(), nn.Linear(16, 50))
torch.manual_seed(0)
data = torch.randint(0, 50, (64, 6))
rows = [torch.arange(step * options.batch * world, (step + 1) * options.batch * world) for step in range(options.steps)]
rows = [data[step[rank::world]] for step in rows]  # as a DistributedSampler deals them out
frozen = fault == "frozen"
if frozen:
    model[1].up.weight.requires_grad_(False)
loss_of = lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
limit = 0.1 if fault == "clip" else 1.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
LOOP = """
def train(model, optimizer, backward=lambda loss: loss.backward(), clip=torch.nn.utils.clip_grad_norm_):
    for batch in rows:
        loss = loss_of(model, batch) * (1 / world if fault == "mean" else 1)
        backward(loss)
        clip(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
"""
STACKS = {
    "ddp": """
if world > 1:
    dist.init_process_group("gloo")
    if fault not in ("sync", "seed"):
        model = nn.parallel.DistributedDataParallel(model)
train(model, optimizer)
""",
    "fsdp": """
from torch.distributed.fsdp import fully_shard
if world > 1:
    dist.init_process_group("gloo")
    for block in (model[1], model[2], model):
        fully_shard(block)
train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
""",
    "trueshard": """
import trueshard
if world > 1:
    trueshard.shard(model, optimizer, units="Block")
train(model, optimizer)
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
train(model, optimizer, accelerator.backward, accelerator.clip_grad_norm_)
""",
    "lightning": """
import pytorch_lightning as lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, index):
        return loss_of(self.model, batch[0])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)
dataset = torch.utils.data.TensorDataset(data)
sampler = torch.utils.data.DistributedSampler(dataset, world, rank, shuffle=False)
loader = torch.utils.data.DataLoader(dataset, options.batch, sampler=sampler)
lightning.Trainer(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_steps=options.steps,
    gradient_clip_val=limit, use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(Module(), loader)
""",
}


def verify(folder: Path, stack: str, *arguments: str) -> dict:
    file = folder / "script.py"
    file.write_text(SCRIPT + LOOP + STACKS[stack])
    command = [sys.executable, "-m", "trueshard", "verify", str(file), "--steps", "2", "--alone", "--batch 4"]
    result = forks.run([*command, "--json", "--", *arguments], capture_output=True, text=True, timeout=280)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["held"] == (result.returncode == 0)
    return report


@pytest.mark.rest
@pytest.mark.parametrize("stack", STACKS)
def test_a_script_on_two_processes_agrees_with_itself_on_one(tmp_path: Path, stack: str) -> None:
    report = verify(tmp_path, stack)
    assert report["held"], report
    details = {point["name"]: point["detail"] for point in report["points"]}
    assert lacking(details["forward"], 18) == []
    assert lacking(details["parameters"], 11) == []
    assert lacking(details["state"], 33) == []


FAULTS = {
    "module": ("1", "forward", 1, ("its input agrees",)),
    "sync": ("", "gradients", None, ("not the same on all ranks",)),
    "seed": ("", "start", None, ("not the same on all ranks",)),
    "mean": ("", "gradient", None, ("0.5 times what it should be",)),
    "clip": ("", "clipped gradients", None, ("times what it should be", "all before it agrees")),
    "frozen": ("1.up", "start", None, ("1.up.weight", "is trained", "first")),
}


@pytest.mark.rest
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_difference_of_a_script_is_named(tmp_path: Path, fault: str) -> None:
    first = verify(tmp_path, "ddp", "--fault", fault)["first"]
    module, where, rank, words = FAULTS[fault]
    assert (first["where"], first["rank"]) == (where, rank)
    assert lacking(first["words"], *words) == []
    assert not module or first["module"] == module
