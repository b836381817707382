"""Things whose names differ in a number alone, as one: ``layers.0``, ``layers.1``, ``layers.2`` as ``layers.0-2``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

DASH = "\N{EN DASH}"


@dataclass(frozen=True)
class Collapsed(Generic[T]):
    """One or several things under one name."""

    name: str
    items: tuple[T, ...]

    @property
    def times(self) -> str:
        """How many there are, as ``×32``; empty for one."""
        return f"×{len(self.items)}" if len(self.items) > 1 else ""

    def __str__(self) -> str:
        return f"{self.name or '(root)'} {self.times}".rstrip()


def collapse(
    items: Iterable[T], name: Callable[[T], str], same: Callable[[T], Hashable] = lambda item: None
) -> list[Collapsed[T]]:
    """Put together what has equal ``same`` and a name that differs in one number; in the order of first appearance.

    The number is the last of the name. Where a name is several joined by ``" + "``, it is the last of each.
    """
    groups: dict[tuple[str, Hashable], list[tuple[int, T]]] = {}
    for item in items:
        template, number = _split(name(item))
        groups.setdefault((template, same(item)), []).append((number, item))
    found = []
    for (template, _), members in groups.items():
        whole = tuple(item for _, item in members)
        label = template.format(_ranges([number for number, _ in members]))
        found.append(Collapsed(name(whole[0]) if len(whole) == 1 else label, whole))
    return found


def _split(name: str) -> tuple[str, int]:
    """(name with ``{0}`` in place of its number, the number); -1 without one."""
    parts = [re.fullmatch(r"(.*\.|)(\d+)(\.\D.*|)", part) for part in name.split(" + ")]
    found = [part for part in parts if part is not None]
    numbers = {part[2] for part in found}
    if len(found) < len(parts) or len(numbers) != 1:
        return _plain(name), -1
    return " + ".join(f"{_plain(part[1])}{{0}}{_plain(part[3])}" for part in found), int(numbers.pop())


def _plain(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,5``; of many ranges the first three and the last."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = [str(first) if first == last else f"{first}{DASH}{last}" for first, last in ranges]
    return ",".join(words if len(words) < 6 else [*words[:3], "…", words[-1]])
