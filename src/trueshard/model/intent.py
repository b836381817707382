"""The Intent: names, ties, dtypes, trainability and optimizer membership, recorded before anything is touched.

- Identity is the object: a parameter is one record however many names it has, and names come from the module tree.
- An Intent holds none of the model's tensors, so it keeps no memory alive.
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
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from trueshard import _torch
from trueshard.model.names import Held, Index
from trueshard.model.units import has_forward


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
            return f"[{', '.join(repr(_Setting(member)) for member in value)}]"
        return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


@dataclass(frozen=True)
class Intent:
    """All that must be the same after sharding as before."""

    tensors: tuple[tuple[str, dict[str, Any]], ...]
    """(parameter or buffer, what is known of it)."""
    optimizers: tuple[tuple[str, Any], ...]
    """(what, value)."""
    state_keys: tuple[str, ...]
    """``list(model.state_dict())``."""

    @property
    def facts(self) -> list[tuple[str, Any]]:
        """(what, value); the ``repr`` of a value can be compared between processes."""
        of_tensors = [(f"{who}: {key}", value) for who, known in self.tensors for key, value in known.items()]
        return [*of_tensors, *self.optimizers]


def capture(index: Index, optimizers: Sequence[torch.optim.Optimizer]) -> Intent:
    """Return the Intent of a model and its optimizers.

    Raises ValueError for a parameter that is not initialised, or that the model does not own.
    """
    name_of = {id(held.tensor): held.name for held in index.parameters}
    tensors = [*(("parameter", held) for held in index.parameters), *(("buffer", held) for held in index.buffers)]
    facts = tuple((f"{kind} {held.name!r}", _tensor_facts(held)) for kind, held in tensors)
    of_optimizers: list[tuple[str, Any]] = []
    for i, optimizer in enumerate(optimizers):
        of_optimizers += _optimizer_facts(f"optimizer {i} ({type(optimizer).__name__})", optimizer, name_of)
    return Intent(facts, tuple(of_optimizers), tuple(index.root.state_dict(keep_vars=True)))


def _tensor_facts(held: Held) -> dict[str, Any]:
    tensor, (module, _) = held.tensor, held.places[0]
    if is_lazy(tensor):
        raise ValueError(
            f"{held.name!r} has no shape yet (its module initialises itself at the first forward): run the model once "
            "on a small batch before shard(), and make the optimizer after that"
        )
    return {
        "names": tuple(held.names),
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "attributes": tuple(sorted(attributes_of(tensor))),
        "module": f"{_torch.own_class(module).__name__}, {'training' if module.training else 'eval'}",
    }


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the user set on ``tensor``."""
    return {key: value for key, value in tensor.__dict__.items() if key not in _torch.PARAMETER_ATTRIBUTES}


def _optimizer_facts(
    who: str, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]
) -> Iterator[tuple[str, Any]]:
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            if id(parameter) not in name_of:
                group_names = group.get("param_names")
                hint = f" ({group_names[p]!r})" if group_names else ""
                raise ValueError(
                    f"{type(optimizer).__name__}: parameter {p} of group {g}{hint}, of shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the model given to shard(); make the optimizer "
                    "from that model's parameters, or leave it out"
                )
        yield f"{who}, group {g}: parameters", tuple(name_of[id(parameter)] for parameter in group["params"])
        yield from ((f"{who}, group {g}: {k!r}", _Setting(value)) for k, value in group.items() if k != "params")
    held = ((key, entries) for key, entries in optimizer.state.items() if isinstance(key, torch.Tensor))
    state = {name_of[id(parameter)]: entries for parameter, entries in held if id(parameter) in name_of}
    for name, entries in sorted(state.items()):
        kinds = {
            key: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
            for key, value in entries.items()
        }
        yield f"{who}, state of {name!r}", kinds


def difference(before: Intent, after: Intent) -> str | None:
    """Return the first difference of two Intents, with its name; None if there is none."""
    if before == after:
        return None
    for (what, old), (other, new) in zip_longest(before.facts, after.facts, fillvalue=("nothing", None)):
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


def refuse(index: Index) -> None:
    """Raise ValueError for the first part of the model that sharding would change; name it, and the remedy."""
    if not has_forward(index.root):
        raise ValueError(
            f"a {type(index.root).__name__} has no forward, so nothing says when to gather it; put it in a module "
            "that calls it, or shard its members one by one"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in _torch.every_module(index.model)):
        raise ValueError("the model holds a FullyShardedDataParallel (FSDP 1): shard what it holds in its place")
    for name, module in index.modules.items():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(f"{name or 'the model'!r} is a DistributedDataParallel: shard what it holds in its place")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.sparse:
                raise ValueError(f"{name!r} has sparse gradients, which cannot be reduce-scattered; set sparse=False")
            if module.max_norm is not None:
                raise ValueError(
                    f"{name!r} rescales its weight in forward (max_norm), which would be lost with the gathered copy; "
                    "set max_norm=None and rescale after the optimizer's step"
                )
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
            raise ValueError(
                f"{name!r} divides its gradients by how often an index occurs in a rank's own batch, not in all of it "
                "(scale_grad_by_freq); set it to False and divide in a hook on the weight, by counts over all ranks"
            )
    for held in index.parameters:
        # FSDP2 makes the parameter that autograd sees, and gives it no dtype of gradients.
        dtype = getattr(held.tensor, "grad_dtype", None)  # torch has it from 2.10 on, for leaves
        if dtype not in (None, held.tensor.dtype):
            raise ValueError(
                f"{held.name!r} asks for gradients in {dtype} (grad_dtype), and FSDP2 keeps them in the dtype of the "
                f"parameter: store it in {dtype} and compute in {held.tensor.dtype} by mixed_precision="
            )
    _refuse_shared_memory(index)


def _refuse_shared_memory(index: Index) -> None:
    """Raise for two parameters over the same memory, or a buffer: a tie that cannot be seen, and is cut by sharding."""
    spans: dict[int, list[tuple[int, int, str, str]]] = {}
    for kind, held in [
        *(("parameter", parameter) for parameter in index.parameters),
        *(("buffer", buffer) for buffer in index.buffers),
    ]:
        tensor = held.tensor
        if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.numel() == 0 or tensor.layout != torch.strided:
            continue
        extent = 1 + sum(int(n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.itemsize
        span = (start, start + extent * tensor.itemsize, held.name, kind)
        spans.setdefault(_torch.storage_identity(tensor), []).append(span)
    for members in spans.values():
        members.sort()
        for (_, end, one, kind), (start, _, two, other) in pairwise(members):
            if start < end and kind == other == "parameter":
                raise ValueError(
                    f"{one!r} and {two!r} are two parameters over the same memory; sharding would make them "
                    "independent. Assign the same Parameter to both names instead"
                )
            if start < end and kind != other:
                name, buffer = (one, two) if other == "buffer" else (two, one)
                raise ValueError(
                    f"the buffer {buffer!r} is a view of the parameter {name!r}, which sharding would cut off: make "
                    "it a copy, or read the parameter where the buffer is read"
                )
