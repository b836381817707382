"""Experts spread over all ranks by hand: rows travel to the rank that has their expert, and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor


def spread(model: nn.Module) -> set[nn.Parameter]:
    """Keep this rank's share of the experts of a mixture of transformers; return its parameters."""
    held: set[nn.Parameter] = set()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for module in model.modules():
        if type(module).__name__.endswith("MoeExperts"):
            experts: Any = module
            for name, parameter in list(experts.named_parameters()):
                setattr(experts, name, nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))
            held |= set(experts.parameters())
            experts.num_experts //= ranks
            experts.forward = functools.partial(_forward, experts, experts.forward)
    return held


def _forward(experts: Any, inner: Any, hidden: Any, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over the experts of each token: (tokens, width)."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    order = chosen.flatten().argsort(stable=True)
    expert = chosen.flatten()[order]
    ends = torch.searchsorted(expert, torch.arange(ranks * experts.num_experts, device=expert.device), right=True)
    leaving = ends.diff(prepend=ends.new_zeros(1))
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    sent, received = torch.stack([leaving, arriving]).view(2, ranks, -1).sum(-1).tolist()  # the wait
    rows = all_to_all_single_autograd(hidden[order // chosen.shape[-1]], received, sent, group)
    numbers = torch.arange(experts.num_experts, device=expert.device).repeat(ranks)
    here = numbers.repeat_interleave(arriving, output_size=sum(received))
    made = inner(rows, here.unsqueeze(-1), rows.new_ones((len(rows), 1)))
    back = all_to_all_single_autograd(made, sent, received, group)[order.argsort()]
    return (back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def clip(parameters: Iterable[nn.Parameter], most: float) -> torch.Tensor:
    """Clip gradients of which some are sharded and some are this rank's own."""
    every = [parameter for parameter in parameters if parameter.grad is not None]
    cut = [parameter for parameter in every if isinstance(parameter, DTensor)]
    own = [parameter for parameter in every if not isinstance(parameter, DTensor)]
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]) for some in (cut, own)]
    square = norms[1].square()
    dist.all_reduce(square)
    total = (norms[0].full_tensor().square() + square).sqrt()
    for some in (cut, own):
        nn.utils.clip_grads_with_norm_(some, most, total)
    return total
