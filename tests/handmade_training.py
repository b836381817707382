"""What tests on handmade models share: batches, plain parameters, and one process held against several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gathering import whole
from stepping import take_step

Report = dict[str, Any]
Case = Callable[[int, int], Any]


def batch(seed: int, rank: int, world_size: int, samples: int = 6) -> torch.Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed)).chunk(world_size)[rank]


def ids(seed: int, rank: int, world_size: int) -> torch.Tensor:
    return torch.randint(0, 64, (6, 5), generator=torch.Generator().manual_seed(seed)).chunk(world_size)[rank]


def parameters(model: nn.Module) -> Report:
    return whole(dict(model.named_parameters()))


def take_steps(model: Any, optimizer: torch.optim.Optimizer, rank: int, world_size: int, steps: int = 3) -> None:
    for seed in range(steps):
        model(batch(seed, rank, world_size)).pow(2).mean().backward()
        take_step(optimizer)
