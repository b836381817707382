"""Contract: what is computed from sharded rows, and written to some, is as on one device, however they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases import as_on_one_device
from stepping import shard_over, take_step

WIDTH = 4


class Heads(nn.Module):
    """Has matrices of 1, 3, 4 and 7 rows, two of each: on 2 to 4 ranks some have none, some fewer, some as many."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, rows, bias=False) for _ in range(2)]) for rows in (1, 3, 4, 7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for pair in self.pairs for layer in pair], dim=-1)


def heads(world_size: int) -> tuple[Heads, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    shard_over(world_size, model, optimizer)
    return model, optimizer


DISTANCES: dict[str, Callable[..., Any]] = {
    name: getattr(functional, name)
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "binary_cross_entropy_with_logits")
} | {
    "sum of squares": lambda a, b: functional.mse_loss(a, b, reduction="sum"),
    "each square": lambda a, b: functional.mse_loss(a, b, reduction="none").mean(),
    "to a plain tensor": lambda a, b: functional.mse_loss(a, torch.ones(a.shape)) + 0 * b.sum(),
    "cross entropy": lambda a, b: functional.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "margin": lambda a, b: functional.soft_margin_loss(a, b.detach().sign()),
    "cosine": lambda a, b: functional.cosine_similarity(a.flatten(), b.flatten(), dim=0),
    "dist": torch.dist,
    "dot": lambda a, b: torch.dot(a.view(-1), b.view(-1)),
    "vector": lambda a, b: nn.utils.parameters_to_vector([a, b]).pow(3).sum(),
}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "max": lambda a: a.max(),
    "amax": lambda a: a.amax(),
    "amin, no dimension named": lambda a: a.amin(dim=()),
    "sum, no dimension named": lambda a: a.sum(dim=()),
    "largest of a column": lambda a: a.amax(0).sum() - a.min(0).values.sum(),
    "largest by far": lambda a: (a - a.amax(0, keepdim=True)).exp().sum(),
    "width": lambda a: a.max() - a.min(),
    "norm": lambda a: a.norm(),
    "largest norm": lambda a: a.norm(float("inf")),
    "norms of columns": lambda a: a.norm(dim=0).sum(),
    "norms of rows": lambda a: a.norm(dim=1).mean(),
    "normalised": lambda a: functional.normalize(a, dim=0).pow(3).sum(),
    "norms that are added": lambda a: torch.stack([a.norm(), a.norm(1)]).sum(),
    "extremes that are added": lambda a: torch.stack([a.max(), -a.min()]).sum(),
    "variance": lambda a: a.var(0, correction=0).sum(),
    "softmax": lambda a: a.softmax(0).pow(2).sum(),
    "median": lambda a: a.median(),
    "product": lambda a: a.prod(),
    "quantile": lambda a: a.flatten().quantile(0.3),
    "rows by themselves": lambda a: sum(row.pow(2).sum().sqrt() for row in a.unbind()),
}
TRUTHS: dict[str, Callable[[Any], Any]] = {
    "any": lambda a: (a > 0.1).any(),
    "any as a number": lambda a: (a > 0.1).any().float(),
    "all as a number": lambda a: (a > -9).all().float(),
    "columns": lambda a: (a > 0.1).any(0).sum(),
    "argmax": lambda a: a.argmax(),
    "close": lambda a: torch.allclose(a, a.clone()),
    "not close": lambda a: torch.allclose(a, a + 1),
    "close numbers": lambda a: torch.allclose(a.max(), a.max()),
}


@pytest.mark.rest
@pytest.mark.parametrize("pair", range(4))
@as_on_one_device()
def test_numbers_and_their_gradients_are_those_of_the_whole(rank: int, world_size: int, pair: int) -> Any:
    model, _ = heads(world_size)
    result: dict[str, Any] = {}
    first, second = model.pairs[pair]
    a, b = first.weight, second.weight
    for name, loss in (DISTANCES | REDUCTIONS).items():
        model.zero_grad()
        value = loss(a, b) if name in DISTANCES else loss(a)
        value.backward()
        result[name] = value.item(), a.grad.clone(), None if b.grad is None else b.grad.clone()
    for name, truth in TRUTHS.items():
        result[name] = float(truth(a.detach()))
    return result


@as_on_one_device()
def test_steps_on_such_gradients_are_those_of_one_device(rank: int, world_size: int) -> Any:
    """The gradients come cut like their parameter, whole, or as parts of a sum."""
    model, optimizer = heads(world_size)
    for _ in range(2):
        for a, b in ((first.weight, second.weight) for first, second in model.pairs):
            (functional.mse_loss(a, b) + a[:1].sum() + (b @ b.T).pow(2).sum() + a.softmax(0)[0].sum()).backward()
        take_step(optimizer)
    return dict(model.named_parameters())


@as_on_one_device()
def test_what_is_written_through_a_view_reaches_the_whole(rank: int, world_size: int) -> Any:
    model, optimizer = heads(world_size)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).pow(2).mean().backward()
        for _, layer in model.pairs:
            layer.weight.grad[:-1].zero_()  # trains the last row alone
        take_step(optimizer)
    weight: Any = model.pairs[3][0].weight
    with torch.no_grad():
        weight[-2:].copy_(weight[:-2].mean(0).expand(2, WIDTH))
        weight[0].zero_()
        weight.data.narrow(0, 1, 1).fill_(7.0)
        weight[1:4].data.mul_(0.5)
        weight.chunk(2)[1].add_(weight.split([2, 5])[0][:1])
        weight.view(-1)[5:9].clamp_(max=0.25)
        weight.t()[1, 2:].sub_(1.0)
        weight.unbind()[4].neg_()
        weight[:, 1:3].mul_(2.0)
        torch._foreach_mul_([weight[:2], weight[5:]], 3.0)
        first = weight[2:5]
        first.masked_fill_(first < 0, 0.0)
        optimizer.state[weight]["exp_avg"][:3].zero_()
        read = first.sum(), weight[2:5].sum()
    model(torch.ones(2, WIDTH)).pow(2).mean().backward()
    take_step(optimizer)
    return read, dict(model.named_parameters())
