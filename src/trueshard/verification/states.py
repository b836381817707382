"""The whole of what sharded tensors hold: parameters, gradients and optimizer state, one tensor at a time.

All ranks walk through the same list in the same order, agreed on before: a rank that lacks what another has is found,
and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

Named = dict[str, Any]
"""Tensors, and of optimizer state also what is no tensor, by name."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on the CPU. Collective where it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in its own memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients_of(model: nn.Module) -> Named:
    """The gradients that are there."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def parameters_of(model: nn.Module) -> Named:
    """All parameters."""
    return dict(model.named_parameters())


def buffers_of(model: nn.Module) -> Named:
    """All buffers."""
    return dict(model.named_buffers())


def state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Named:
    """Every entry of the optimizers' state: ``"0: layer.weight: exp_avg"``."""
    name_of = {id(each): name for name, each in model.named_parameters()}
    found: Named = {}
    for number, optimizer in enumerate(optimizers):
        for parameter, entries in optimizer.state.items():
            if id(parameter) in name_of and isinstance(entries, Mapping):
                _flatten(f"{number}: {name_of[id(parameter)]}", entries, found)
    return found


def _flatten(name: str, value: Any, found: Named) -> None:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_list(value) else None
    if items is None:
        found[name] = value
        return
    for key, each in items:
        _flatten(f"{name}: {key}", each, found)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def gathered(mine: Named) -> Iterator[tuple[str, Any]]:
    """Every entry that a rank has, whole, on every rank. Collective.

    A tensor that lies on some ranks only (of an owner) comes from the first of them.

    Raises:
        RuntimeError: a sharded tensor is missing on a rank, by name.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        for name, value in mine.items():
            yield name, whole(value) if isinstance(value, torch.Tensor) else value
        return
    ranks = dist.get_world_size()
    listed: list[dict[str, bool]] = [{} for _ in range(ranks)]
    dist.all_gather_object(listed, {name: isinstance(value, DTensor) for name, value in mine.items()})
    for name in dict.fromkeys(name for each in listed for name in each):
        holders = [rank for rank in range(ranks) if name in listed[rank]]
        if any(listed[rank][name] for rank in holders):
            if len(holders) != ranks:
                lacking = next(rank for rank in range(ranks) if rank not in holders)
                raise RuntimeError(f"{name!r} is sharded, and rank {lacking} has no part of it")
            yield name, whole(mine[name])
        elif holders[0] == 0:
            yield name, _cpu(mine.get(name))
        else:
            box = [_cpu(mine.get(name))]
            dist.broadcast_object_list(box, src=holders[0])
            yield name, box[0]


def _cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
