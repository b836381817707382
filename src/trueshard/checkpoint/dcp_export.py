"""Writes a directory of torch.distributed.checkpoint, by torch's own ``save``, with one tensor in memory at a time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from trueshard.checkpoint import state
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.source import Source, check_bytes, converted


def write_dcp(source: Source, directory: Path, dtype: torch.dtype | None) -> None:
    """The model as ``model.<name>`` and the optimizers as ``optimizer.state.<name>.<key>``, as torch names them.

    Args:
        source: what is exported. Optimizers go with the only model of a checkpoint, not with one of several.
        directory: to be made.
        dtype: of the model's floating-point tensors; None: kept.
    """
    catalogue = source.catalogue
    key_of: dict[str, str] = {}
    content: dict[str, Any] = {"model": {}}
    entries = converted(source, dtype)
    for key, entry in entries.items():
        names = entry.names if catalogue.manifest is not None else [source.name(key)]
        for name in names:
            content["model"][name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            key_of[f"model.{name}"] = key
    if catalogue.manifest is not None and not source.folder:
        for prefix, record in catalogue.manifest.optimizers.items():
            saved = _optimizer_content(catalogue, prefix.replace("/", "."), record, key_of)
            if "/" in prefix:
                content.setdefault("optimizer", {})[prefix.partition("/")[2]] = saved
            else:
                content["optimizer"] = saved

    wanted = {key: (entries.get(key) or catalogue.entries[key]).dtype for key in key_of.values()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no other process takes part
        try:
            # Nothing is copied ahead, for what was read before is given up when the next is asked for.
            writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
            dcp.save(content, storage_writer=writer, planner=_FromFiles(catalogue, key_of, wanted), no_dist=True)
        except CheckpointException as failed:  # no Exception by its class
            raise next(iter(failed.failures.values()))[0] from None


class _FromFiles(dcp.DefaultSavePlanner):
    """Reads a tensor when it is to be written. Torch's writer keeps all that it wrote, so its memory is taken away."""

    def __init__(self, catalogue: Catalogue, key_of: Mapping[str, str], wanted: Mapping[str, str]) -> None:
        super().__init__()
        self._catalogue, self._key_of, self._wanted = catalogue, key_of, wanted
        self._before: torch.Tensor | None = None

    def resolve_data(self, write_item: Any) -> Any:
        key = self._key_of.get(write_item.index.fqn)
        if key is None:
            return super().resolve_data(write_item)
        if self._before is not None:
            self._before.untyped_storage().resize_(0)
        check_bytes(self._catalogue, key)
        self._before = self._catalogue.whole(key).to(getattr(torch, self._wanted[key]))
        return self._before


def _optimizer_content(catalogue: Catalogue, root: str, record: Any, key_of: dict[str, str]) -> dict[str, Any]:
    """An optimizer as ``get_optimizer_state_dict`` returns it, its tensors without memory, which ``key_of`` learns."""
    states = {}
    for name, value in record["state"].items():
        if not name.startswith("@"):
            for path, key in state.located(value):
                key_of[".".join(map(str, (root, "state", name, *path)))] = key
            states[name] = _without_memory(catalogue, value)
    groups = []
    for g, group in enumerate(record["groups"]):
        for path, key in state.located(group["settings"]):
            key_of[".".join(map(str, (root, "param_groups", g, *path)))] = key
        groups.append({"params": group["params"], **_without_memory(catalogue, group["settings"])})
    return {"state": states, "param_groups": groups}


def _without_memory(catalogue: Catalogue, value: Any) -> Any:
    tensors = {}
    for key in state.references(value):
        entry = catalogue.entries[key]
        tensors[key] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
    return state.join(value, tensors)
