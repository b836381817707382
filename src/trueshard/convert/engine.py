"""The engine of a conversion: applies rules to another framework's keys and collects our configuration.

- A `Rule` says what one of their keys, or several alike, becomes. Rules are data, which `tables` reads.
- A `Draft` is our configuration in the making, with an `Entry` for each of their keys: its status and why.
- What a rule cannot say as data is a function `(draft, key, value) -> None` that it names.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from trueshard.train.parse import fields, toml_value

Status = Literal["set", "near", "always", "command", "none"]
"""set: the same here. near: set, and something differs. always: nothing to set. command: said when the run is started.
none: no equivalent."""
AXES = ("shard.tensor", "shard.tensor.ranks", "shard.context")
"""Our keys that decide which ranks read the same samples: their rules are applied first."""
NOT_ASKED: tuple[Status, str] = ("always", "not asked for")
AS_GIVEN: Any = object()
"""Stands for the value that one of their keys has."""
Value = TypeVar("Value")


class Wrong(ValueError):
    """A value that its own framework would not take, or two that contradict each other."""


@dataclass(frozen=True)
class Word:
    """One value of a key, where its rule lists them."""

    sets: Mapping[str, Any]  # our keys and their values; empty: nothing to set
    differs: str = ""
    none: str = ""  # why there is no equivalent; empty: there is one
    always: str = "nothing to set"
    copies: str = ""  # one full copy of the model in each of the "ranks" or "machines"; empty: sharded over all
    ask: Sequence[str] = ()  # our key left to the user, example, what to give; "{}": their word


@dataclass(frozen=True)
class Rule:
    keys: tuple[str, ...]
    becomes: str  # our key, an option of the command line, "always so" or "no equivalent"
    why: str
    shown: tuple[str, ...]
    verdict: tuple[Status, str, str] | None = None  # status, note, ours: the same for all values; None: by the value
    listed: Mapping[Any, tuple[Status, str]] = field(default_factory=dict)  # of single plain values: status, note
    default: Any = None
    last: bool = False  # true: applied after all others, since it depends on them
    read: Callable[[Any], Any] | None = None
    words: Mapping[str, Word] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # other keys; where none of them is on, this one has no effect
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Other keys, and the plain values with which alone this one counts; "absent" if the key has no value."""
    otherwise: str = ""  # why there is no equivalent where `when` does not hold; empty: it has no effect there either
    beside: tuple[str, ...] = ()  # other keys, or words, that the function reads
    function: Callable[[Draft, str, Any], None] | None = None

    @property
    def sets(self) -> bool:
        """True if the value itself decides: neither is the verdict fixed, nor does a function read it."""
        return self.verdict is None and self.function is None


@dataclass(frozen=True)
class Entry:
    key: str
    value: Any
    status: Status
    becomes: str  # `key = value` of ours, or empty
    note: str  # what differs, or why there is no equivalent


@dataclass
class Draft:
    """Our configuration in the making."""

    rules: Mapping[str, Rule]  # the rule of each key that the source has, or that is given
    given: Mapping[str, Any]  # the source's keys, dotted, and their values
    defaults: Mapping[str, Any]  # the source's values for keys that are absent
    ranks: int | None
    name: str
    machines: int | None = None
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # the comment beside each of our keys: its source
    asked: dict[str, tuple[str, str]] = field(default_factory=dict)  # our keys left to the user: example, what to give
    entries: list[Entry] = field(default_factory=list)
    _by_default: set[str] = field(default_factory=set)  # our keys set by a default of theirs, which the file overrides

    def apply(self, key: str) -> None:
        """Apply the rule of one of their keys; raises `Wrong` for a value the source would not take."""
        rule, value = self.rules[key], self.get(key)
        if without_effect := self._without_effect(rule, value):
            self.tell(key, *without_effect)
        elif rule.function is not None:
            rule.function(self, key, value)
        elif rule.verdict is not None:
            if rule.read and value is not None:
                rule.read(value)
            self.tell(key, *rule.verdict)
        elif rule.words and (rule.read is None or str(value).lower() in rule.words):
            self.put_word(key, value)
        else:
            self.put(rule.becomes, rule.read(value) if rule.read else value, key)

    def _without_effect(self, rule: Rule, value: Any) -> tuple[Status, str] | None:
        """Return status and note of a value that the rule lists, or that is not looked at beside other keys."""
        if value is not None or "none" not in rule.words:
            if listed := rule.listed.get(plain(value)):
                return listed
            if value is None and rule.sets:
                return NOT_ASKED
        for other, values in rule.when.items():
            present = self.get(other) if self._has(other) else "absent"
            if not any(plain(item) in values for item in (present if isinstance(present, list) else [present])):
                why = f"not looked at with {other} = {str(self.get(other) or 'no').lower()}"
                why = f"{other} counts instead" if values == ("absent",) else why
                return ("none", rule.otherwise) if rule.otherwise else ("always", why)
        if rule.needs and not any(map(self._is_on, rule.needs)):
            return "always", f"of no effect without {either(rule.needs)}"
        return None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of one of their keys: the file's, or their default; `default` where there is none."""
        value = self.given.get(key, self.defaults.get(key))
        return default if value is None else value

    def count(self, key: str, default: Any = None) -> int:
        """Return a number of theirs from 1 on; raises `Wrong` with its key."""
        try:
            return positive(self.get(key, default))
        except Wrong as error:
            raise Wrong(f"{key}: {error}") from None

    def _is_on(self, key: str) -> bool:
        return self._has(key) and str(self.get(key) or "no").lower() not in FALSE

    def _has(self, key: str) -> bool:
        """Return True if one of their keys has a value, and not one that means "not given"."""
        value = self.get(key)
        return value is not None and plain(value) not in self.rules[key].listed

    def tell(self, key: str, status: Status, note: str, becomes: str = "", value: Any = AS_GIVEN) -> None:
        """Record what became of one of their keys. Defaults are not recorded."""
        if key in self.given:
            self.entries.append(Entry(key, self.get(key) if value is AS_GIVEN else value, status, becomes, note))

    def put(self, ours: str, value: Any, key: str, note: str = "", *, differs: str = "", given: Any = AS_GIVEN) -> None:
        """Set a key of ours from one of theirs; raises `Wrong` if another one has set it to something else.

        ``note``: how the value follows; ``differs``, in its place: what is not the same there.
        """
        if key not in self.given and (ours in self.tree or value == our_default(ours)):
            return
        given = self.get(key) if given is AS_GIVEN else given
        if ours in self.tree and self.tree[ours] != value and ours not in self._by_default:
            raise Wrong(f"{key} = {given} contradicts {self.origins[ours]}: both decide {ours}; keep one")
        (self._by_default.discard if key in self.given else self._by_default.add)(ours)
        self.tree[ours] = value
        self.asked.pop(ours, None)
        self.origins[ours] = f"{key} = {shown(given)}" + ("" if key in self.given else ", its default")
        becomes = f"{ours} = {toml_value(value)}"
        self.tell(key, "near" if differs else "set", differs or note, becomes, given)

    def put_word(self, key: str, value: Any) -> None:
        """Do what the rule of `key` lists for a value."""
        words = self.rules[key].words
        if value is None and "none" not in words:
            self.tell(key, *NOT_ASKED)
            return
        if set(words) == {"true", "false"}:
            value = boolean(value)
        word = self.word(key, value)
        for ours, setting in word.sets.items():
            self.put(ours, setting, key, differs=word.differs, given=value)
        if word.none or not word.sets:
            self.tell(key, "none" if word.none else "always", word.none or word.always, value=value)
        if word.copies:
            self.replicate(word.copies, key, value)
        if word.ask:
            self.ask(word.ask[0], word.ask[1], word.ask[2].format(str(value).lower()))

    def word(self, key: str, value: Any) -> Word:
        """Return what the rule of `key` lists for a value, whatever its case; "*" is any other. Raises `Wrong`."""
        words = self.rules[key].words
        spelling = "none" if value is None else str(value).strip()
        by_lower = {word.lower(): word for word in words}
        if spelling.lower() not in by_lower and "*" not in words:
            raise Wrong(f"found {spelling!r}, wanted {either(words)}{nearest(spelling, words)}")
        return words[by_lower.get(spelling.lower(), "*")]

    @property
    def sharing(self) -> int:
        """The ranks that share each matrix and sequence, and so read the same samples."""
        tensor = self.tree.get("shard.tensor", self.tree.get("shard.tensor.ranks", 1))
        return int(tensor * self.tree.get("shard.context", 1))

    @property
    def readers(self) -> int | None:
        """The ranks that read different samples; None: unknown. Raises `Wrong` if the axes do not divide the ranks."""
        if self.ranks is not None and self.ranks % self.sharing:
            axes = [f"{key.removesuffix('.ranks')} = {self.tree[key]}" for key in AXES if key in self.tree]
            raise Wrong(f"{' × '.join(axes)} do not divide {self.ranks} ranks; change one of them, or --ranks")
        return None if self.ranks is None else self.ranks // self.sharing

    @property
    def readers_in_words(self) -> str:
        """`readers` as an expression, such as "8 ranks / 2"."""
        ranks = f"{self.ranks or ''} ranks".strip()
        return f"{ranks} / {self.sharing}" if self.sharing > 1 else ranks

    def replicate(self, copies: str, key: str, value: Any) -> None:
        """Keep one full copy of the model in each rank, or group of ranks that share it ("ranks"), or "machines"."""
        number = self.readers if copies == "ranks" else self.machines
        if number is None:
            self.ask("shard.replicate", "1", f"as many as there are {copies}: a whole copy in each")
        else:
            self.put("shard.replicate", number, key, given=value)

    def ask(self, ours: str, example: str, what: str) -> None:
        """Leave a key of ours to the user, unless it is set."""
        if ours not in self.tree:
            self.asked.setdefault(ours, (example, what))

    def turn(self, key: str) -> tuple[bool, bool]:
        """Return when the rule of one of their keys is applied: axes first, then what is not `last`."""
        return self.rules[key].last, self.rules[key].becomes not in AXES

    def in_order(self) -> tuple[Entry, ...]:
        order = list(self.given)
        return tuple(sorted(self.entries, key=lambda entry: order.index(entry.key)))


our_fields = functools.cache(fields)


def our_default(ours: str) -> Any:
    """Return the default of a key of ours; None where it is required, or inside a table."""
    info = our_fields().get(ours)
    return None if info is None or info.is_required() else info.get_default(call_default_factory=True)


def shown(value: Any) -> str:
    """Return a value of theirs for a comment: one line of at most 60 characters."""
    text = " ".join((value if isinstance(value, str) else json.dumps(value, default=str)).split())
    return text if len(text) <= 60 else text[:57] + "..."


def either(words: Iterable[Any]) -> str:
    """Join words as "a, b or c"."""
    listed = [str(word) for word in words]
    return " or ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def nearest(word: str, candidates: Iterable[Any]) -> str:
    by_lower = {str(candidate).lower(): str(candidate) for candidate in candidates}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"; nearest: {by_lower[near[0]]}" if near else ""


def later(draft: Draft, key: str, value: Any) -> None:
    """Leave a key that decides something together with others to `finish` of its framework."""


# Readers: values as other frameworks write them. YAML, JSON and environment variables do not agree on what a number is.

TRUE, FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")


def boolean(value: Any) -> bool:
    """Read true or false, also as a word; raises `Wrong`, as every reader does."""
    word = str(value).strip().lower()
    return checked(word, word in TRUE + FALSE, value, "true or false") in TRUE


def number(value: Any) -> float:
    """Read a finite number; YAML gives "5e-5" as a word."""
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        result = math.nan
    return checked(result, math.isfinite(result), value, "a number")


def number_or_inf(value: Any) -> float:
    """Read a number, where 0 stands for "no bound"."""
    return number(value) or math.inf


def integer(value: Any) -> int:
    return int(checked(number(value), number(value).is_integer(), value, "a whole number"))


def positive(value: Any) -> int:
    return checked(integer(value), integer(value) > 0, value, "a whole number from 1 on")


def rounded_up(value: Any) -> int:
    return math.ceil(checked(number(value), number(value) > 0, value, "a number above 0"))


def numbers(value: Any) -> list[float]:
    return [number(item) for item in checked(value, isinstance(value, (list, tuple)), value, "an array of numbers")]


def names(value: Any) -> list[str]:
    """Read words with commas between them, or an array of words; empty ones are dropped."""
    listed = value.split(",") if isinstance(value, str) else value
    good = isinstance(listed, (list, tuple)) and all(isinstance(name, str) for name in listed)
    return [name.strip() for name in checked(listed, good, value, "names with commas between them") if name.strip()]


def text(value: Any) -> str:
    return str(checked(value, isinstance(value, str) and value.strip(), value, "a word")).strip()


def table(value: Any) -> dict[str, Any]:
    """Read keys and values; None is an empty table."""
    return dict(checked(value or {}, value is None or isinstance(value, dict), value, "a table"))


def checked(result: Value, good: object, value: Any, wanted: str) -> Value:
    """Return what was read of a value; raises `Wrong` if that is not good."""
    if not good:
        raise Wrong(f"found {value!r}, wanted {wanted}")
    return result


def plain(value: Any) -> Any:
    """Return a value that compares: words in lower case, "true" and digits as what they mean, empty tables as None."""
    if isinstance(value, str):
        word = value.strip().lower()
        return int(word) if word.isdecimal() else {"true": True, "false": False}.get(word, word)
    if isinstance(value, (dict, list, tuple)):
        return str(value) if value else None
    return value
