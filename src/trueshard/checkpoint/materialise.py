"""Give memory to models on the meta device, so that values can be loaded into them.

- Parameters and buffers remain the same objects, so that optimizers, ties and hooks go on with them.
- What is loaded is a copy: a map of the file would change when somebody writes to the file.
- What is in no checkpoint (mostly non-persistent buffers) is computed as the model itself does: by ``_init_weights`` of
  transformers, or ``reset_parameters``. Memory is marked before, so that tensors which none has written are found.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.format import dtype_of
from trueshard.distributed import device_of
from trueshard.model import names
from trueshard.model.regions import copy_here

HOST = torch.device("cpu")
_UNWRITTEN = 0xA5
"""Byte that fills an unwritten tensor."""


def uncomputable(model: nn.Module, loaded: set[int]) -> list[str]:
    """Return the names of meta tensors, not among ``loaded`` (ids), that nothing computes."""
    owners = initialisers(names.unwrap(model))
    return [name for name, module, tensor in _meta_tensors(model, loaded) if not _functions(owners, module)]


def materialise(model: nn.Module, key_of: Mapping[int, str], mapping: Catalogue | None = None) -> set[int]:
    """Give memory to meta tensors; return the ``id`` of each one that has its values now.

    Args:
        model: may be sharded.
        key_of: ``id`` of a tensor that is to be loaded → its key.
        mapping: has the values of plain tensors that may be private maps of its files, for a model that lives shortly.
    """
    owners, offloaded = initialisers(names.unwrap(model)), _torch.offloaded(names.unwrap(model))
    sharded = next((tensor for tensor in model.parameters() if isinstance(tensor, DTensor)), None)
    computing = HOST if sharded is None else device_of(sharded.device_mesh)
    left = list(_meta_tensors(model, set(key_of)))
    filled = {id(tensor) for _, _, tensor in left}
    for tensor in {id(tensor): tensor for _, _, tensor in left}.values():
        give_memory(tensor, None, HOST if id(tensor) in offloaded else computing)
    # While all else is on the meta device, what is written to it costs nothing and leaves nothing behind.
    for module in {id(module): module for _, module, _ in left}.values():
        _initialise(module, _functions(owners, module), {id(tensor): name for name, _, tensor in left})
    for _, _, tensor in _meta_tensors(model, set()):
        if tensor.is_meta:  # not replaced under another name
            key = key_of.get(id(tensor))
            mapped = None if key is None or mapping is None else _mapped(mapping, key, tensor)
            give_memory(tensor, mapped, HOST if id(tensor) in offloaded else computing)
            if mapped is not None:
                filled.add(id(tensor))
    return filled


def _meta_tensors(model: nn.Module, loaded: set[int]) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    for kind in ("parameters", "buffers"):
        for name, module, _, tensor in names.named_tensors(model, kind):
            if tensor.is_meta and id(tensor) not in loaded:
                yield name, module, tensor


def give_memory(tensor: torch.Tensor, local: torch.Tensor | None, device: torch.device) -> None:
    """Replace the memory of ``tensor``, not the object, by ``local``, or by uninitialised memory of its shape."""
    local = torch.empty_like(_torch.local(tensor), device=device) if local is None else local
    new = _torch.dtensor_over(local, tensor, tensor.shape, tensor.stride()) if isinstance(tensor, DTensor) else local
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    new.__dict__.update(tensor.__dict__ | new.__dict__)
    torch.utils.swap_tensors(tensor, new)


def _mapped(catalogue: Catalogue, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor as it lies in the file; None where it has to be copied."""
    if dtype_of(catalogue.entries[key].dtype) != tensor.dtype or not tensor.is_contiguous() or not tensor.numel():
        return None
    pieces = [piece for piece, _ in catalogue.ranges(key, 0, catalogue.entries[key].nbytes)]
    if len(pieces) != 1 or pieces[0].begin % tensor.dtype.itemsize:
        return None
    if (buffer := catalogue.directory.mapped(pieces[0].file, mmap.ACCESS_COPY)) is None:
        return None
    flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=pieces[0].begin)
    return flat.view(tensor.shape)


def initialisers(root: nn.Module) -> dict[int, Callable[[nn.Module], Any]]:
    """Return ``id`` of a module → the ``_init_weights`` of the nearest transformers model around it."""
    result: dict[int, Callable[[nn.Module], Any]] = {}
    for owner in root.modules():  # from the outside inwards
        initialise = getattr(owner, "_init_weights", None)
        if callable(initialise) and isinstance(getattr(owner, "base_model_prefix", None), str):
            result |= {id(module): initialise for module in owner.modules()}
    return result


def mark_unwritten(tensor: torch.Tensor) -> None:
    """Fill the memory of a tensor, or of its local shard, with bytes that no initialisation writes throughout."""
    _bytes(tensor).fill_(_UNWRITTEN)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """True if nothing was written to a tensor since ``mark_unwritten``."""
    return bool((_bytes(tensor) == _UNWRITTEN).all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    local = _torch.local(tensor)
    return torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())


def _functions(owners: Mapping[int, Any], module: nn.Module) -> list[Callable[[], Any]]:
    """Return the functions that may compute the tensors of ``module``, in the order to try them."""
    initialise, reset = owners.get(id(module)), getattr(module, "reset_parameters", None)
    return ([] if initialise is None else [lambda: initialise(module)]) + ([reset] if callable(reset) else [])


def _initialise(module: nn.Module, functions: list[Callable[[], Any]], left: Mapping[int, str]) -> None:
    """Compute the tensors of ``module`` that are in ``left`` (``id`` → name), and change no other."""
    held = [t for t in (*_torch.own_parameters(module).values(), *_torch.own_buffers(module).values()) if t is not None]
    others = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in left and not t.is_meta]
    before = [_torch.local(tensor).clone() for tensor in others]
    targets = [t for t in held if id(t) in left and _torch.local(t).numel()]
    for tensor in targets:
        mark_unwritten(tensor)
    for function in functions:
        try:
            function()
        except RuntimeError:  # it copies from a whole tensor, which does not fit a shard
            _initialise_full(module, function)
        if not any(map(is_unwritten, targets)):
            break
    else:
        name = next((left[id(t)] for t in targets if is_unwritten(t)), None)
        raise ValueError(
            f"{name!r} is in no checkpoint, and neither _init_weights nor reset_parameters of its module computes it: "
            "build the model off the meta device"
        )
    for tensor, value in zip(others, before, strict=True):
        _torch.local(tensor).copy_(value)


def _initialise_full(module: nn.Module, function: Callable[[], Any]) -> None:
    """Compute full tensors, as on one device, and keep this rank's rows."""
    sharded: list[tuple[Any, str, DTensor]] = []
    for held in (_torch.own_parameters(module), _torch.own_buffers(module)):
        sharded += [(held, name, t) for name, t in held.items() if isinstance(t, DTensor) and not t.is_meta]
    try:
        for held, attribute, tensor in sharded:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device_of(tensor.device_mesh))
            is_parameter = isinstance(tensor, nn.Parameter)
            held[attribute] = nn.Parameter(full, tensor.requires_grad) if is_parameter else full
        function()
        for held, attribute, tensor in sharded:
            copy_here(tensor, held[attribute])
    finally:
        for held, attribute, tensor in sharded:
            held[attribute] = tensor
