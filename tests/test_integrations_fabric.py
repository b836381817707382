"""Lightning Fabric over TrueShard: what one process computes, saved for any number of ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

from parity import DEVICE, Ranks, assert_same
from trueshard.integrations.fabric import TrueShardFabricStrategy

ROWS = 12


class Counter:
    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def launched(rank: int, ranks: int, options: dict[str, Any] | None, **words: Any) -> Fabric:
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    strategy = "auto" if ranks == 1 and options is None else TrueShardFabricStrategy(**(options or {}))
    fabric = Fabric(accelerator=DEVICE, devices=ranks, strategy=strategy, **words)
    fabric.launch()
    return fabric


def train(rank: int, ranks: int, first: int, last: int, load: Path | None, save: Path | None, **words: Any) -> Any:
    """Steps from ``first`` to ``last`` of two microbatches each."""
    options = {} if load or save else None
    fabric = launched(rank, ranks, options, **words)
    torch.manual_seed(0)
    with fabric.init_module(empty_init=load is not None):
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, schedule = fabric.setup(model, optimizer, scheduler=schedule)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "counter": Counter(), "step": 0, "new": 1}
    if load:
        del state["new"]
        rest = fabric.load(load, state)
        assert rest == {"new": 1}
        assert state["step"] == state["counter"].steps == first
    losses, norms = [], []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(ROWS, 6, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator)
        x, y = fabric.to_device(data)
        for part in (0, 1):
            rows = slice(rank + ranks * part, None, 2 * ranks)
            with fabric.no_backward_sync(model, enabled=part == 0):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) / 2
                fabric.backward(loss)
            losses.append(float(fabric.all_reduce(loss.detach().clone())))
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.3)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    state["step"] = state["counter"].steps = last
    if save:
        fabric.save(save, {"new": 1, **state})
    pairs = [sum(pair) for pair in zip(losses[::2], losses[1::2], strict=True)]
    return {"losses": pairs, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def test_two_ranks_then_three(alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    (expected,) = alone.run(train, 0, 4, None, None)
    first = ranks2.run(train, 0, 2, None, tmp_path / "saved")[0]
    for second in ranks3.run(train, 2, 4, tmp_path / "saved", None):
        both = {key: first[key] + second[key] for key in ("losses", "norms")} | {"weights": second["weights"]}
        assert_same(both, expected, rtol=1e-4, atol=1e-5)
