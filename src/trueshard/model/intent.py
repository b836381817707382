"""The Intent: names, ties, dtypes, trainability and optimizer membership, recorded before anything is touched.

- Identity is the object: a parameter is one record however many names it has, and names come from the module tree.
- An Intent holds no tensor, so it keeps no memory alive; ``Originals`` holds the tensors while ``shard()`` runs.
- ``difference`` compares two Intents and names the first thing that is not the same.
- ``refuse`` names a part of the model that sharding would change.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trueshard import _torch
from trueshard.model import names
from trueshard.model.names import Held
from trueshard.model.units import has_forward


@dataclass(frozen=True)
class TensorRecord:
    """One parameter or buffer object."""

    names: tuple[str, ...]
    """Every name, in the model's order: more than one is a tie."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    attributes: tuple[str, ...] = ()
    """Names of the attributes that the user set on it (``p.name = ...``)."""
    module: str = ""
    """Class of the module that holds it, and its mode: training or eval."""

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class GroupRecord:
    """One parameter group of one optimizer."""

    parameters: tuple[str, ...]
    """First names, in the group's order."""
    settings: Mapping[str, Any]
    """Every other key, with the very objects."""


@dataclass(frozen=True)
class OptimizerRecord:
    """One optimizer: its groups, and the state of each parameter."""

    kind: str
    groups: tuple[GroupRecord, ...]
    state: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]]
    """Parameter name → state key → (shape, dtype) of a tensor, None of anything else."""


@dataclass(frozen=True, eq=False)
class _Setting:
    """A value of an optimizer's group: within a process the same object, between processes the same text."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Setting) and self.value is other.value

    def __repr__(self) -> str:
        value = self.value
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
            return repr(value.item())
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(repr(_Setting(each)) for each in value)}]"
        return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


@dataclass(frozen=True)
class Intent:
    """All that must be the same after sharding as before."""

    parameters: tuple[TensorRecord, ...]
    buffers: tuple[TensorRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    state_keys: tuple[str, ...] = ()
    """``list(model.state_dict())``."""

    def facts(self) -> Iterator[tuple[str, Any]]:
        """Yield (what, value) of all but ``state_keys``; the ``repr`` of a value can be compared between processes."""
        for kind, records in (("parameter", self.parameters), ("buffer", self.buffers)):
            for record in records:
                for key, value in vars(record).items():
                    yield f"{kind} {record.name!r}: {key}", value
        for i, optimizer in enumerate(self.optimizers):
            who = f"optimizer {i} ({optimizer.kind})"
            for g, group in enumerate(optimizer.groups):
                yield f"{who}, group {g}: parameters", group.parameters
                for key, value in group.settings.items():
                    yield f"{who}, group {g}: {key!r}", _Setting(value)
            for name, state in sorted(optimizer.state.items()):
                yield f"{who}, state of {name!r}", state


@dataclass
class Originals:
    """The objects behind an Intent's records, in the same order; dropped when ``shard()`` is done."""

    parameters: list[Held]
    buffers: list[Held]


def capture(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Intent, Originals]:
    """Record both; raise ValueError for a parameter that is not initialised, or that the model does not own."""
    originals = Originals(names.held_tensors(model, "parameters"), names.held_tensors(model, "buffers"))
    parameters, buffers = (tuple(map(_record, held)) for held in (originals.parameters, originals.buffers))
    name_of = {id(held.tensor): held.name for held in originals.parameters}
    records = tuple(_optimizer(optimizer, name_of) for optimizer in optimizers)
    return Intent(parameters, buffers, records, tuple(names.unwrap(model).state_dict(keep_vars=True))), originals


def _record(held: Held) -> TensorRecord:
    tensor, (module, _) = held.tensor, held.places[0]
    if is_lazy(tensor):
        raise ValueError(
            f"{held.name!r} has no shape yet (its module initialises itself at the first forward): run the model once "
            "on a small batch before shard(), and make the optimizer after that"
        )
    return TensorRecord(
        names=tuple(held.names),
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        attributes=tuple(sorted(attributes_of(tensor))),
        module=f"{_torch.own_class(module).__name__}, {'training' if module.training else 'eval'}",
    )


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the user set on ``tensor``."""
    return {key: value for key, value in tensor.__dict__.items() if key not in _torch.PARAMETER_ATTRIBUTES}


def _optimizer(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> OptimizerRecord:
    kind = type(optimizer).__name__
    groups = []
    for g, group in enumerate(optimizer.param_groups):
        members = []
        for p, parameter in enumerate(group["params"]):
            if id(parameter) not in name_of:
                given = group.get("param_names")
                known = f" ({given[p]!r})" if given else ""
                raise ValueError(
                    f"{kind}: parameter {p} of group {g}{known}, of shape {tuple(parameter.shape)}, is not a parameter "
                    "of the model given to shard(); make the optimizer from that model's parameters, or leave it out"
                )
            members.append(name_of[id(parameter)])
        groups.append(GroupRecord(tuple(members), {k: v for k, v in group.items() if k != "params"}))
    state: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and id(parameter) in name_of:
            state[name_of[id(parameter)]] = {
                key: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
                for key, value in entries.items()
            }
    return OptimizerRecord(kind, tuple(groups), state)


def difference(before: Intent, after: Intent) -> str | None:
    """Return the first difference of two Intents, with its name; None if there is none."""
    for (what, old), (other, new) in zip_longest(before.facts(), after.facts(), fillvalue=("nothing", None)):
        if what != other:
            return f"{what} became {other}"
        if old != new:
            return f"{what} was {reprlib.repr(old)}, is {reprlib.repr(new)}"
    if before.state_keys != after.state_keys:
        lost = [key for key in before.state_keys if key not in after.state_keys]
        new = [key for key in after.state_keys if key not in before.state_keys]
        return f"state_dict() keys changed: lost {lost[:3]}, new {new[:3]}" if lost or new else "state_dict() reordered"
    return None


# Refusals


def refuse(root: nn.Module, parameters: Sequence[Held]) -> None:
    """Raise ValueError for the first part of the model that sharding would change; name it, and the remedy."""
    if not has_forward(root):
        raise ValueError(
            f"a {type(root).__name__} has no forward, so nothing says when to gather it; put it in a module that calls "
            "it, or shard its members one by one"
        )
    for name, module in names.named_modules(root):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.sparse:
                raise ValueError(f"{name!r} has sparse gradients, which cannot be reduce-scattered; set sparse=False")
            if module.max_norm is not None:
                raise ValueError(
                    f"{name!r} rescales its weight in forward (max_norm), which would be lost with the gathered copy; "
                    "set max_norm=None and rescale after the optimizer's step"
                )
    _refuse_shared_memory(parameters)


def _refuse_shared_memory(parameters: Sequence[Held]) -> None:
    """Raise for two parameters over the same memory: a tie that cannot be seen, and that sharding would cut."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for held in parameters:
        tensor = held.tensor
        if type(tensor) is not nn.Parameter or tensor.numel() == 0:
            continue
        extent = 1 + sum(int(n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.itemsize
        span = (start, start + extent * tensor.itemsize, held.name)
        spans.setdefault(_torch.storage_identity(tensor), []).append(span)
    for members in spans.values():
        members.sort()
        for (_, end, one), (start, _, two) in pairwise(members):
            if start < end:
                raise ValueError(
                    f"{one!r} and {two!r} are two parameters over the same memory; sharding would make them "
                    "independent. Assign the same Parameter to both names instead"
                )
