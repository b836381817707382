"""What sharding must leave as it is besides values: names, dtypes, trainability, ties, membership."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trueshard import intent
from trueshard.checkpoint import Inspected
from trueshard.names import unwrap


@dataclass(frozen=True)
class Structure:
    """A model and its optimizers without their values: plain data, to be held against another."""

    names: tuple[str, ...]
    """Of parameters and buffers, in the model's order, and the keys of its state dict."""
    dtypes: Mapping[str, str]
    """Storage dtype of each parameter and buffer, and its shape."""
    trainable: Mapping[str, bool]
    ties: tuple[tuple[str, ...], ...]
    """The names of one object, where it has several."""
    membership: Mapping[str, Any]
    """By optimizer and group: the parameters' names in order, and every other key."""

    def members(self) -> dict[int, tuple[str, ...]]:
        """The parameters' names by number of the optimizer."""
        found: dict[int, tuple[str, ...]] = {}
        for key, group in self.membership.items():
            number = int(key.partition(",")[0].rpartition(" ")[2])
            found[number] = (*found.get(number, ()), *group["params"])
        return found


def structure_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Structure:
    """What ``model`` and ``optimizers`` are now."""
    found, _ = intent.capture(model, optimizers)
    records = (*found.parameters, *found.buffers)
    listed = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    return Structure(
        names=(*listed, *(f"state_dict: {key}" for key in unwrap(model).state_dict(keep_vars=True))),
        dtypes={each.name: f"{each.dtype} {list(each.shape)}" for each in records},
        trainable={each.name: each.requires_grad for each in found.parameters},
        ties=tuple(each.names for each in records if len(each.names) > 1),
        membership={
            f"{record.kind} {number}, group {place}": {"params": group.parameters}
            | {key: _plain(value) for key, value in group.settings.items()}
            for number, record in enumerate(found.optimizers)
            for place, group in enumerate(record.groups)
        },
    )


def differences(found: Structure, expected: Structure) -> dict[str, str]:
    """The first difference of each aspect, in words; aspects that are the same are left out."""
    told = {
        "names": _of_lists(found.names, expected.names),
        "dtypes": _of_tables(found.dtypes, expected.dtypes),
        "trainability": _of_tables(found.trainable, expected.trainable),
        "ties": _of_lists(tuple(map(str, found.ties)), tuple(map(str, expected.ties))),
        "membership": _of_membership(found.membership, expected.membership),
    }
    return {aspect: words for aspect, words in told.items() if words}


def differences_on_disk(listing: Inspected, expected: Structure) -> list[str]:
    """What a checkpoint's listing says otherwise of names, ties, dtypes and trainability, in words."""
    words = []
    saved = {name: each for each in listing.tensors if each.key.startswith("model/") for name in each.names}
    for tie in expected.ties:
        entries = {saved[name].key for name in tie if name in saved}
        if len(entries) > 1:
            words.append(f"the tie {' = '.join(tie)} is {len(entries)} tensors in the checkpoint")
    for name, described in expected.dtypes.items():
        if name in saved:
            dtype = described.partition(" ")[0].removeprefix("torch.")
            if saved[name].dtype.removeprefix("torch.") != dtype:
                words.append(f"{name!r} is {dtype}, and {saved[name].dtype} in the checkpoint")
        elif f"state_dict: {name}" in expected.names:
            words.append(f"{name!r} is not in the checkpoint")
        if name in saved and saved[name].trainable not in (None, expected.trainable.get(name)):
            words.append(f"{name!r} has another requires_grad in the checkpoint")
    return words


def _of_lists(found: Sequence[str], expected: Sequence[str]) -> str:
    lost = [name for name in expected if name not in set(found)]
    new = [name for name in found if name not in set(expected)]
    if lost or new:
        return "; ".join(
            f"{words} {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for words, names in (("lost", lost), ("new", new))
            if names
        )
    for one, two in zip(found, expected, strict=True):
        if one != two:
            return f"{one!r} stands where {two!r} stood"
    return ""


def _of_tables(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    if words := _of_lists(list(found), list(expected)):
        return words
    for name, value in expected.items():
        if found[name] != value:
            return f"{name!r} is {found[name]}, was {value}"
    return ""


def _of_membership(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    if words := _of_lists(list(found), list(expected)):
        return words
    for group, settings in expected.items():
        if words := _of_lists(found[group]["params"], settings["params"]):
            return f"{group}: {words}"
        if words := _of_tables(found[group], settings):
            return f"{group}: {words}"
    return ""


def _plain(value: Any) -> Any:
    """A setting of a group, to be compared between processes."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(_plain(each) for each in value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(type(value))
