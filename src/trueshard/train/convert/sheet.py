"""What a conversion fills in: our keys with their origin, and what became of each key of theirs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trueshard.train.config import Config, Section

Status = Literal["set", "near", "always", "command", "none"]
"""set: the same here. near: set, and something differs. always: nothing to set. command: said when the run is started.
none: no equivalent."""


class Wrong(ValueError):
    """A value that its own framework would not take, or two that contradict each other."""


@dataclass(frozen=True)
class Entry:
    """What became of one key."""

    key: str
    value: Any
    status: Status
    becomes: str
    """`key = value` of ours, or empty."""
    note: str
    """What differs, or why there is no equivalent."""


class Sheet:
    """Our configuration in the making.

    Args:
        given: the source's keys, dotted, and their values.
        defaults: what the source takes for keys that are absent.
        ranks: how many processes there will be, where that is known.
        name: of the run.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], ranks: int | None, name: str) -> None:
        self.given = dict(given)
        self.defaults = dict(defaults)
        self.ranks = ranks
        self.machines: int | None = None
        self.name = name
        self.tree: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self._by_default: set[str] = set()
        self.asked: dict[str, tuple[str, str]] = {}
        """Our keys that only the user can know: an example of a value, as TOML, and what to give."""
        self.entries: list[Entry] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of theirs, given or by default."""
        return self.given.get(key, self.defaults.get(key, default))

    def tell(self, key: str, value: Any, status: Status, note: str, becomes: str = "") -> None:
        """Note what became of a key of theirs. Defaults are not worth a word unless they set something."""
        if key in self.given:
            self.entries.append(Entry(key, value, status, becomes, note))

    def put(self, ours: str, value: Any, key: str, given: Any, status: Status = "set", note: str = "") -> None:
        """Set a key of ours; raises `Wrong` if another key of theirs has set it to something else."""
        if key not in self.given and (ours in self.tree or value == our_default(ours)):
            return
        if ours in self.tree and self.tree[ours] != value and ours not in self._by_default:
            raise Wrong(f"{key} = {given} contradicts {self.origins[ours]}: both decide {ours}; keep one")
        (self._by_default.discard if key in self.given else self._by_default.add)(ours)
        self.tree[ours] = value
        self.origins[ours] = f"{key} = {shown(given)}" if key in self.given else f"{key} = {shown(given)}, its default"
        self.tell(key, given, status, note, f"{ours} = {toml_value(value)}")

    def in_order(self) -> tuple[Entry, ...]:
        """What became of each key, in the order in which they were given."""
        order = {key: place for place, key in enumerate(self.given)}
        return tuple(sorted(self.entries, key=lambda entry: order[entry.key]))

    def ask(self, ours: str, example: str, what: str) -> None:
        """Leave a key of ours to the user, unless it is set."""
        if ours not in self.tree:
            self.asked.setdefault(ours, (example, what))

    def word(self, value: Any, table: Mapping[str, Any]) -> Any:
        """What `table` has for a word, whose case does not count."""
        found = "none" if value is None else str(value).strip()
        known = {str(word).lower(): word for word in table}
        if found.lower() not in known:
            raise Wrong(f"found {found!r}, wanted {either(table)}{nearest(found, table)}")
        return table[known[found.lower()]]


def our_default(ours: str) -> Any:
    """What a key of ours is where it is left out; None where it is needed, or inside a table."""
    section, name = ours.split(".", 1)
    for field in section_of(section).model_fields.items():
        if name == (field[1].alias or field[0]):
            return None if field[1].is_required() else field[1].get_default(call_default_factory=True)
    return None


def section_of(name: str) -> type[Section]:
    """The class of a section of ours."""
    annotation = Config.model_fields[name].annotation
    kinds = [annotation, *get_args(annotation)]
    return next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))


def shown(value: Any) -> str:
    """A value of theirs in a comment: short, on one line."""
    text = " ".join((value if isinstance(value, str) else json.dumps(value, default=str)).split())
    return text if len(text) <= 60 else text[:57] + "..."


def either(words: Iterable[Any]) -> str:
    """ "a, b or c"."""
    listed = [str(word) for word in words]
    return " or ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def nearest(word: str, known: Iterable[Any]) -> str:
    """ "; nearest: b", or nothing."""
    lower = {str(each).lower(): str(each) for each in known}
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return f"; nearest: {lower[near[0]]}" if near else ""


def toml_value(value: Any) -> str:
    """A value as TOML: a word, a number, an array or an inline table."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    assert isinstance(value, Mapping), value
    pairs = [f"{toml_key(key)} = {toml_value(each)}" for key, each in value.items()]
    return f"{{ {', '.join(pairs)} }}" if pairs else "{}"


def toml_key(key: str) -> str:
    """A key as TOML: bare where that is allowed."""
    bare = key and key.isascii() and all(each.isalnum() or each in "-_" for each in key)
    return key if bare else json.dumps(key, ensure_ascii=False)
