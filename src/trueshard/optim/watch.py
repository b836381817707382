"""Watches every optimizer's step, from the first ``shard()`` of the process on.

- One that holds a parameter from before sharding, or one of the gathered copies, would train nothing: an error says so.
- One that was made from a sharded model's parameters and never given to ``shard()`` is bound before its first step, so
  that it steps as exactly as the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from trueshard import _torch
from trueshard.optim.steps import bind, is_bound

_replaced: Any = WeakTensorKeyDictionary()
"""Parameters from before sharding → their names."""
_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[list[int]]] = weakref.WeakKeyDictionary()
_watching: list[Any] = []


def watch(root: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """From now on, optimizers that hold parameters of ``root`` are looked at before they step.

    Args:
        root: the sharded model.
        originals: the parameters that were replaced, by name; held weakly.
    """
    for name, parameter in originals.items():
        _replaced[parameter] = name
    _roots.add(root)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(torch.compiler.disable(_check)))


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    signature = [list(map(id, group["params"])) for group in optimizer.param_groups]
    if _checked.get(optimizer) == signature:
        return
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
    if len(plain) < len(members) and not is_bound(optimizer):
        ours = {id(parameter) for root in _roots for parameter in root.parameters()}
        if any(id(parameter) in ours for parameter in members):
            bind(optimizer)
    _checked[optimizer] = signature
