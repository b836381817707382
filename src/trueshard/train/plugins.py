"""Words of the configuration that installed packages add, by entry points of the groups in ``GROUPS``."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from trueshard.errors import explained

GROUPS = {"data.format": "trueshard.formats", "log.to": "trueshard.loggers"}
"""Key → group of entry points: "name = package.module:Class"."""


def words(key: str) -> tuple[str, ...]:
    """Return the words that packages add to a key; nothing is imported."""
    return tuple(sorted(point.name for point in entry_points(group=GROUPS[key])))


class Table(dict[str, Any]):
    """Word of a key → class; one that a package brings is imported when it is first looked up."""

    def __init__(self, key: str, own: dict[str, Any]) -> None:
        super().__init__(own)
        self._key = key

    def __missing__(self, word: str) -> Any:
        for point in entry_points(group=GROUPS[self._key], name=word):
            with explained(f"{self._key}: {word!r} ({point.value}) cannot be imported", "correct that package"):
                self[word] = point.load()
            return self[word]
        raise KeyError(word)
