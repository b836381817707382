"""A checkpoint of the first format, written by two ranks when that was the format, loads at any world size.

``tests/format1/values.json`` holds what its tensors were, as that version itself gathered them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import trueshard
from parity import Ranks

FOLDER = Path(__file__).parent / "format1"


class Tiny(nn.Module):
    """Tied, uneven, a 0-dim parameter, a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layer = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([0]))
        self.layer.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """int64 ``[n]`` → ``[n, 7]``."""
        return self.head(torch.relu(self.layer(self.embed(x))) * self.scale)  # type: ignore[no-any-return]


def whole(tensor: torch.Tensor) -> list[Any]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()  # type: ignore[no-any-return]


def loaded(rank: int, world_size: int) -> None:
    model = Tiny()
    optimizer = torch.optim.AdamW(
        [{"params": [model.embed.weight, model.scale]}, {"params": [model.layer.weight], "betas": (0.1, 0.2)}]
    )
    trueshard.shard(model, optimizer)
    found = trueshard.load(FOLDER / "checkpoint", model=model, optimizer=optimizer)
    expected = json.loads((FOLDER / "values.json").read_text())
    assert {name: whole(tensor) for name, tensor in model.state_dict().items()} == expected["model"]
    state = {
        name: {key: whole(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    assert state == expected["state"]
    first, second = optimizer.param_groups
    assert (first["lr"], first["tag"]) == (0.01, "a")
    assert (second["lr"], second["betas"]) == (0.02, (0.8, 0.9))
    progress = found["progress"]
    assert (progress["step"], progress["pair"]) == (2, (1, 2.5))
    assert progress["values"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_first_format_still_loads(world_size: int, alone: Ranks, ranks2: Ranks, ranks3: Ranks) -> None:
    {1: alone, 2: ranks2, 3: ranks3}[world_size].run(loaded)


def test_the_first_format_is_checked_without_checksums() -> None:
    checked = trueshard.check(FOLDER / "checkpoint")
    assert checked.unchecked == checked.tensors > 0
