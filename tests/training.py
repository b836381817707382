"""Trains a catalogue case, sharded or not, and reports everything that sharding must not change."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import torch

from gathering import whole

SAMPLES = 6
"""rows of the global batch: divides by 1, 2 and 3 ranks"""
STEPS = 3


def train(rank: int, world_size: int, name: str, steps: int = STEPS, **words: Any) -> dict[str, Any]:
    """Losses, parameters, gradients, optimizer state, names, order, ties and trainability after `steps` steps.

    With `world_size` 1 the model is not sharded: it is what one process without any of this computes.
    """
    import torch.distributed as dist

    import trueshard
    from models import CASES, rows

    case = CASES[name]
    model = case.build(0)
    split = max(1, len(list(model.parameters())) // 2)
    named = list(model.named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [p for _, p in named[split:]][::-1], "tag": "second half, reversed"},
            {"params": [p for _, p in named[:split]], "lr": 0.02},
        ],
        lr=0.05,
        momentum=0.9,
        weight_decay=0.01,
    )
    report: dict[str, Any] = {"loss": [], "norm": []}
    if world_size > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", message="the whole model is one unit")
            warnings.filterwarnings("ignore", message=".*normalises by the statistics")
            trueshard.shard(model, optimizer, **words)
    for step in range(steps):
        batch = rows(case.batch(SAMPLES, step), rank, world_size)
        loss = case.loss(model, batch)
        loss.backward()
        mean = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(mean)
            mean /= world_size
        report["loss"].append(mean)
        if step == 0:
            reached = {n: p.grad is not None and bool(p.grad.any()) for n, p in model.named_parameters()}
            wanted = {n: p.requires_grad and case.reaches(n) for n, p in model.named_parameters()}
            assert world_size > 1 or reached == wanted, "a parity test would say nothing of some parameters"
            report["grad"] = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        report["norm"].append(trueshard.clip_grad_norm_(model.parameters(), 1.0).reshape(()))
        optimizer.step()
        optimizer.zero_grad()
    name_of = {id(p): n for n, p in model.named_parameters()}
    report["parameters"] = dict(model.named_parameters())
    report["all names"] = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    report["buffers"] = dict(model.named_buffers())
    report["state dict"] = {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    report["trainable"] = {n: p.requires_grad for n, p in model.named_parameters()}
    report["groups"] = [
        {k: [name_of[id(p)] for p in v] if k == "params" else v for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    report["momenta"] = {
        name_of[id(p)]: entries["momentum_buffer"]
        for p, entries in optimizer.state.items()
        if entries.get("momentum_buffer") is not None
    }
    report["momenta"] = dict(sorted(report["momenta"].items()))
    return whole(report)


def train_many(rank: int, world_size: int, names: list[str], words: dict[str, Any]) -> dict[str, Any]:
    """`train` for each name; a case that raises gives its traceback instead (on every rank, or none returns)."""
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = train(rank, world_size, name, **words)
        except Exception:
            found[name] = traceback.format_exc()
    return found
