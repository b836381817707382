"""The values of a sharded model: each rank fills its own rows, from files or by initialisation.

- Weights in files are read by rows. Random ones are made a block at a time with transformers' own initialisation, from
  ``train.seed`` and the block's name: the same at every number of ranks, and no rank holds more than a block.
- A quantised model is read in full precision by a twin that is sharded alike, and quantised row by row.
- Else (no safetensors, initialisation across blocks) each rank makes the whole model in host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.checkpoint.format import MANIFEST
from trueshard.checkpoint.layout import adapted_keys
from trueshard.checkpoint.materialise import initialisers, is_unwritten, mark_unwritten
from trueshard.checkpoint.state import model_tensors
from trueshard.errors import UserError, one_line, warn_user
from trueshard.model import names
from trueshard.model.units import choose_units
from trueshard.sharding.engine import sharded
from trueshard.text import nearest
from trueshard.train.config import Config
from trueshard.train.models import adapters, kernels, vocabulary
from trueshard.train.models.build import as_in_files, empty, is_first, with_model, with_values
from trueshard.train.models.parameters import copy_module, copy_tensor, give_memory, resting_device, seeded
from trueshard.train.models.quantized import QuantizedLinear


def fill(config: Config, model: nn.Module, settings: Any = None, *, is_loaded: bool = False) -> None:
    """Give memory and values to a sharded model on the meta device; one that has values stays as it is. Collective.

    ``settings``: the model's transformers configuration; None: the one that it has. ``is_loaded``: a checkpoint will be
    loaded, so what it holds needs no values. Raises `UserError`, on every rank, if the files lack tensors of the model.
    """
    root: Any = names.unwrap(model)
    if not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        return
    sharded(root)  # a model is filled after shard()
    if settings is None:
        settings = root.get_base_model().config if hasattr(root, "peft_config") else root.config
    if is_loaded:
        loaded = {id(part.tensor) for part in model_tensors(root)[0].values()}
        give_memory(root)
        if _initialise_blocks(root, empty(config, settings), config.train.seed, resting_device(root), loaded):
            return
        root.to_empty(device="meta")
    if any(isinstance(module, QuantizedLinear) for module in root.modules()):
        _fill_quantised(config, settings, root)
    elif config.model.path is None or not _read(config, settings, root):
        device = resting_device(root)
        give_memory(root)
        if (
            config.model.path
            or config.model.build
            or not _initialise_blocks(root, empty(config, settings), config.train.seed, device)
        ):
            copy_module(root, with_values(config, settings))
        elif hasattr(root, "peft_config"):
            adapters.initialise(root, empty(config, settings), config.train.seed, device)
    if hasattr(root, "peft_config"):
        adapters.settle(root)


def reference(config: Config, settings: Any, model: nn.Module) -> nn.Module | None:
    """Return the model before training, frozen, sharded like ``model`` and with its values. Collective.

    None with an adapter, which is turned off instead.
    """
    if config.adapter is not None:
        return None
    result, runtime = empty(with_model(config, freeze=[]), settings).requires_grad_(False).eval(), sharded(model)
    kernels.install(config.model, result)
    trueshard.shard(result, plan=runtime.plan, mesh=runtime.mesh)
    fill(config, result, settings)
    return result


def _fill_quantised(config: Config, settings: Any, root: nn.Module) -> None:
    plain, runtime = with_model(config, quantize="none"), sharded(root)
    twin = empty(plain, settings)
    with warnings.catch_warnings():  # that it may be a single unit: it is never gathered
        warnings.simplefilter("ignore")
        trueshard.shard(twin, mesh=runtime.mesh, offload=runtime.plan.offload)  # type: ignore[arg-type]
    fill(plain, twin)
    give_memory(root)
    copy_module(root, twin)


def _read(config: Config, settings: Any, root: nn.Module) -> bool:
    """Read this rank's rows from files; return False if they cannot be had by reading rows."""
    path, is_adapted = config.model.place(), hasattr(root, "peft_config")
    if not any(path.glob("*.safetensors")):
        return False
    if is_adapted:
        adapters.initialise(root, empty(config, settings), config.train.seed, resting_device(root))
    base_keys: dict[str, str] | None = None  # name → name before the model was adapted
    if (path / MANIFEST).is_file():  # one of our checkpoints; ``load`` knows other directories
        base_keys = {name: place.key for name, place in (adapted_keys(root, "") or {}).items() if place.stem == "model"}
    try:
        result = trueshard.load(path, model=root, strict=False, convert=True, rng=False, names=base_keys)
    except (ValueError, OSError) as error:
        text = one_line(error)
        if "more than reading bytes" in text:  # transformers can assemble it
            return False
        raise UserError(f"model.path: {text}") from error
    grows = config.tokenizer.add_tokens and result.mismatched
    grown = _read_grown(config, settings, root, base_keys) if grows else set()
    if lacking := sorted({*result.missing, *result.mismatched} - adapters.added(root) - grown):
        raise UserError(
            f"model.path: {path} has no {lacking[0]!r} of the model's shape (and {len(lacking) - 1} more); it holds "
            f"weights of another model.{nearest(lacking[0], result.unexpected)}"
        )
    if (unused := result.unexpected) and is_first():
        kind = _torch.own_class(root).__name__
        warn_user(f"{path} has {len(unused)} tensors that {kind} does not use, such as {unused[0]!r}")
    return True


def _read_grown(config: Config, settings: Any, root: Any, base_keys: dict[str, str] | None) -> set[str]:
    """Read embedding and head from files with fewer rows, and grow them; return their parameters' names.

    By a twin of the model in the files that has these two alone, whole in host memory.
    """
    bare, ours = with_model(config.model_copy(update={"adapter": None}), quantize="none"), vocabulary.ends(root)
    twin: Any = empty(with_model(bare, freeze=[]), as_in_files(config, settings))
    vocabulary.keep_ends(twin)
    trueshard.load(config.model.place(), model=twin, strict=False, convert=True, rng=False, names=base_keys)
    vocabulary.grow(twin, settings, config.train.seed)
    for target, source in zip(ours, vocabulary.ends(twin), strict=True):
        copy_module(target, source)
    held = {id(parameter) for module in ours for parameter in module.parameters()}
    return {name for name, parameter in root.named_parameters(remove_duplicate=False) if id(parameter) in held}


@torch.no_grad()
def _initialise_blocks(
    model: nn.Module, twin: nn.Module, seed: int, device: torch.device, loaded: Collection[int] = ()
) -> bool:
    """Give ``model`` its first values, except for its adapters; return False, with undefined values, if it cannot be.

    Each block of ``twin``, the same on the meta device and not sharded, gets memory for a while, and values; but those
    of whose tensors in ``model`` every ``id`` is in ``loaded``.
    """
    owners = initialisers(twin)
    tensors = {name: t for kind in ("parameters", "buffers") for name, _, _, t in names.named_tensors(model, kind)}
    added = adapters.added(twin)

    def initialise(module: nn.Module) -> None:
        if id(module) in owners:
            owners[id(module)](module)

    for name, module, below in list(_pieces(twin, "", set(choose_units(names.Index(twin), "auto")))):
        if all(id(tensors[key]) in loaded for key, _ in _tensors(name, module, below)):
            continue
        if not below and not _leaves_children(module, owners):
            return False
        module.to_empty(device=device, recurse=below)
        held = {key: tensor for key, tensor in _tensors(name, module, below) if tensor.numel()}
        for tensor in held.values():
            mark_unwritten(tensor)
        with seeded(seed, name, device):
            if below:
                module.apply(initialise)  # from the inside outwards
            else:
                initialise(module)
        for key, tensor in held.items():
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
    held = {id(tensor) for _, tensor in _tensors("", module, False)}
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in held]
    before = [_torch.version(tensor) for tensor in tensors]
    if id(module) in owners:
        owners[id(module)](module)
    return before == [_torch.version(tensor) for tensor in tensors]
