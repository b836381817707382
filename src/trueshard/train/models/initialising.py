"""First values of a model, a block at a time, by transformers' own initialisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trueshard import names
from trueshard.first_values import initialisers, is_unwritten, mark_unwritten
from trueshard.train.models.rows import copy_tensor, seeded
from trueshard.units import choose_units


@torch.no_grad()
def initialise(model: nn.Module, twin: nn.Module, seed: int, device: torch.device) -> bool:
    """Give ``model`` its first values, but for its adapters.

    Args:
        model: has memory; sharded or not.
        twin: the same on the meta device, not sharded. Each of its blocks gets memory for a while.
        seed: a block's values follow from it and the block's name.
        device: where blocks are initialised.

    Returns:
        False if the model's initialisation cannot be done by blocks; then values are undefined.
    """
    owners = initialisers(twin)
    tensors = {
        name: tensor
        for kind in ("parameters", "buffers")
        for name, _, _, tensor in names.named_tensors(names.unwrap(model), kind)
    }
    added = _added(twin)
    for name, module, below in list(_pieces(twin, "", set(choose_units(twin, "auto")))):
        if not below and not _leaves_children(module, owners):
            return False
        module.to_empty(device=device, recurse=below)
        own = {key: tensor for key, tensor in _tensors(name, module, below) if tensor.numel()}
        for tensor in own.values():
            mark_unwritten(tensor)
        with seeded(seed, name, device):
            for each in _upwards(module) if below else [module]:
                _run(each, owners)
        for key, tensor in own.items():
            if key in added:
                continue
            if is_unwritten(tensor):
                return False
            copy_tensor(tensors[key], tensor)
        module.to_empty(device="meta", recurse=below)
    return True


def _added(twin: nn.Module) -> set[str]:
    if not hasattr(twin, "peft_config"):
        return set()
    from trueshard.train.models.adapters import added

    return added(twin)


def _pieces(module: nn.Module, name: str, blocks: set[str]) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, with all below it?): children first, as transformers goes."""
    if name in blocks or not any(block.startswith(f"{name}." if name else "") for block in blocks):
        yield name, module, True
        return
    for child_name, child in module.named_children():
        yield from _pieces(child, f"{name}.{child_name}" if name else child_name, blocks)
    yield name, module, False


def _tensors(name: str, module: nn.Module, below: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(name, recurse=below, remove_duplicate=False)
    yield from module.named_buffers(name, recurse=below, remove_duplicate=False)


def _upwards(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _upwards(child)
    yield module


def _run(module: nn.Module, owners: dict[int, Any]) -> None:
    own = owners.get(id(module))
    if own is not None:
        own(module)


def _leaves_children(module: nn.Module, owners: dict[int, Any]) -> bool:
    """Whether a module that contains blocks, all on the meta device, writes to nothing below it."""
    tensors = [*module.parameters(), *module.buffers()]
    own = {id(tensor) for _, tensor in _tensors("", module, False)}
    before = [tensor._version for tensor in tensors]
    _run(module, owners)
    return all(
        tensor._version == version for tensor, version in zip(tensors, before, strict=True) if id(tensor) not in own
    )
