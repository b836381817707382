"""Parameters of a model: chosen by glob, held whole or sharded, and copied row by row.

A glob such as `vision_tower.*` also matches `model.vision_tower.…`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.distributed import device_of
from trueshard.errors import UserError
from trueshard.model import names
from trueshard.model.names import matching
from trueshard.model.regions import copy_here, has_whole_rows
from trueshard.sharding.engine import sharded
from trueshard.text import nearest
from trueshard.train.models.quantized import QuantizedLinear, quantise


def match_globs(globs: Iterable[str], names: Collection[str], key: str, what: str = "parameter") -> list[str]:
    """Return the ``names`` that a glob matches, whole or after a dot, by glob; raise `UserError` if one has none."""
    result: dict[str, None] = {}
    for glob in globs:
        matches = [name for name in names if matching(f"*.{glob}", [f".{name}"])]
        if not matches:
            raise UserError(f"{key}: {glob!r} matches no {what} of {len(names)}.{nearest(glob, names, 1)}")
        result |= dict.fromkeys(matches)
    return list(result)


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Freeze what ``globs`` match. Raises `UserError` if one matches none, or nothing is left to train."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in match_globs(globs, parameters, "model.freeze"):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("model.freeze: nothing is left to train; leave out one of its globs")


def resting_device(model: nn.Module) -> torch.device:
    """Return the device where the shards of a sharded model rest between uses."""
    runtime = sharded(model)
    return torch.device("cpu") if runtime.plan.offload == "cpu" else device_of(runtime.mesh)


def give_memory(model: nn.Module) -> None:
    """Allocate a sharded model, with undefined values: parameters where shards rest, buffers where it computes."""
    root = names.unwrap(model)
    root.to_empty(device=resting_device(root))
    device = device_of(sharded(root).mesh)
    for module in root.modules():
        for name, buffer in _torch.own_buffers(module).items():
            if buffer is not None and buffer.device != device:
                _torch.own_buffers(module)[name] = torch.empty_like(buffer, device=device)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_module(target: nn.Module, source: nn.Module) -> None:
    """Copy all parameters and buffers, matched by order. Collective if placements differ.

    What ``target`` alone has quantised is quantised; for that ``source`` has to be sharded alike.
    """
    for kind in ("parameters", "buffers"):
        ours, theirs = (list(names.named_tensors(model, kind)) for model in (target, source))
        for (_, module, attribute, tensor), (_, other, _, value) in zip(ours, theirs, strict=True):
            if attribute == "packed" and isinstance(module, QuantizedLinear) and not isinstance(other, QuantizedLinear):
                if has_whole_rows(tensor) and has_whole_rows(value):
                    _torch.local(tensor).copy_(quantise(_torch.local(value), module.kind))
                else:
                    copy_tensor(tensor, quantise(gather(value), module.kind))
            else:
                copy_tensor(tensor, value)


@torch.no_grad()
def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy this rank's rows of ``source``, a whole or sharded tensor of the same shape."""
    if isinstance(source, DTensor) and isinstance(target, DTensor) and target.placements == source.placements:
        _torch.local(target).copy_(_torch.local(source))
    else:
        copy_here(target, gather(source))


@contextlib.contextmanager
def seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed random numbers from ``seed`` and ``name``, and restore the generators at the end."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield
