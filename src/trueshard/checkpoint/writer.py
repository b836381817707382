"""Saving: each rank writes what it holds; nothing is gathered; the directory appears when all of it is on disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Shard

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.manifest import Entry, Manifest, Piece
from trueshard.distributed import rows_of


def save(
    path: str | os.PathLike[str], *, model: Any = None, optimizer: Any = None, wait: bool = True, **more: Any
) -> None:
    """Write a checkpoint directory. Collective; has no effect on training.

    Args:
        path: the directory to make; it must not exist. It has this name only once it is complete.
        model: a module, sharded or not, or a dict of several.
        optimizer: an optimizer of their parameters, or a dict of several.
        wait: must be True: this version writes before it returns.
        more: nested dicts of tensors and JSON values, or objects with ``state_dict()``.

    Raises:
        FileExistsError: something is at ``path`` already.
        ValueError, TypeError: an argument that cannot be saved; the message names it.
        RuntimeError: another rank failed; nothing is left behind.
    """
    if not wait:
        raise ValueError("wait=False (saving in the background) is not in this version; leave it out")
    final = Path(path)
    rank, _ = _rank()
    partial = final.with_name(f".{final.name}.partial")
    error: BaseException | None = None
    mine_: Any = None
    try:
        manifest, tensors, optimizers = _collect(model, optimizer, more)
        mine_ = _only_here(tensors, optimizers)
        if rank == 0:
            _make_room(final, partial)
    except Exception as caught:
        error = caught
    everyone = _together(error, partial, mine_)
    try:
        writer_of = _merge(everyone, manifest, optimizers, tensors)
        pieces = _write(partial, rank, tensors, writer_of)
    except Exception as caught:
        error, pieces = caught, {}
    everyone = _together(error, partial, pieces)
    try:
        if rank == 0:
            for theirs in everyone:
                for key, piece in theirs.items():
                    manifest.tensors[key].pieces.append(piece)
            manifest.write(partial)
            _sync(partial)
            os.rename(partial, final)
            _sync_directory(final.parent)
    except Exception as caught:
        error = caught
    _together(error, partial)


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _make_room(final: Path, partial: Path) -> None:
    if final.exists():
        raise FileExistsError(f"{final} exists already; save under another name, or remove it first")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _together(error: BaseException | None, partial: Path, value: Any = None) -> list[Any]:
    """Every rank's value; if any rank failed, all raise and what was written is removed."""
    rank, world = _rank()
    told: list[Any] = [(None if error is None else f"{type(error).__name__}: {error}", value)]
    if world > 1:
        received: list[Any] = [None] * world
        dist.all_gather_object(received, told[0])
        told = received
    failed = [(i, message) for i, (message, _) in enumerate(told) if message is not None]
    if failed:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if error is not None:
            raise error
        raise RuntimeError(f"the checkpoint was not saved: rank {failed[0][0]} failed: {failed[0][1]}")
    return [value for _, value in told]


def _collect(
    model: Any, optimizer: Any, more: dict[str, Any]
) -> tuple[Manifest, state.Tensors, dict[str, dict[str, Any]]]:
    manifest = Manifest()
    tensors: state.Tensors = {}
    optimizers: dict[str, dict[str, Any]] = {}
    models = state.models_of(model)
    for prefix, module in models.items():
        found, manifest.ties[prefix] = state.model_tensors(module)
        tensors.update({f"{prefix}/{name}": tensor for name, tensor in found.items()})
    name_of = state.parameter_names(models)
    for prefix, each in state.optimizers_of(optimizer).items():
        found, optimizers[prefix] = state.optimizer_state(each, name_of)
        tensors.update({f"{prefix}/{key}": tensor for key, tensor in found.items()})
    for key, value in more.items():
        manifest.more[key] = state.split(value, f"more/{key}", tensors)
    return manifest, tensors, optimizers


def _entry(tensor: torch.Tensor) -> Entry:
    return Entry(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _only_here(tensors: state.Tensors, optimizers: dict[str, dict[str, Any]]) -> Any:
    """What another rank may not have: the state of a parameter that is updated by its owner."""
    plain = {
        key: _entry(tensor)
        for key, tensor in tensors.items()
        if key.startswith("optimizer") and not isinstance(tensor, DTensor)
    }
    return plain, {prefix: rest["values"] for prefix, rest in optimizers.items()}


def _merge(
    everyone: list[Any], manifest: Manifest, optimizers: dict[str, dict[str, Any]], tensors: state.Tensors
) -> dict[str, int]:
    """Complete the manifest with what other ranks have; returns which rank writes each plain tensor of a state."""
    writer_of: dict[str, int] = {}
    for rank, (plain, values) in enumerate(everyone):
        for key, entry in plain.items():
            writer_of.setdefault(key, rank)
            manifest.tensors.setdefault(key, entry)
        for prefix, theirs in values.items():
            optimizers[prefix]["values"] = theirs | optimizers[prefix]["values"]
    for prefix, rest in optimizers.items():
        settings: state.Tensors = {}
        manifest.optimizers[prefix] = state.split(rest, f"{prefix}/settings", settings)
        tensors.update(settings)
    for key, tensor in tensors.items():
        manifest.tensors[key] = _entry(tensor)
    return writer_of


def mine(tensor: torch.Tensor) -> tuple[int, int]:
    """(first row, rows) of the piece of ``tensor`` on this rank; a 0-dim or plain tensor is whole everywhere."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, rows
    mesh, start, count = tensor.device_mesh, 0, rows
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            start, count = rows_of(rows, mesh.get_local_rank(dim), mesh.size(dim))
    return start, count


def _writes(tensor: torch.Tensor, rank: int, writer: int) -> bool:
    """Whether this rank writes its piece: one of the ranks that hold the same piece does."""
    if not isinstance(tensor, DTensor):
        return rank == writer
    mesh = tensor.device_mesh
    return all(
        isinstance(placement, Shard) or mesh.get_local_rank(dim) == 0 for dim, placement in enumerate(tensor.placements)
    )


def _write(partial: Path, rank: int, tensors: state.Tensors, writer_of: dict[str, int]) -> dict[str, Piece]:
    file = f"rank-{rank:05d}.safetensors"
    pieces: dict[str, Piece] = {}
    held: state.Tensors = {}
    for key, tensor in tensors.items():
        start, rows = mine(tensor)
        if _writes(tensor, rank, writer_of.get(key, 0)) and (rows or not isinstance(tensor, DTensor)):
            # A copy: two names may share memory, which safetensors refuses, and shards are views of padded storage.
            held[key] = _torch.local(tensor).detach().to("cpu", copy=True).contiguous()
            pieces[key] = Piece(file, start, rows)
    if held:
        save_file(held, partial / file)
    return pieces


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
