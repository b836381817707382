"""Gradients for parameters that no pass has reached, and the distance between two models that got the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def give(parameters: Sequence[torch.Tensor]) -> None:
    """Set the ``.grad`` of each sharded parameter: normal, the same at every call, another on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in parameters:
        grad = torch.zeros_like(parameter, requires_grad=False)
        local(grad).normal_(generator=generator)
        parameter.grad = grad


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, the memory itself."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def apart(parameters: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest difference between two lists of sharded parameters on this rank."""
    pairs = zip(parameters, others, strict=True)
    return max((local(a) - local(b)).abs().max().item() for a, b in pairs)
