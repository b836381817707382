"""Values that go from whole tensors, or tensors sharded alike, into sharded ones."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch, names
from trueshard.checkpoint.pieces import rows_here
from trueshard.distributed import device_of
from trueshard.runtime import runtime_of


def resting_device(model: nn.Module) -> torch.device:
    """Where the shards of a sharded model rest between uses."""
    runtime = runtime_of(names.unwrap(model))
    assert runtime is not None
    return torch.device("cpu") if runtime.plan.offload == "cpu" else device_of(runtime.mesh)


def give_memory(model: nn.Module) -> None:
    """Undefined values to all of a sharded model: parameters where its shards rest, buffers where it computes."""
    root = names.unwrap(model)
    root.to_empty(device=resting_device(root))
    runtime = runtime_of(root)
    assert runtime is not None
    device = device_of(runtime.mesh)
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def memory(module: nn.Module, attribute: str) -> torch.Tensor:
    """A parameter as it is held, whatever reading the attribute gives."""
    found = module._parameters[attribute]
    assert found is not None
    return found


@torch.no_grad()
def copy_rows(target: nn.Module, source: nn.Module) -> None:
    """Copy all parameters and buffers; names in order are the same. Collective where these are sharded otherwise."""
    for kind in ("parameters", "buffers"):
        ours, theirs = (list(names.named_tensors(each, kind)) for each in (target, source))
        for (_, _, _, tensor), (_, _, _, value) in zip(ours, theirs, strict=True):
            copy_tensor(tensor, value)


@torch.no_grad()
def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy this rank's rows of ``source``."""
    if isinstance(source, DTensor):
        if isinstance(target, DTensor) and target.placements == source.placements:
            _torch.local(target).copy_(_torch.local(source))
            return
        source = source.full_tensor()
    start, rows = rows_here(target)
    local = _torch.local(target)
    if local.ndim:
        local[:rows].copy_(source[start : start + rows])
    else:
        local.copy_(source)


@contextlib.contextmanager
def seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Random numbers inside follow from ``seed`` and ``name``; those after it are as if nothing had been."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield
