"""What tests on handmade models share: batches, a model and its optimizer before the first step, steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from stepping import shard_over, take_step

Report = dict[str, Any]
Case = Callable[[int, int], Any]


def batch(seed: int, rank: int, world_size: int, samples: int = 6) -> torch.Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed)).chunk(world_size)[rank]


def ids(seed: int, rank: int, world_size: int) -> torch.Tensor:
    return torch.randint(0, 64, (6, 5), generator=torch.Generator().manual_seed(seed)).chunk(world_size)[rank]


def prepared(
    world_size: int,
    build: Callable[[], nn.Module],
    kind: str = "SGD",
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """A model from seed 0 and its optimizer; sharded with `options` if there are several ranks."""
    torch.manual_seed(0)
    model = build()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **{"lr": 0.1} | (settings or {}))
    shard_over(world_size, model, optimizer, **options)
    return model, optimizer


def take_steps(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, world_size: int, seeds: Iterable[int] = range(3)
) -> None:
    for seed in seeds:
        model(batch(seed, rank, world_size)).pow(2).mean().backward()
        take_step(optimizer)
