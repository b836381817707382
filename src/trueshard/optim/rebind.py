"""Binds the user's optimizers to the sharded parameters, in place.

- The optimizer object, its groups, their keys and order stay; only the tensors they point at change.
- State that was there is sharded along: a tensor of the parameter's own shape becomes a shard of it, anything else
  (a step count) stays as it is.
- An optimizer that still holds a parameter from before sharding, or one of the gathered copies, would train nothing.
  A hook on every optimizer's step finds that before the first one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from trueshard import _torch

_replaced: Any = WeakTensorKeyDictionary()
"""Parameters from before sharding → their names."""
_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
_watching: list[Any] = []


def rebind(optimizers: Sequence[torch.optim.Optimizer], new_of: Mapping[int, nn.Parameter]) -> None:
    """Point ``optimizers`` at the sharded parameters.

    Args:
        optimizers: made on the parameters before sharding.
        new_of: ``id`` of each original parameter → its sharded parameter (itself, where it was not sharded).
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new_of[id(parameter)] for parameter in group["params"]]
        items = list(optimizer.state.items())
        optimizer.state.clear()
        for key, entries in items:
            new = new_of.get(id(key)) if isinstance(key, torch.Tensor) else None
            optimizer.state[key if new is None else new] = entries if new is None else shard_state(entries, new)


def shard_state(value: Any, new: torch.Tensor, key: str = "") -> Any:
    """Optimizer state, placed like its parameter ``new``: nested containers, tensors of the parameter's shape."""
    if isinstance(value, torch.Tensor):
        if isinstance(new, DTensor) and not isinstance(value, DTensor) and is_placed_alike(key, value.shape, new):
            return shard_like(value, new)
        return value
    if isinstance(value, dict):
        return {name: shard_state(each, new, name) for name, each in value.items()}
    if isinstance(value, list):
        return [shard_state(each, new, key) for each in value]
    return value


def is_placed_alike(key: str, shape: Sequence[int], parameter: torch.Tensor) -> bool:
    """Whether a state tensor goes with its parameter's elements: it has its shape, and is no count of steps."""
    return tuple(shape) == tuple(parameter.shape) and (len(shape) > 0 or key != "step")


def shard_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of ``whole`` as a DTensor placed like ``like``; no communication; its own memory.

    Args:
        whole: the full tensor, of ``like``'s shape, the same on every rank; any dtype.
        like: a parameter sharded by FSDP2.
    """
    local = _torch.local(like)
    part = torch.empty(local.shape, dtype=whole.dtype, device=local.device)
    mesh = like.device_mesh
    if not any(isinstance(placement, Shard) for placement in like.placements):
        part.copy_(whole.detach())
    elif local.numel():
        # torch.chunk's rule, which FSDP2 follows: equal pieces of ceil(n / ranks), the last ones shorter or empty.
        piece = -(-whole.shape[0] // mesh.size(mesh.ndim - 1))
        start = piece * mesh.get_local_rank(mesh.ndim - 1)
        part.copy_(whole.detach()[start : start + local.shape[0]])
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def watch(root: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """From now on, an optimizer that holds one of ``originals`` or a gathered copy raises at its step.

    Args:
        root: the sharded model.
        originals: the parameters that were replaced, by name; held weakly.
    """
    for name, parameter in originals.items():
        _replaced[parameter] = name
    _roots.add(root)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    signature = tuple(map(id, members))
    if _checked.get(optimizer) == signature:
        return
    plain = [p for p in members if not isinstance(p, DTensor)]
    for parameter in plain:
        if (name := _replaced.get(parameter)) is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds {name!r} as it was before shard(), so its step would train nothing; "
                "give the optimizer to shard(), or make it from model.parameters() after shard()"
            )
    if plain:
        gathered = {id(g): name for root in _roots for name, _, g in _torch.gathered_parameters(root)}
        for parameter in plain:
            if (name := gathered.get(id(parameter))) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was made while {name!r} was gathered (between forward and backward), "
                    "so its step would train nothing; make it before the forward, or give it to shard()"
                )
    _checked[optimizer] = signature
