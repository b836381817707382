"""Tensors in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` called on all that is no list, tuple or mapping, in containers of the same kinds."""
    if isinstance(value, Mapping):
        made = {key: mapped(function, each) for key, each in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        items = [mapped(function, each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)
