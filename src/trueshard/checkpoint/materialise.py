"""Gives memory to models on the meta device, so that values can be loaded into them.

- Parameters and buffers stay the objects they are, so optimizers, ties and hooks go on with them.
- What is loaded is not initialised before; on the CPU it is, where rows lie in one piece, a private map of the file:
  read when it is used, copied when it is written to.
- What no checkpoint has (buffers that are not persistent, mostly) is computed as the model itself does: by the
  ``_init_weights`` of a transformers model, or by ``reset_parameters`` of the module that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch, names
from trueshard.checkpoint import pieces
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.distributed import device_of
from trueshard.first_values import initialisers, is_unwritten, mark_unwritten


def uncomputable(model: nn.Module, loaded: set[int]) -> list[str]:
    """Names of what is on the meta device, not among ``loaded`` (ids), and nobody computes."""
    owners = initialisers(names.unwrap(model))
    return [name for name, module, _, _ in _left(model, loaded) if not _ways(owners, module)]


def materialise(model: nn.Module, catalogue: Catalogue, key_of: Mapping[int, str]) -> set[int]:
    """Give memory to what is on the meta device.

    Args:
        model: sharded or not.
        catalogue: where values come from.
        key_of: ``id`` of tensors that will be loaded → their key.

    Returns:
        The ``id`` of each tensor that has its values now.

    Raises:
        ValueError: what should compute a tensor does not; the message names it.
    """
    owners, place = initialisers(names.unwrap(model)), _places(model)
    left = list(_left(model, set(key_of)))
    filled = {id(tensor) for _, _, _, tensor in left}
    for tensor in {id(tensor): tensor for _, _, _, tensor in left}.values():
        _give(tensor, None, place(tensor))
    # While all else is on the meta device, what is written to it costs nothing and leaves nothing behind.
    for module in {id(module): module for _, module, _, _ in left}.values():
        _initialise(module, _ways(owners, module), {id(tensor): name for name, _, _, tensor in left})
    for kind in ("parameters", "buffers"):
        for _, _, _, tensor in names.named_tensors(model, kind):
            if tensor.is_meta:
                key = key_of.get(id(tensor))
                mapped = None if key is None else _mapped(catalogue, key, tensor)
                _give(tensor, mapped, place(tensor))
                if mapped is not None:
                    filled.add(id(tensor))
    return filled


def _left(model: nn.Module, loaded: set[int]) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for kind in ("parameters", "buffers"):
        for name, module, attribute, tensor in names.named_tensors(model, kind):
            if tensor.is_meta and id(tensor) not in loaded:
                yield name, module, attribute, tensor


def _places(model: nn.Module) -> Callable[[torch.Tensor], torch.device]:
    """A function that tells where a tensor belongs: a shard where it rests, all else where the model computes."""
    offloaded, host = _torch.offloaded(names.unwrap(model)), torch.device("cpu")
    sharded = next((tensor for tensor in model.parameters() if isinstance(tensor, DTensor)), None)
    computing = host if sharded is None else device_of(sharded.device_mesh)
    return lambda tensor: host if id(tensor) in offloaded else computing


def _give(tensor: torch.Tensor, local: torch.Tensor | None, device: torch.device) -> None:
    """Replace ``tensor``'s content, not the object, by memory of the same shape, or by ``local``."""
    if isinstance(tensor, DTensor):
        shard = _torch.local(tensor)
        memory = torch.empty(shard.shape, dtype=shard.dtype, device=device) if local is None else local
        new: torch.Tensor = _torch.dtensor_over(memory, tensor, tensor.shape, tensor.stride())
    else:
        new = (
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if local is None
            else local
        )
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    attributes = dict(tensor.__dict__)
    torch.utils.swap_tensors(tensor, new)
    for name, value in attributes.items():
        if name not in tensor.__dict__:
            setattr(tensor, name, value)


def _mapped(catalogue: Catalogue, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's rows as they lie in the file, or None where they have to be copied."""
    on_cpu = not isinstance(tensor, DTensor) or device_of(tensor.device_mesh).type == "cpu"
    if not on_cpu or (isinstance(tensor, DTensor) and not pieces.is_unpadded(tensor)):
        return None
    entry = catalogue.entries[key]
    local = _torch.local(tensor)
    if getattr(torch, entry.dtype) != tensor.dtype or not local.is_contiguous() or not local.numel():
        return None
    begin, end = pieces.bytes_here(tensor)
    parts = list(catalogue.ranges(key, begin, end))
    if len(parts) != 1 or parts[0][0].begin % tensor.dtype.itemsize:
        return None
    buffer = catalogue.store.private(parts[0][0].file)
    if buffer is None:
        return None
    flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=local.numel(), offset=parts[0][0].begin)
    return flat.view(local.shape)


def _ways(owners: Mapping[int, Any], module: nn.Module) -> list[Callable[[], Any]]:
    """What may compute the tensors of ``module``, in the order in which it is tried."""
    own, reset = owners.get(id(module)), getattr(module, "reset_parameters", None)
    return ([] if own is None else [lambda: own(module)]) + ([reset] if callable(reset) else [])


def _initialise(module: nn.Module, ways: list[Callable[[], Any]], left: Mapping[int, str]) -> None:
    """Compute what is left of ``module`` (``id`` → name), and nothing else in it."""
    held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    others = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in left and not t.is_meta]
    before = [_torch.local(tensor).clone() for tensor in others]
    wanted = [t for t in held if id(t) in left and _torch.local(t).numel()]
    for tensor in wanted:
        mark_unwritten(tensor)
    for run in ways:
        try:
            run()
        except RuntimeError:  # it copies from a tensor of its own, which does not go into a shard
            _initialise_whole(module, run)
        if not any(map(is_unwritten, wanted)):
            break
    else:
        name = next((left[id(t)] for t in wanted if is_unwritten(t)), None)
        raise ValueError(
            f"{name!r} is in no checkpoint, and neither _init_weights nor reset_parameters of its module computes it: "
            "build the model off the meta device"
        )
    for tensor, value in zip(others, before, strict=True):
        _torch.local(tensor).copy_(value)


def _initialise_whole(module: nn.Module, run: Callable[[], Any]) -> None:
    """Compute tensors as one device has them, and keep this rank's rows."""
    sharded: list[tuple[Any, str, DTensor]] = []
    for held in (module._parameters, module._buffers):
        sharded += [(held, name, t) for name, t in held.items() if isinstance(t, DTensor) and not t.is_meta]
    try:
        for held, attribute, tensor in sharded:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device_of(tensor.device_mesh))
            held[attribute] = nn.Parameter(whole, tensor.requires_grad) if held is module._parameters else whole
        run()
        for held, attribute, tensor in sharded:
            start, rows = pieces.rows_here(tensor)
            local = _torch.local(tensor)
            (local[:rows] if local.ndim else local).copy_(
                held[attribute][start : start + rows] if local.ndim else held[attribute]
            )
    finally:
        for held, attribute, tensor in sharded:
            held[attribute] = tensor
