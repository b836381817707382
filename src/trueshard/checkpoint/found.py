"""What a load returns, and what did not fit."""

from __future__ import annotations

from typing import Any


class Found(dict[str, Any]):
    """The saved entries that were not loaded in place, by name; and what did not fit, with ``strict=False``."""

    missing: list[str]
    """Names of what the model or optimizer has and the checkpoint has not."""
    unexpected: list[str]
    """Names of what the checkpoint has and the model or optimizer has not."""
    mismatched: list[str]
    """Names of what differs in shape, dtype or group."""

    def __init__(self, entries: dict[str, Any] | None = None) -> None:
        super().__init__(entries or {})
        self.missing, self.unexpected, self.mismatched = [], [], []


class Misfits:
    """Collects what does not fit, to say all of it at once.

    Args:
        where: the checkpoint, for messages.
        strict: whether anything but new groups is an error.
    """

    def __init__(self, where: str, strict: bool) -> None:
        self._where, self._strict = where, strict
        self._missing: dict[str, str] = {}
        self._unexpected: dict[str, str] = {}
        self._mismatched: dict[str, str] = {}
        self._allowed: list[str] = []

    def missing(self, name: str, text: str) -> None:
        """The checkpoint has no ``name``."""
        self._missing.setdefault(name, text)

    def unexpected(self, name: str, text: str = "") -> None:
        """The checkpoint has a ``name`` that nobody takes."""
        self._unexpected.setdefault(name, text or f"holds {name!r}, which the model does not have")

    def mismatched(self, name: str, text: str) -> None:
        """``name`` is there and differs."""
        self._mismatched.setdefault(name, text)

    def new(self, name: str) -> None:
        """What was added since: reported, and no error."""
        self._allowed.append(name)

    def settle(self) -> None:
        """Raise ``ValueError`` with all of it, if that is asked for."""
        every = [*self._mismatched.values(), *self._missing.values(), *self._unexpected.values()]
        if every and self._strict:
            shown = "; ".join(every[:6]) + (f"; and {len(every) - 6} more" if every[6:] else "")
            raise ValueError(f"{self._where} does not fit: {shown}. strict=False loads what fits and reports the rest")

    def into(self, found: Found) -> Found:
        """The report."""
        found.missing = [*self._missing, *self._allowed]
        found.unexpected, found.mismatched = list(self._unexpected), list(self._mismatched)
        return found
