"""Join what ranks have into one checkpoint: state of an optimizer that some of them have, stages of a pipeline.

- Without a pipeline all ranks have the same tensors, but for state of parameters that one rank updates.
- With one, the ranks of a stage have the same, and stages have different ones, under names of the whole model. The
  first rank of each stage tells what it has; the first stage that has a tied parameter writes it.
- The stages' optimizers have the groups of the whole model's, in the same order: those at one place are one group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trueshard.checkpoint import state
from trueshard.checkpoint.format import Manifest, TensorEntry
from trueshard.checkpoint.process_group import RankGroup
from trueshard.optim.ties import tied_name


@dataclass
class Told:
    """Message of a rank to the others before a save."""

    token: str
    first: int  # rank of its stage
    common: dict[str, Any]  # the same on all ranks
    own: dict[str, Any]  # the same on the ranks of its stage
    entries: dict[str, TensorEntry]  # that other ranks may not have
    tied: list[str]  # keys of those of which other stages have copies
    models: dict[str, Any]  # records of the manifest, as far as other ranks may have others
    optimizers: dict[str, Any]


def tell(
    token: str,
    group: RankGroup,
    staged: bool,
    common: dict[str, Any],
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
) -> Told:
    """Return what this rank tells; ``staged``: it has one stage of a pipeline."""
    first = group.stage[0]
    tells_all = staged and group.rank == first
    told = Told(token, first, common, state.groups_of(manifest.optimizers), {}, [], {}, {})
    for key, tensor in tensors.items():
        owned = key.startswith("optimizer") and not isinstance(tensor, DTensor)
        if not owned:
            told.own[key] = [str(getattr(tensor, "placements", "plain")), list(tensor.shape), str(tensor.dtype)]
        if staged and key.startswith("more/") and isinstance(tensor, DTensor):
            raise ValueError(f"{key!r} is sharded over the ranks of one stage; give it as a model, or whole")
        if owned or tells_all:
            told.entries[key] = manifest.tensors[key]
        if tells_all and tied_name(tensor) is not None:
            told.tied.append(key)
    if staged:
        for record in _with_wrapped(manifest.optimizers):
            for group_record in record["groups"]:
                group_record["settings"].pop("param_names", None)  # of this stage alone
        settings = state.groups_of(manifest.optimizers, "settings")
        told.common = common | {
            f"{prefix} (class and settings of groups)": setting for prefix, setting in settings.items()
        }
    if tells_all:
        told.models, told.optimizers = manifest.models, manifest.optimizers
    else:
        told.optimizers = {
            prefix: {"groups": [], "state": record["state"]} for prefix, record in manifest.optimizers.items()
        }
    return told


def merge(manifest: Manifest, everyone: list[Told], staged: bool) -> dict[str, int]:
    """Add what all ranks have to ``manifest``; return key of what some may not have → the first rank that has it."""
    first_with: dict[str, int] = {}
    entries = manifest.tensors
    kept = {key: entries[key] for key in entries if not staged or key == "rng"}
    entries.clear()
    if not staged:
        entries.update(kept)
    for rank, told in enumerate(everyone):
        for key, entry in told.entries.items():
            known, first = entries.setdefault(key, entry), first_with.setdefault(key, rank)
            known.names = list(dict.fromkeys([*known.names, *entry.names]))
            if everyone[first].first != told.first and key.startswith("model") and key not in told.tied:
                name = key.partition("/")[2]
                raise ValueError(
                    f"{name!r} is on two stages of the pipeline (ranks {first} and {rank}): say by names=… what "
                    "each is called in the whole model, or tie them by trueshard.tie_over()"
                )
        for prefix, model in told.models.items():
            manifest.models[prefix]["extra"] = model["extra"] | manifest.models[prefix]["extra"]
        for prefix, record in told.optimizers.items():
            _join(manifest.optimizers[prefix], record)
    entries.update(kept)
    for record in _with_wrapped(manifest.optimizers):
        order = {name: i for i, name in enumerate(name for group in record["groups"] for name in group["params"])}
        record["state"] = dict(sorted(record["state"].items(), key=lambda each: order.get(each[0], len(order))))
    for key in sorted(key for key in entries if key.startswith("optimizer")):
        entries[key] = entries.pop(key)
    return first_with


def _join(record: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Add the parameters and states of another rank's record of an optimizer to ``record``."""
    for own, other in zip(record["groups"], theirs["groups"], strict=False):
        own["params"] = list(dict.fromkeys([*own["params"], *other["params"]]))
    record["state"] = theirs["state"] | record["state"]
    for place, each in theirs.get("wrapped", {}).items():
        _join(record["wrapped"][place], each)


def _with_wrapped(records: Mapping[str, Any]) -> list[Any]:
    """Return the records of optimizers, and of those that they wrap."""
    return [each for record in records.values() for each in (record, *_with_wrapped(record.get("wrapped", {})))]


def part_of(record: Mapping[str, Any], here: Collection[str]) -> dict[str, Any]:
    """Return an optimizer's saved record without the parameters that are not in ``here``, on this stage."""
    groups = []
    for group in record["groups"]:
        own = [name for name in group["params"] if name in here]
        groups.append({**group, "params": own, "elsewhere": bool(group["params"]) and not own})
    wrapped = {place: part_of(each, here) for place, each in record.get("wrapped", {}).items()}
    return {**record, "groups": groups} | ({"wrapped": wrapped} if wrapped else {})
