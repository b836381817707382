"""Match a message by what it names: parameters, files, keys, figures, a word of the remedy; not by its wording."""

from __future__ import annotations

import re


def naming(*parts: object) -> str:
    """Return a regular expression that finds a text with every part in it, in any order.

    Args:
        parts: text, found as it is written; a whole number, found where no other digit touches it.
    """
    return "".join(f"(?s:(?=.*{_pattern(part)}))" for part in parts)


def lacking(text: object, *parts: object) -> list[object]:
    """Return the parts that `text` does not have, as `naming` looks for them: `assert lacking(line, …) == []`."""
    return [part for part in parts if not re.search(_pattern(part), str(text))]


def _pattern(part: object) -> str:
    return rf"(?<![\d.,]){part}(?![\d])" if isinstance(part, int) else re.escape(str(part))
