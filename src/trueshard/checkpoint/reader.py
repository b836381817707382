"""Loading in place, at any world size: each rank reads the rows it holds, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.manifest import Entry, Manifest
from trueshard.checkpoint.writer import mine
from trueshard.names import nearest
from trueshard.optim.rebind import is_placed_alike


def load(path: str | os.PathLike[str], *, model: Any = None, optimizer: Any = None, **more: Any) -> dict[str, Any]:
    """Load a checkpoint that ``save`` wrote into ``model`` and ``optimizer``, in place.

    Everything is checked against the checkpoint before anything is changed.

    Args:
        path: the checkpoint directory.
        model: as given to ``save``: the same names and shapes, any sharding.
        optimizer: as given to ``save``; its groups must hold the same parameters.
        more: entries to load in place, by the name they were saved under: objects with ``load_state_dict()``.

    Returns:
        The saved entries that are not in ``more``, by name.

    Raises:
        FileNotFoundError: no checkpoint is at ``path``.
        ValueError: the checkpoint is damaged, or of another model; the message names the tensor.
    """
    reader = _Reader(Path(path))
    manifest = reader.manifest
    models = state.models_of(model)
    targets: list[tuple[str, torch.Tensor]] = []
    for prefix, module in models.items():
        tensors, _ = state.model_tensors(module)
        saved = {key for key in manifest.tensors if key.startswith(f"{prefix}/")}
        for name, tensor in tensors.items():
            reader.check(f"{prefix}/{name}", tensor)
            targets.append((f"{prefix}/{name}", tensor))
        if extra := sorted(saved - {f"{prefix}/{name}" for name in tensors}):
            raise ValueError(f"{path} holds {extra[0]!r}, which the model does not have")
    name_of = state.parameter_names(models)
    optimizers = state.optimizers_of(optimizer)
    for prefix, each in optimizers.items():
        _check_groups(prefix, each, name_of, reader)
    for key in more:
        if key not in manifest.more:
            raise ValueError(f"{path} has no entry {key!r}.{nearest(key, manifest.more)}")
    with torch.no_grad():
        for key, tensor in targets:
            reader.read_into(key, tensor)
        for prefix, each in optimizers.items():
            _load_optimizer(prefix, each, name_of, reader)
    found = {key: reader.entry(value) for key, value in manifest.more.items()}
    for key, value in more.items():
        value.load_state_dict(found.pop(key))
    return found


class _Reader:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = Manifest.read(directory)

    def check(self, key: str, tensor: torch.Tensor) -> None:
        entry = self.manifest.tensors.get(key)
        if entry is None:
            raise ValueError(f"{self.directory} has no {key!r}.{nearest(key, self.manifest.tensors)}")
        if entry.shape != list(tensor.shape):
            raise ValueError(f"{self.directory}: {key!r} has shape {entry.shape}, the model's has {list(tensor.shape)}")

    def read_into(self, key: str, tensor: torch.Tensor) -> None:
        """Fill this rank's part of ``tensor``; the dtype is the tensor's own."""
        entry = self.manifest.tensors[key]
        local = _torch.local(tensor)
        start, rows = mine(tensor)
        for piece in entry.pieces:
            low, high = max(start, piece.start), min(start + rows, piece.start + piece.rows)
            if tensor.ndim and low >= high:
                continue
            with safe_open(self._file(piece.file), framework="pt") as file:
                if tensor.ndim == 0:
                    local.copy_(file.get_tensor(key))
                else:
                    part = file.get_slice(key)[low - piece.start : high - piece.start]
                    local[low - start : high - start].copy_(part)

    def _file(self, name: str) -> Path:
        if Path(name).name != name:
            raise ValueError(f"{self.directory}: the manifest names {name!r}, which is outside the checkpoint")
        return self.directory / name

    def whole(self, key: str) -> torch.Tensor:
        entry: Entry = self.manifest.tensors[key]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        self.read_into(key, tensor)
        return tensor

    def entry(self, value: Any) -> Any:
        return state.join(value, {key: self.whole(key) for key in state.references(value)})


def _check_groups(prefix: str, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], reader: _Reader) -> None:
    if prefix not in reader.manifest.optimizers:
        raise ValueError(f"{reader.directory} has no {prefix!r}")
    saved = reader.entry(reader.manifest.optimizers[prefix])
    _, mine_ = state.optimizer_state(optimizer, name_of)
    if saved["class"] != mine_["class"]:
        raise ValueError(f"{reader.directory}: {prefix!r} is a {saved['class']}, not a {mine_['class']}")
    old = [group["params"] for group in saved["groups"]]
    new = [group["params"] for group in mine_["groups"]]
    for g, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            lost, added = [n for n in a if n not in b], [n for n in b if n not in a]
            raise ValueError(f"{reader.directory}: group {g} of {prefix!r}: missing here {lost[:3]}, new {added[:3]}")
    if len(old) != len(new):
        raise ValueError(f"{reader.directory}: {prefix!r} has {len(old)} groups, not {len(new)}")


def _load_optimizer(prefix: str, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], reader: _Reader) -> None:
    saved = reader.entry(reader.manifest.optimizers[prefix])
    for group, record in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(record["settings"])
    parameters = {name_of[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    state_of: dict[str, dict[str, Any]] = {}
    for key, entry in reader.manifest.tensors.items():
        if key.startswith(f"{prefix}/") and not key.startswith(f"{prefix}/settings/"):
            name, _, what = key.removeprefix(f"{prefix}/").rpartition("/")
            if name in parameters:
                state_of.setdefault(name, {})[what] = _state_tensor(parameters[name], what, key, entry, reader)
    for where, value in saved["values"].items():
        name, _, what = where.rpartition("/")
        state_of.setdefault(name, {})[what] = value
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if name in state_of:
            optimizer.state[parameter] = state_of[name]


def _state_tensor(parameter: torch.Tensor, what: str, key: str, entry: Entry, reader: _Reader) -> torch.Tensor:
    """A state tensor as the optimizer itself would hold it: placed like its parameter when it has its shape."""
    dtype = getattr(torch, entry.dtype)
    if is_placed_alike(what, entry.shape, parameter):
        tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    else:
        tensor = torch.zeros(entry.shape, dtype=dtype)
        if entry.shape and not isinstance(parameter, DTensor):
            tensor = tensor.to(parameter.device)
    reader.read_into(key, tensor)
    return tensor
