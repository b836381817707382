"""Shard a model on the ranks that torchrun started, train it, save it, load it into another; print what did it.

Run by ``versions.py`` with each release of Python; the package and its own dependencies are all that it needs.
"""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import trueshard


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trueshard.shard(model, optimizer)
    return model, optimizer


def main() -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    losses = []
    for _ in range(20):
        inputs = torch.ones(4, 16) * (dist.get_rank() + 1)
        loss = (model(inputs) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    folder = [Path(tempfile.mkdtemp()) / "checkpoint"]
    dist.broadcast_object_list(folder)
    trueshard.save(folder[0], model=model, optimizer=optimizer)
    other, its_optimizer = build()
    trueshard.load(folder[0], model=other, optimizer=its_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())
    assert str(its_optimizer.state_dict()) == str(optimizer.state_dict())
    if dist.get_rank() == 0:
        print(f"{platform.python_version()}, torch {torch.__version__}: imported, sharded, trained, saved, loaded")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
