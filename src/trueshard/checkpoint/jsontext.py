"""JSON that somebody else may have written."""

from __future__ import annotations

import json
from typing import Any


def table_of(data: bytes | memoryview, where: str) -> dict[str, Any]:
    """The object that ``data`` is, in UTF-8.

    Raises:
        ValueError: it is none; the message begins with ``where``.
    """
    try:
        table = json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of too many digits, of too many brackets, of no text at all
        raise ValueError(f"{where} is damaged: it does not read as JSON ({str(error)[:200]})") from None
    if not isinstance(table, dict):
        raise ValueError(f"{where} is damaged: it is no JSON object")
    return table
