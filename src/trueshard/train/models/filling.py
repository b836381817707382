"""Gives a model that was built without memory its values, after ``shard()``: each rank gets its own rows.

- Weights in files are read by rows. Random ones are made a block at a time, by transformers' own initialisation, from
  ``train.seed`` and the block's name: the same at every number of ranks, and no rank ever holds more than a block.
- A quantised model is read in full precision by a twin that is sharded alike, and quantised row by row.
- What that cannot do (files that are not safetensors, a model whose initialisation crosses blocks) is done in host
  memory, whole, on every rank.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard import _torch, names
from trueshard.checkpoint.layout import adapted_places
from trueshard.checkpoint.manifest import MANIFEST
from trueshard.errors import UserError, one_line
from trueshard.runtime import runtime_of
from trueshard.train.config import Config
from trueshard.train.models import adapters
from trueshard.train.models.initialising import initialise
from trueshard.train.models.making import empty, with_values
from trueshard.train.models.quantized import QuantizedLinear, quantise
from trueshard.train.models.rows import copy_tensor, give_memory, memory, resting_device


def fill(config: Config, model: nn.Module) -> None:
    """Give memory and values to all of ``model`` that is on the meta device. Collective.

    Args:
        config: that ``build`` was given.
        model: what ``build`` or ``reference`` returned, sharded; one that has its values is left alone.

    Raises:
        UserError: the files do not have what the model needs; on every rank.
    """
    root = names.unwrap(model)
    if not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        return
    base: Any = root
    assert runtime_of(root) is not None, "a model is filled after shard()"
    settings = base.get_base_model().config if _is_adapted(root) else base.config
    if any(isinstance(module, QuantizedLinear) for module in root.modules()):
        _fill_quantised(config, settings, root)
    elif config.model.path is not None:
        _read(config, settings, root)
    else:
        _initialise(config, settings, root)
    if _is_adapted(root):
        adapters.settle(root)


def _is_adapted(root: nn.Module) -> bool:
    return hasattr(root, "peft_config")


def _fill_quantised(config: Config, settings: Any, root: nn.Module) -> None:
    plain = config.model_copy(update={"model": config.model.model_copy(update={"quantize": "none"})})
    twin = empty(plain, settings)
    runtime = runtime_of(root)
    assert runtime is not None
    with warnings.catch_warnings():  # that it is one unit, where it is: it is never gathered
        warnings.simplefilter("ignore")
        trueshard.shard(twin, mesh=runtime.mesh, offload=runtime.plan.offload)
    fill(plain, twin)
    _take(root, twin)


def _initialise(config: Config, settings: Any, root: nn.Module) -> None:
    device = resting_device(root)
    give_memory(root)
    if not initialise(root, empty(config, settings), config.train.seed, device):
        _take(root, with_values(config, settings))
    elif _is_adapted(root):
        adapters.initialise(root, empty(config, settings), config.train.seed, device)


def _read(config: Config, settings: Any, root: nn.Module) -> None:
    path = config.model.place()
    adapted = _is_adapted(root)
    if not any(path.glob("*.safetensors")):
        _take(root, with_values(config, settings))
        return
    if adapted:
        adapters.initialise(root, empty(config, settings), config.train.seed, resting_device(root))
    try:
        found = trueshard.load(path, model=root, strict=False, convert=True, rng=False, names=_base_names(root, path))
    except (ValueError, OSError) as error:
        text = one_line(error)
        if "more than reading bytes" in text:  # then transformers can put it together
            _take(root, with_values(config, settings))
            return
        raise UserError(f"model.path: {text}") from error
    added = adapters.added(root) if adapted else set()
    lacking = sorted({*found.missing, *found.mismatched} - added)
    if lacking:
        raise UserError(
            f"model.path: {path} has no {lacking[0]!r} of the model's shape (and {len(lacking) - 1} more); it holds "
            f"weights of another model.{names.nearest(lacking[0], found.unexpected)}"
        )
    if found.unexpected and (not dist.is_initialized() or dist.get_rank() == 0):
        kind, unused = _torch.own_class(root).__name__, found.unexpected
        warnings.warn(f"{path} has {len(unused)} tensors that {kind} does not use, such as {unused[0]!r}", stacklevel=2)


def _base_names(root: nn.Module, path: Path) -> dict[str, str] | None:
    """For an adapted model and a checkpoint of the library's own: name → name in the model before it was adapted.

    In other directories ``load`` finds these by itself.
    """
    if not (path / MANIFEST).is_file():
        return None
    places = adapted_places(root, "") or {}
    return {name: place.key for name, place in places.items() if place.stem == "model"}


def _take(root: nn.Module, donor: nn.Module) -> None:
    """Copy, or quantise, what a model of the same structure has: whole, or sharded alike."""
    give_memory(root)
    donors = dict(names.named_modules(donor))
    for name, module in names.named_modules(root):
        other = donors[name]
        if isinstance(module, QuantizedLinear) and not isinstance(other, QuantizedLinear):
            _quantise_rows(module, other)
        else:
            _copy_own(module, other)


def _copy_own(module: nn.Module, other: nn.Module) -> None:
    for held, theirs in ((module._parameters, other._parameters), (module._buffers, other._buffers)):
        for attribute, tensor in held.items():
            source = theirs[attribute]
            if tensor is not None and source is not None:
                copy_tensor(tensor, source)


@torch.no_grad()
def _quantise_rows(module: QuantizedLinear, other: nn.Module) -> None:
    weight = memory(other, "weight")
    packed = quantise(_torch.local(weight), module.kind)
    if _torch.local(module.packed).shape == packed.shape:
        _torch.local(module.packed).copy_(packed)
    else:  # the donor is whole
        copy_tensor(module.packed, packed)
    if module.bias is not None:
        copy_tensor(memory(module, "bias"), memory(other, "bias"))
