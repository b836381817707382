"""Makes the shards of many tensors whole with one collective, where ``full_tensor`` takes one for each.

Tensors travel as their bytes: torch's own way to pickle one takes longer than a step of these models.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard


def whole(value: Any) -> Any:
    """`value` with every tensor inside dicts, lists and tuples made a detached, whole CPU tensor of its own memory.

    A collective if there are DTensors in it: every rank calls it with the same structure.
    """
    shards: list[_Part] = []
    noted = _note(value, shards)
    return _filled(noted, _of_all(shards)) if shards else noted


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of `model`, whole, by name. Collective."""
    return whole(dict(model.named_parameters()))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of the parameters that have one, whole, by name. Collective."""
    return whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def whole_of_all(value: Any) -> list[Any]:
    """What `whole` is on each rank. Collective."""
    shards: list[_Part] = []
    told = _of_all((shards, _note(value, shards)))
    return [_filled(noted, [theirs for theirs, _ in told]) for _, noted in told]


@dataclass(frozen=True)
class _Part:
    """A rank's part of a tensor."""

    cut: tuple[int, ...]
    """for each dimension of the mesh, which part of the rows it is; -1: all"""
    values: torch.Tensor


@dataclass(frozen=True)
class _Place:
    number: int
    shape: tuple[int, ...]


def _note(value: Any, shards: list[_Part]) -> Any:
    """`value` with copies of its tensors, and a place for each tensor whose part is added to `shards`."""
    if isinstance(value, DTensor):
        mesh, placements = value.device_mesh, value.placements
        by_rows = all(type(each) is Replicate or (type(each) is Shard and each.dim == 0) for each in placements)
        local = value.detach().to_local()
        if not by_rows or type(local) is not torch.Tensor or mesh.size() != dist.get_world_size():
            return value.detach().full_tensor().cpu().clone()
        cut = [mesh.get_local_rank(dim) if each.is_shard() else -1 for dim, each in enumerate(placements)]
        shards.append(_Part(tuple(cut), local.cpu().clone()))
        return _Place(len(shards) - 1, tuple(value.shape))
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return _mapped(lambda each: _note(each, shards), value)


def _of_all(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, dumps(value))
    return [pickle.loads(each) for each in told]


def _filled(noted: Any, shards: list[list[_Part]]) -> Any:
    """What was noted, with whole tensors in their places."""
    if not isinstance(noted, _Place):
        return _mapped(lambda each: _filled(each, shards), noted)
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    for each in shards:
        part = each[noted.number]
        known = parts.setdefault(part.cut, part.values)
        assert torch.equal(part.values, known) or part.values.isnan().any(), "replicas differ"
    pieces = [parts[cut] for cut in sorted(parts)]
    made = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
    assert made.shape == noted.shape, f"shards of {made.shape} where the tensor has {noted.shape}"
    return made


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: function(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    return type(value)(map(function, value)) if isinstance(value, list | tuple) else value


def dumps(value: Any) -> bytes:
    """`value` pickled."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        content = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return _tensor, (content, value.dtype, tuple(value.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return (torch.frombuffer(bytearray(content), dtype=dtype) if content else empty).view(shape)
