"""Contract: what a forward writes to buffers and attributes is written once, whether it is recomputed or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import trueshard
from cases import on_ranks
from parity import assert_same


class Writing(nn.Module):
    """Normalises by batch statistics, scales by a running size that it reads and writes, counts and keeps a list."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("size", torch.ones(()))
        self.calls = 0
        self.sizes: list[float] = []
        self.last: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x)) / self.size.clone()
        with torch.no_grad():
            self.size = self.size * 0.9 if self.assigns else self.size.mul_(1.1)
        self.calls += 1
        self.sizes.append(float(self.size))
        self.last["output"] = x
        return x


def trained(recompute: Any, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Writing(True), Writing(False), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer, units=Writing, activation_checkpointing=recompute)
    outputs = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        both = [model(torch.randn(4, 8, generator=generator)) for _ in range(2)]  # two forwards, then backward
        assert all(block.last["output"].grad_fn is not None for block in model[:2])
        sum(output.sum() for output in both).backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs += [output.detach() for output in both]
    written = [(block.calls, block.sizes, block.last["output"].detach()) for block in model[:2]]
    return {"outputs": outputs, "written": written, "state": {k: v.clone() for k, v in model.state_dict().items()}}


@on_ranks(2)
def test_what_a_forward_writes_is_written_once(rank: int, world_size: int) -> None:
    expected = trained("none", rank)
    assert expected["written"][0][0] == 6
    for recompute in ("full", "selective"):
        assert_same(trained(recompute, rank), expected, rtol=0, atol=0)
