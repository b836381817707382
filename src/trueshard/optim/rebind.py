"""Bind the user's optimizers to the sharded parameters, in place, and place their state like the parameters.

- The optimizer object, its groups, their keys and order stay; only the tensors they point at change.
- State that was there is sharded along: a tensor of the parameter's own shape becomes a shard of it, anything else
  (a step count) stays as it is.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.model.regions import has_whole_rows, inside, region_of, take

IsRows = Callable[[tuple[Any, ...], torch.Tensor, torch.Tensor], bool]
"""(keys, state tensor, its parameter) → True if the tensor has a row for each row of the parameter."""


def by_shape(path: tuple[Any, ...], tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """True if sharded like its parameter: same shape, and not the step counter."""
    return tensor.shape == parameter.shape and (tensor.ndim > 0 or path[-1:] != ("step",))


def family(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return ``optimizer`` and those that it wraps: attributes that are optimizers themselves, as look-ahead has."""
    members = [optimizer]
    for member in members:  # which grows meanwhile
        for value in vars(member).values():
            if isinstance(value, torch.optim.Optimizer) and not any(value is other for other in members):
                members.append(value)
    return members


def is_container(optimizer: torch.optim.Optimizer) -> bool:
    """True if a list of its own holds optimizers of all of its parameters: its step calls theirs, each bound by itself.

    What else it does to parameters, DTensor's dispatch does on whole values.
    """
    lists = [value for value in vars(optimizer).values() if isinstance(value, (list, tuple))]
    members = [value for values in lists for value in values if isinstance(value, torch.optim.Optimizer)]
    own, held = (
        {id(parameter) for holder in holders for group in holder.param_groups for parameter in group["params"]}
        for holders in ([optimizer], members)
    )
    return bool(members) and own <= held


def rebind(optimizer: torch.optim.Optimizer, new_of: Mapping[int, nn.Parameter], is_rows: Sequence[IsRows]) -> None:
    """Point ``optimizer``, and those that it wraps, at the sharded parameters.

    ``new_of``: ``id`` of each original parameter → its sharded parameter (itself, where it was not sharded).
    ``is_rows``: for each group, which state is cut like its parameter; in the groups of wrapped ones it goes by shape.
    """
    rule_of: dict[int, IsRows] = {}
    seen: set[int] = set()
    for member in family(optimizer):
        for g, group in enumerate(member.param_groups):
            if id(group) not in seen:  # a wrapper shares the groups of what it wraps
                seen.add(id(group))
                if member is optimizer:
                    rule_of.update((id(parameter), is_rows[g]) for parameter in group["params"])
                group["params"][:] = [new_of[id(parameter)] for parameter in group["params"]]
        if id(member.state) not in seen:
            seen.add(id(member.state))
            items = list(member.state.items())
            member.state.clear()
            for key, entries in items:
                new = new_of.get(id(key)) if isinstance(key, torch.Tensor) else None
                if new is None:
                    member.state[key] = entries
                else:
                    member.state[new] = _shard_state(entries, new, rule_of.get(id(key), by_shape))


def _shard_state(value: Any, new: torch.Tensor, is_rows: IsRows, path: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, torch.Tensor):
        is_sharded = isinstance(value, DTensor) and isinstance(new, DTensor) and value.device_mesh == new.device_mesh
        if isinstance(new, DTensor) and not is_sharded and is_rows(path, value, new):
            # State of whole rows of a parameter that is cut inside them stays whole, for the parameter's owner.
            return shard_like(value, new) if value.shape == new.shape or has_whole_rows(new) else value
        return value
    # A copy: whoever undoes a failed shard() puts the old containers back.
    return each_in(copy.copy(value), lambda member, where: _shard_state(member, new, is_rows, where), path)


def each_in(value: Any, change: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """Replace each member of a container by ``change(member, its path)``; dicts and lists are changed in place."""
    if isinstance(value, dict):
        for name, member in value.items():
            if not isinstance(member, (float, int)):  # asked of every parameter in every step
                value[name] = change(member, (*path, name))
    elif isinstance(value, (list, deque)):
        for i, member in enumerate(value):
            value[i] = change(member, (*path, i))
    elif type(value) is tuple:
        return tuple(change(member, (*path, i)) for i, member in enumerate(value))
    return value


def shard_like(full: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of ``whole``, the same on every rank, as a new DTensor placed like ``like``.

    It has the shape of ``like``, or a row for each of its rows. A DTensor holds all that this rank is to have of it.
    """
    region = region_of(like) if full.shape == like.shape else region_of(like)[:1]
    if isinstance(full, DTensor):
        region = inside(region_of(full), region)
    local = _torch.local(like)
    part = take(_torch.local(full).detach(), region).to(local.device, copy=True, memory_format=torch.contiguous_format)
    return as_shard(part, like)


def as_shard(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return ``local`` as a DTensor placed like the parameter: of its shard's shape, or with a row for each row."""
    if local.shape == _torch.local(parameter).shape:
        return _torch.dtensor_over(local, parameter, parameter.shape, parameter.stride())
    shape = torch.Size((*parameter.shape[:1], *local.shape[1:]))
    return _torch.dtensor_over(local, parameter, shape, torch.empty(shape, device="meta").stride())


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) for what nested dicts, lists and tuples hold."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield from leaves(member, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, member in enumerate(value):
            yield from leaves(member, (*path, i))
    else:
        yield path, value
