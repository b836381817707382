"""A run that is disturbed by rounding is the same run: only the order and the rounding of sums differ."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trueshard.verification.compare import FACTOR, distance
from trueshard.verification.disturbing import Disturbance

ROWS, WIDTH = 192, 32


def gradients(model: nn.Module, rows: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(rows).backward(upstream)
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def test_the_sum_of_a_layer_norm_in_bf16_may_be_as_far_apart_as_that_of_two_ranks() -> None:
    torch.manual_seed(0)
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    upstream = torch.randn(ROWS, WIDTH)
    upstream = (upstream - 0.95 * upstream.mean(0)).bfloat16()  # terms cancel
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16()
    one = gradients(model, rows, upstream)
    ranks = [gradients(model, *both) for both in zip(rows.chunk(2), upstream.chunk(2), strict=True)]
    shaken = copy.deepcopy(model)
    disturbance = Disturbance(shaken)
    shaken(rows).backward(upstream)
    computed = {name: parameter.grad.double() for name, parameter in shaken.named_parameters()}
    disturbance.gradients(shaken.named_parameters(), ["bfloat16"])
    changed = {name: parameter.grad.double() for name, parameter in shaken.named_parameters()}
    for name, expected in one.items():
        actual = distance(ranks[0][name] + ranks[1][name], expected)[1]
        assert actual <= FACTOR * distance(changed[name], expected)[1]
    actual = distance(ranks[0]["0.bias"] + ranks[1]["0.bias"], one["0.bias"])[1]
    assert actual > FACTOR * distance(changed["0.bias"], computed["0.bias"])[1]  # a rounding error alone is too little


class Centred(nn.Linear):
    """Rows that do not count each for itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Drops(nn.Linear):
    """Draws random numbers, and counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.dropout(super().forward(x), 0.5)


class Fixed(nn.Linear):
    """Knows one number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == ROWS
        return super().forward(x)


@pytest.mark.parametrize("kind", [Centred, Drops, Fixed])
def test_a_module_whose_rows_go_together_computes_what_it_does(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    shaken, rows, results = copy.deepcopy(model), torch.randn(ROWS, WIDTH), []
    Disturbance(shaken)
    for one in (model, shaken):
        torch.manual_seed(1)
        results.append((one(rows), torch.rand(3), *one.buffers()))
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)
    assert getattr(shaken[0], "calls", 1) == 1


def test_a_default_device_changes_nothing_of_a_disturbance() -> None:
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH)
        with torch.device(device):
            Disturbance(model).parameters(model.parameters())
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)
