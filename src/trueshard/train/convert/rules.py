"""A rule: what one key of another framework, or several alike, becomes here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueshard.train.convert import values
from trueshard.train.convert.sheet import Sheet

Apply = Callable[[Sheet, str, Any], None]
MISSING: Any = object()


@dataclass(frozen=True)
class Rule:
    """What is done with any of `keys`."""

    keys: tuple[str, ...]
    """Dotted names in the source."""
    becomes: str
    """In the table: a key of ours, a part of the command line, or what is so anyway."""
    why: str
    """One sentence: how, what differs, or what to do instead."""
    apply: Apply
    default: Any = MISSING
    """What the source takes where the key is absent, if that decides something here."""
    together: bool = False
    """Looked at after all others, since it depends on them."""


@dataclass(frozen=True)
class Source:
    """A kind of configuration that can be converted."""

    name: str
    """As `--from` takes it."""
    title: str
    """The framework's name."""
    rules: tuple[Rule, ...]
    finish: Callable[[Sheet], None]
    """What depends on several keys: batch sizes, what is still to be asked."""
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: tree
    """Older spellings of the tree into the present one."""
    assumes: Callable[[Mapping[str, Any]], bool] = lambda given: True
    """Whether a file with these keys leaves the others at their defaults; else it says nothing of them."""
    marks: tuple[str, ...] = ()
    """Keys at the top that only this kind has."""

    @functools.cached_property
    def index(self) -> dict[str, Rule]:
        """The rule of each key that is known."""
        return {key: rule for rule in self.rules for key in rule.keys}


@dataclass(frozen=True)
class Near:
    """A value of ours that is not quite theirs."""

    value: Any
    why: str


@dataclass(frozen=True)
class Lost:
    """A value that has no equivalent."""

    why: str


def sets(
    keys: str, ours: str, read: Callable[[Any], Any] = lambda value: value, why: str = "", default: Any = MISSING
) -> Rule:
    """The value goes to `ours`, as `read` gives it; None: nothing is set."""

    def apply(sheet: Sheet, key: str, value: Any) -> None:
        found = None if value is None else read(value)
        if found is None:
            sheet.tell(key, value, "always", "as the default here")
        else:
            sheet.put(ours, found, key, value)

    return Rule(_split(keys), ours, why, apply, default)


def words(keys: str, ours: str, table: Mapping[str, Any], why: str, default: Any = MISSING) -> Rule:
    """Word by word: to a value of ours, `Near`, `Lost`, or None for "nothing to set". Case does not count."""

    def apply(sheet: Sheet, key: str, value: Any) -> None:
        if value is None and "none" not in table:
            sheet.tell(key, value, "always", "not given")
            return
        if set(table) == {"true", "false"}:
            value = values.boolean(value)
        found = sheet.word(value, table)
        if found is None:
            sheet.tell(key, value, "always", "nothing to set")
        elif isinstance(found, Lost):
            sheet.tell(key, value, "none", found.why)
        elif isinstance(found, Near):
            sheet.put(ours, found.value, key, value, "near", found.why)
        else:
            sheet.put(ours, found, key, value)

    return Rule(_split(keys), ours, why, apply, default)


def always(keys: str, why: str, unless: Mapping[Any, str] | None = None) -> Rule:
    """Nothing to set: it is so here anyway, but for the values in `unless`, which have no equivalent."""

    def apply(sheet: Sheet, key: str, value: Any) -> None:
        lost = (unless or {}).get(_plain(value))
        sheet.tell(key, value, "always" if lost is None else "none", why if lost is None else lost)

    lost_by: dict[str, list[str]] = {}
    for value, reason in (unless or {}).items():
        lost_by.setdefault(reason, []).append(f"`{_shown(value)}`")
    text = "; ".join([why, *(f"{', '.join(each)}: {reason}" for reason, each in lost_by.items())])
    return Rule(_split(keys), "always so", text, apply)


def command(keys: str, becomes: str, why: str) -> Rule:
    """Not a matter of the configuration but of how the run is started."""
    return Rule(_split(keys), becomes, why, lambda sheet, key, value: sheet.tell(key, value, "command", becomes))


def none(keys: str, why: str, off: Sequence[Any] = ()) -> Rule:
    """No equivalent; where the value is absent, empty or one of `off`, nothing is lost by that."""
    nothing = {None, "", "none", *(_plain(value) for value in off)}

    def apply(sheet: Sheet, key: str, value: Any) -> None:
        lost = _plain(value) not in nothing
        sheet.tell(key, value, "none" if lost else "always", why if lost else "not asked for")

    return Rule(_split(keys), "no equivalent", why, apply)


def by(keys: str, becomes: str, why: str, apply: Apply, default: Any = MISSING, together: bool = False) -> Rule:
    """By a function of its own."""
    return Rule(_split(keys), becomes, why, apply, default, together)


def part(keys: str, becomes: str, why: str, default: Any = MISSING) -> Rule:
    """Of effect with the key beside it, whose rule reads it."""
    return Rule(
        _split(keys), becomes, why, lambda sheet, key, value: sheet.tell(key, value, "set", why, becomes), default
    )


def later(sheet: Sheet, key: str, value: Any) -> None:
    """What this key does is told together with the keys that it goes with, by one of their rules or at the end."""


def _split(keys: str) -> tuple[str, ...]:
    return tuple(keys.split())


def _plain(value: Any) -> Any:
    """A value as one that can be compared: words without case, empty containers as nothing."""
    if isinstance(value, str):
        word = value.strip().lower()
        return int(word) if word.isdecimal() else {"true": True, "false": False}.get(word, word)
    if isinstance(value, (dict, list, tuple)):
        return None if not value else str(value)
    return value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
