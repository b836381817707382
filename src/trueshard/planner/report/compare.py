"""Collapse names that differ in a number alone (``layers.0-2``), and compare two plans by name."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trueshard.plans import Plan
from trueshard.text import ranges, size

T = TypeVar("T")

DASH = "\N{EN DASH}"
_NUMBER = "\0"


@dataclass(frozen=True)
class Collapsed(Generic[T]):
    """One or several items under one name."""

    name: str
    items: tuple[T, ...]

    def __str__(self) -> str:
        return f"{self.name or '(root)'} {times(len(self.items))}".rstrip()


def times(count: int) -> str:
    """Return ``×32``; empty for one."""
    return f"×{count}" if count > 1 else ""


def collapse(
    items: Iterable[T], name: Callable[[T], str], same: Callable[[T], Hashable] = lambda item: None
) -> list[Collapsed[T]]:
    """Collapse items with equal ``same`` and names that differ in one number; in the order of first appearance.

    The number is the last of the name. Where a name is several joined by ``" + "``, it is the last of each.
    """
    groups: dict[tuple[str, Hashable], list[tuple[int, T]]] = {}
    for item in items:
        template, number = _split(name(item))
        groups.setdefault((template, same(item)), []).append((number, item))
    rows = []
    for (template, _), members in groups.items():
        group = tuple(item for _, item in members)
        label = template.replace(_NUMBER, _ranges([number for number, _ in members]))
        rows.append(Collapsed(name(group[0]) if len(group) == 1 else label, group))
    return rows


def _split(name: str) -> tuple[str, int]:
    """Return (name with ``_NUMBER`` in place of its number, the number); -1 without one."""
    matches = [re.fullmatch(r"(.*\.|)(\d+)(\.\D.*|)", part) for part in name.split(" + ")]
    numbers = {match[2] if match else None for match in matches}
    if None in numbers or len(numbers) != 1:
        return name, -1
    return " + ".join(f"{match[1]}{_NUMBER}{match[3]}" for match in matches if match), int(str(numbers.pop()))


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``0-3,5``; of many ranges the first three and the last."""
    words = ranges(sorted(set(numbers)), DASH)
    return ",".join(words if len(words) < 6 else [*words[:3], "…", words[-1]])


_TABLES = ("mixed_precision", "peak_by_kind", "received_by_collective")
NO_SETTINGS = ("units", "replicated", "resolved_for", "forecast")


def diff(one: Plan, other: Plan) -> str:
    """Return lines ``name: value → value`` for different settings, units, replicated parameters, forecasts.

    Repeated units that differ in the same way are one line. Forecasts are compared if both plans carry one.
    """
    first, second = dataclasses.asdict(one), dataclasses.asdict(other)
    forecasts = [plan["forecast"] for plan in (first, second)]
    blocks = [
        list(_changed(*(_flat(plan, NO_SETTINGS) for plan in (first, second)))),
        _titled("units", [*_membership(first, second, "units"), *_units(first, second)]),
        _titled("replicated", list(_membership(first, second, "replicated"))),
        _titled("forecast", [] if None in forecasts else list(_changed(*map(_flat, forecasts)))),
    ]
    lines = [line for block in blocks for line in block]
    return "\n".join(lines) if lines else "The plans are equal."


def _flat(tree: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return a table whose inner tables in ``_TABLES`` are keys with a dot."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and key in _TABLES:
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        elif key not in without:
            flat[key] = value
    return flat


def _units(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    before = {unit["name"]: unit for unit in first["units"]}
    changes = [
        (unit["name"], "; ".join(_changed(before[unit["name"]] | {"why": ""}, unit | {"why": ""})))
        for unit in second["units"]
        if unit["name"] in before
    ]
    changes = [(name, change) for name, change in changes if change]
    for row in collapse(changes, name=lambda pair: pair[0], same=lambda pair: pair[1]):
        yield f"{row}: {row.items[0][1]}"


def _membership(first: Mapping[str, Any], second: Mapping[str, Any], key: str) -> Iterator[str]:
    names = [[entry["name"] for entry in plan[key]] for plan in (first, second)]
    for word, present, absent in (("first", names[0], names[1]), ("second", names[1], names[0])):
        for row in collapse([name for name in present if name not in set(absent)], lambda name: name):
            yield f"{row}: only in the {word}"


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        if a != b:
            yield f"{name}: {_word(name, a)} → {_word(name, b)}{_percent(a, b)}"


def _percent(a: Any, b: Any) -> str:
    are_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    return f" ({(b - a) / a:+.1%})" if are_numbers and a else ""


def _word(name: str, value: Any) -> str:
    if ("bytes" in name or "received" in name or "by_kind" in name) and isinstance(value, int):
        return size(value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _titled(title: str, lines: list[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)] if lines else []
