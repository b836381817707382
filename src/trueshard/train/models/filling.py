"""Values for a sharded model that was built on the meta device; each rank gets its own rows.

- Weights in files are read by rows. Random ones are made a block at a time with transformers' own initialisation, from
  ``train.seed`` and the block's name: the same at every number of ranks, and no rank holds more than a block.
- A quantised model is read in full precision by a twin that is sharded alike, and quantised row by row.
- Else (no safetensors, initialisation across blocks) each rank makes the whole model in host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.checkpoint.format import MANIFEST
from trueshard.checkpoint.layout import adapted_keys
from trueshard.errors import UserError, one_line
from trueshard.model import names
from trueshard.model.first_values import initialisers, is_unwritten, mark_unwritten
from trueshard.model.units import choose_units
from trueshard.runtime.engine import sharded
from trueshard.train.config import Config
from trueshard.train.models import adapters
from trueshard.train.models.build import empty, with_values
from trueshard.train.models.parameters import copy_module, copy_tensor, give_memory, resting_device, seeded
from trueshard.train.models.quantized import QuantizedLinear


def fill(config: Config, model: nn.Module) -> None:
    """Give memory and values to a sharded model on the meta device; one that has values stays as it is. Collective.

    Raises `UserError`, on every rank, if the files lack tensors of the model.
    """
    root = names.unwrap(model)
    if not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        return
    base: Any = root
    sharded(root)  # a model is filled after shard()
    settings = base.get_base_model().config if hasattr(root, "peft_config") else base.config
    if any(isinstance(module, QuantizedLinear) for module in root.modules()):
        _fill_quantised(config, settings, root)
    elif config.model.path is not None:
        _read(config, settings, root)
    else:
        device = resting_device(root)
        give_memory(root)
        if not _initialise_blocks(root, empty(config, settings), config.train.seed, device):
            copy_module(root, with_values(config, settings))
        elif hasattr(root, "peft_config"):
            adapters.initialise(root, empty(config, settings), config.train.seed, device)
    if hasattr(root, "peft_config"):
        adapters.settle(root)


def _fill_quantised(config: Config, settings: Any, root: nn.Module) -> None:
    plain = config.model_copy(update={"model": config.model.model_copy(update={"quantize": "none"})})
    twin = empty(plain, settings)
    runtime = sharded(root)
    with warnings.catch_warnings():  # that it may be a single unit: it is never gathered
        warnings.simplefilter("ignore")
        trueshard.shard(twin, mesh=runtime.mesh, offload=runtime.plan.offload)
    fill(plain, twin)
    give_memory(root)
    copy_module(root, twin)


def _read(config: Config, settings: Any, root: nn.Module) -> None:
    path = config.model.place()
    adapted = hasattr(root, "peft_config")
    if not any(path.glob("*.safetensors")):
        give_memory(root)
        copy_module(root, with_values(config, settings))
        return
    if adapted:
        adapters.initialise(root, empty(config, settings), config.train.seed, resting_device(root))
    known: dict[str, str] | None = None  # name → name before the model was adapted
    if (path / MANIFEST).is_file():  # one of our checkpoints; ``load`` knows other directories
        known = {name: place.key for name, place in (adapted_keys(root, "") or {}).items() if place.stem == "model"}
    try:
        found = trueshard.load(path, model=root, strict=False, convert=True, rng=False, names=known)
    except (ValueError, OSError) as error:
        text = one_line(error)
        if "more than reading bytes" in text:  # transformers can assemble it
            give_memory(root)
            copy_module(root, with_values(config, settings))
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


@torch.no_grad()
def _initialise_blocks(model: nn.Module, twin: nn.Module, seed: int, device: torch.device) -> bool:
    """Give ``model`` its first values, except for its adapters; return False, with undefined values, if it cannot be.

    Each block of ``twin``, the same on the meta device and not sharded, gets memory for a while, and values.
    """
    owners = initialisers(twin)
    tensors = {name: t for kind in ("parameters", "buffers") for name, _, _, t in names.named_tensors(model, kind)}
    added = adapters.added(twin) if hasattr(twin, "peft_config") else set()

    def initialise(each: nn.Module) -> None:
        if id(each) in owners:
            owners[id(each)](each)

    for name, module, below in list(_pieces(twin, "", set(choose_units(twin, "auto")))):
        if not below and not _leaves_children(module, owners):
            return False
        module.to_empty(device=device, recurse=below)
        own = {key: tensor for key, tensor in _tensors(name, module, below) if tensor.numel()}
        for tensor in own.values():
            mark_unwritten(tensor)
        with seeded(seed, name, device):
            if below:
                module.apply(initialise)  # from the inside outwards
            else:
                initialise(module)
        for key, tensor in own.items():
            if key in added:
                continue
            if is_unwritten(tensor):
                return False
            copy_tensor(tensors[key], tensor)
        module.to_empty(device="meta", recurse=below)
    return True


def _pieces(module: nn.Module, name: str, blocks: set[str]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name, module, True if with all modules below it): children first, as transformers does."""
    if name in blocks or not any(block.startswith(f"{name}." if name else "") for block in blocks):
        yield name, module, True
        return
    for child_name, child in module.named_children():
        yield from _pieces(child, f"{name}.{child_name}" if name else child_name, blocks)
    yield name, module, False


def _tensors(name: str, module: nn.Module, below: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(name, recurse=below, remove_duplicate=False)
    yield from module.named_buffers(name, recurse=below, remove_duplicate=False)


def _leaves_children(module: nn.Module, owners: dict[int, Callable[[nn.Module], Any]]) -> bool:
    """True if initialising a module that contains blocks, all on the meta device, writes to nothing below it."""
    own = {id(tensor) for _, tensor in _tensors("", module, False)}
    tensors = [each for each in (*module.parameters(), *module.buffers()) if id(each) not in own]
    before = [_torch.version(tensor) for tensor in tensors]
    if id(module) in owners:
        owners[id(module)](module)
    return before == [_torch.version(tensor) for tensor in tensors]
