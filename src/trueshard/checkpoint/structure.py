"""Whether the JSON values of a manifest have the form in which they are written: nothing that is read is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def check(table: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` unless models, optimizers, entries and random states are as ``save`` writes them.

    Args:
        table: ``models``, ``optimizers``, ``more``, ``rng`` of a manifest.
        tensors: its tensors, by key: what may be referred to.
        where: the manifest, for messages.
    """
    seen = _Seen(tensors, where)
    for prefix, model in _items(table["models"], "models", where):
        seen.table(model, prefix, {"class", "extra"})
        for name, value in _items(model["extra"], f"{prefix}/extra", where):
            seen.split(value, f"{prefix}/{name}")
    for prefix, record in _items(table["optimizers"], "optimizers", where):
        seen.optimizer(record, prefix)
    for key, value in _items(table["more"], "more", where):
        seen.split(value, f"more/{key}")
    for rank, parts in enumerate(table["rng"]):
        _check_random(parts, rank, tensors, where)


class _Seen:
    def __init__(self, tensors: Mapping[str, Any], where: str) -> None:
        self._tensors, self._where = tensors, where

    def _wrong(self, path: str, value: Any) -> ValueError:
        return ValueError(f"{self._where} is damaged: {path!r} is {str(value)[:80]!r}, which save() does not write")

    def table(self, value: Any, path: str, keys: set[str]) -> None:
        if not isinstance(value, dict) or not keys <= value.keys():
            raise self._wrong(path, value)

    def optimizer(self, record: Any, path: str) -> None:
        self.table(record, path, {"class", "groups", "state"})
        if not isinstance(record["class"], str) or not isinstance(record["groups"], list):
            raise self._wrong(path, record)
        for g, group in enumerate(record["groups"]):
            self.table(group, f"{path}: group {g}", {"params", "settings"})
            members = group["params"]
            if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
                raise self._wrong(f"{path}: group {g}", members)
            self.split(group["settings"], f"{path}: group {g}", kind="__dict__")
        for name, value in _items(record["state"], path, self._where):
            self.split(value, f"{path}/{name}")
        for place, inner in _items(record.get("wrapped", {}), path, self._where):
            self.optimizer(inner, f"{path}/@{place}")

    def split(self, value: Any, path: str, kind: str | None = None) -> None:
        """One value as ``state.split`` makes it."""
        if isinstance(value, list) and kind is None:
            for i, each in enumerate(value):
                self.split(each, f"{path}/{i}")
        elif isinstance(value, dict) and len(value) == 1 and kind in (None, *value):
            self._marked(*next(iter(value.items())), path)
        elif kind is not None or not (value is None or type(value) in (bool, int, float, str)):
            raise self._wrong(path, value)

    def _marked(self, mark: str, inner: Any, path: str) -> None:
        if mark == "__tensor__" and isinstance(inner, str) and inner in self._tensors:
            return None
        if mark == "__dtype__" and isinstance(inner, str) and isinstance(getattr(torch, inner, None), torch.dtype):
            return None
        if mark == "__tuple__" and isinstance(inner, list):
            return self.split(inner, path)
        if mark == "__dict__" and isinstance(inner, list):
            for pair in inner:
                if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
                    raise self._wrong(path, pair)
                self.split(pair[1], f"{path}/{pair[0]}")
            return None
        raise self._wrong(path, {mark: inner})


def _items(value: Any, path: str, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is damaged: {path!r} is {str(value)[:80]!r} where a table belongs")
    return value.items()


def _check_random(parts: Any, rank: int, tensors: Mapping[str, Any], where: str) -> None:
    good = isinstance(parts, list) and all(
        isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) and type(part[1]) is int and part[1] >= 0
        for part in parts
    )
    entry = tensors.get("rng")
    if not good or entry is None or entry.shape[1:] != [sum(part[1] for part in parts)] or rank >= entry.shape[0]:
        raise ValueError(f"{where} is damaged: the random state of rank {rank} is {str(parts)[:80]!r}")
