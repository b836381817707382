"""What differs between two plans, by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from trueshard.planner.showing.collapsing import collapse
from trueshard.plans import Plan
from trueshard.tables import size

_NO_SETTINGS = ("units", "replicated", "resolved_for", "forecast")


def diff(one: Plan, other: Plan) -> str:
    """Lines ``name: value → value`` for what is not equal: settings, units, replicated parameters, forecasts.

    Repeated units that differ in the same way are one line. Forecasts are compared if both plans carry one.
    """
    first, second = dataclasses.asdict(one), dataclasses.asdict(other)
    blocks = [
        list(_changed(_settings(first), _settings(second))),
        _titled("units", [*_membership(first, second, "units"), *_units(first, second)]),
        _titled("replicated", list(_membership(first, second, "replicated"))),
        _titled("forecast", list(_forecasts(first.get("forecast"), second.get("forecast")))),
    ]
    lines = [line for block in blocks for line in block]
    return "\n".join(lines) if lines else "The plans are equal."


def _settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in plan.items() if name not in _NO_SETTINGS}
    precision = settings.pop("mixed_precision") or {"mixed_precision": None}
    return settings | {
        name if name == "mixed_precision" else f"mixed_precision.{name}": precision[name] for name in precision
    }


def _units(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """A line for each group of units that differ in the same way."""
    before = {unit["name"]: unit for unit in first["units"]}
    changes = [
        (unit["name"], "; ".join(_changed(_values(before[unit["name"]]), _values(unit))))
        for unit in second["units"]
        if unit["name"] in before
    ]
    for row in collapse([each for each in changes if each[1]], lambda each: each[0], lambda each: each[1]):
        yield f"{row}: {row.items[0][1]}"


def _values(unit: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in unit.items() if name != "why"}


def _membership(first: Mapping[str, Any], second: Mapping[str, Any], key: str) -> Iterator[str]:
    names = [[each["name"] for each in plan[key]] for plan in (first, second)]
    for word, mine, others in (("first", names[0], names[1]), ("second", names[1], names[0])):
        for row in collapse([name for name in mine if name not in set(others)], lambda name: name):
            yield f"{row}: only in the {word}"


def _forecasts(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> Iterator[str]:
    if first is not None and second is not None:
        yield from _changed(_flat(first), _flat(second))


def _flat(forecast: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in forecast.items():
        flat |= (
            {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return flat


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        if a != b:
            yield f"{name}: {_word(name, a)} → {_word(name, b)}{_percent(a, b)}"


def _percent(a: Any, b: Any) -> str:
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (a, b))
    return f" ({(b - a) / a:+.1%})" if numbers and a else ""


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
