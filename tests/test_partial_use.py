"""Contract: parts that some microbatches use and others do not have the gradients of one process, in any precision."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from parity import Ranks

USES = {
    "never the second": [(0,), (0,), (0,)],
    "the second at last": [(0,), (0,), (0, 1)],
    "the second at first": [(0, 1), (0,), (0,)],
    "in turns": [(0,), (1,), (2,)],
    "none at last": [(0, 2), (1,), ()],
}
UNITS: dict[str, Callable[[str, nn.Module], bool]] = {
    "a unit each": lambda name, module: name.startswith("parts."),
    "one unit": lambda name, module: name == "",
    "a unit of all parts": lambda name, module: name == "middle",
}
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bf16": {"mixed_precision": "bf16"}, "exact": {"exact": True}}


class Middle(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.inner = parts

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return x + sum(self.inner[i](x) for i in used)


class Parts(nn.Module):
    """Runs those of its parts that a call names; ``inside``: in a module of their own."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.middle = Middle(parts) if inside else None
        self.parts = None if inside else parts

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        x = x + sum(self.parts[i](x) for i in used) if self.parts is not None else self.middle(x, used)
        return self.last(x)


def rows(rank: int, step: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro))


EVERY = list(itertools.product(USES, UNITS, PRECISIONS))
PAIRS = [case for i, case in enumerate(EVERY) if (i // 9 + i // 3 + i) % 3 == 0]
"""Of the choices every two together."""


def gradients(rank: int, world_size: int, cases: list[tuple[str, str, str]], frozen: bool, sums: str) -> None:
    for use, unit, precision in cases:
        torch.manual_seed(0)
        plain = Parts(unit == "a unit of all parts")
        (plain.parts if plain.middle is None else plain.middle.inner)[1].requires_grad_(not frozen)
        model = copy.deepcopy(plain)
        half = precision == "bf16"
        plain = plain.bfloat16() if half else plain
        trueshard.shard(model, units=UNITS[unit], **PRECISIONS[precision])
        for step in range(2):
            expected: dict[str, torch.Tensor] = {}
            for micro, used in enumerate(USES[use]):
                with trueshard.accumulate(model, last=micro == 2, gradients=sums):
                    model(rows(rank, step, micro), used).float().pow(2).mean().backward()
                for other in range(world_size):
                    plain.zero_grad()
                    plain(rows(other, step, micro).to(plain.last.weight.dtype), used).float().pow(2).mean().backward()
                    for name, parameter in plain.named_parameters():
                        if parameter.grad is not None:
                            expected[name] = expected.get(name, 0) + parameter.grad.float() / world_size
            where = f"{use}, {unit}, {precision}, step {step}"
            for name, parameter in model.named_parameters():
                assert (parameter.grad is None) is (name not in expected), f"{where}: {name}"
                if parameter.grad is not None:
                    close = {"atol": 2e-2, "rtol": 2e-2} if half else {"atol": 1e-6, "rtol": 1e-5}
                    full: torch.Tensor = parameter.grad.full_tensor()
                    torch.testing.assert_close(
                        full, expected[name], **close, msg=functools.partial("{}: {}: {}".format, where, name)
                    )
            model.zero_grad()


@pytest.mark.parametrize("sums", ["whole", "sharded"])
def test_parts_that_some_microbatches_use(sums: str, ranks2: Ranks) -> None:
    ranks2.run(gradients, PAIRS, False, sums, timeout=120)


@pytest.mark.rest
@pytest.mark.parametrize("sums", ["whole", "sharded"])
@pytest.mark.parametrize("frozen", [False, True])
def test_parts_that_some_microbatches_use_in_every_way(frozen: bool, sums: str, ranks2: Ranks) -> None:
    ranks2.run(gradients, EVERY, frozen, sums, timeout=120)
