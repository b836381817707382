"""A small model for checkpoints between programs, its optimizer, two steps of it, and what both hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gathering import whole


class Tower(nn.Module):
    """Tied, with a buffer, a frozen layer, uneven rows, and one parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.arange(4.0))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(self.embed(ids))))


def built(seed: int = 0) -> tuple[Tower, torch.optim.Optimizer]:
    """The model, and AdamW over two groups."""
    torch.manual_seed(seed)
    model = Tower()
    groups: list[dict[str, Any]] = [
        {"params": [model.norm.weight, model.norm.bias, model.unused], "weight_decay": 0.0, "lr": 0.02 + seed},
        {"params": [model.embed.weight]},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01 + seed)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        model(torch.arange(12).view(3, 4) + step % 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """All tensors of the model; state and groups of the optimizer, by name."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    report: dict[str, Any] = {"model": dict(model.state_dict())}
    if optimizer is not None:
        report["state"] = {
            name_of[id(p)]: {key: entries[key] for key in sorted(entries)} for p, entries in optimizer.state.items()
        }
        report["groups"] = [
            {"params": [name_of[id(p)] for p in group["params"]]}
            | {key: group[key] for key in ("lr", "weight_decay", "betas")}
            for group in optimizer.param_groups
        ]
    return whole(report)
