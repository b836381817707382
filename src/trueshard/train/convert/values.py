"""Values as other frameworks write them: YAML, JSON and environment variables do not agree on what a number is."""

from __future__ import annotations

import math
from typing import Any

from trueshard.train.convert.sheet import Wrong

TRUE, FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")


def boolean(value: Any) -> bool:
    """True or false, also as a word."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise Wrong(f"found {value!r}, wanted true or false")


def number(value: Any) -> float:
    """A number; YAML reads "5e-5" as a word."""
    try:
        if not isinstance(value, bool) and math.isfinite(found := float(value)):
            return found
    except (TypeError, ValueError):
        pass
    raise Wrong(f"found {value!r}, wanted a number")


def integer(value: Any) -> int:
    """A whole number."""
    found = number(value)
    if found != int(found):
        raise Wrong(f"found {value!r}, wanted a whole number")
    return int(found)


def positive(value: Any) -> int:
    """A whole number from 1 on."""
    found = integer(value)
    if found < 1:
        raise Wrong(f"found {value!r}, wanted a whole number from 1 on")
    return found


def whole(value: Any) -> int:
    """A number above 0, rounded up."""
    found = number(value)
    if found <= 0:
        raise Wrong(f"found {value!r}, wanted a number above 0")
    return math.ceil(found)


def names(value: Any) -> list[str]:
    """Words with commas between them, or an array of words; empty ones mean nothing."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(each, str) for each in listed):
        raise Wrong(f"found {value!r}, wanted names with commas between them")
    return [each.strip() for each in listed if each.strip()]


def text(value: Any) -> str:
    """A word that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise Wrong(f"found {value!r}, wanted a word")
    return value.strip()


def table(value: Any) -> dict[str, Any]:
    """Keys and values; nothing is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Wrong(f"found {value!r}, wanted a table")
    return dict(value)
