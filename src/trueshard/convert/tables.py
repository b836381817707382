"""The frameworks that `trueshard convert` has rules for, read from the tables in `frameworks/`.

Each framework is a table in `frameworks/`: what concerns it as a whole; then a line each for keys that set nothing by
themselves, in `always` (keys, why it is so here anyway), `none` (keys, why there is no equivalent, values that mean
"not asked for"), `command` (keys, option, why), `part` and `later` (keys, our key that another of theirs decides too,
why, their default). Every other key, or several alike, has a `[[rule]]`:

- `keys`: their names, dotted; `section.*` is any other key of a section. `shown`: the names in the documents, where
  these differ.
- One of `set` = our key; `always` = why it is so here anyway; `none` = why there is no equivalent; `command` = an
  option; `part` or `later` = our key that another of theirs decides too; `function` = a function's name, and `becomes`.
- `why`: how, what differs, or what to do instead; left out: "the same". `default`: theirs, if that decides something
  here. A text that starts with "$" stands in `[texts]` of `shared.toml`.
- With `set`: `read` = a reader's name (left out: by the type of our key), or `words` = a table from their values to
  ours (`true` alone: false sets nothing), a name of `[words]` in `shared.toml`, or a list: `of` = theirs ("*": any
  other), `value` = ours (or `sets` = several of our keys), and the rest as in `Word`.
- `off`: values that mean "not asked for". `unless`: values without equivalent.
  `needs`, `when`, `otherwise`, `beside`, `last`: as in `Rule`.
- `extends` (of a framework) = another one, whose rules count for keys that have none here; `defaults` = other defaults.
- `[[back]]`, with `ours` and perhaps `value`: what a choice of a plan is there, where no word of a rule says it: `keys`
  and their values, or `say`, what to change elsewhere. "{}" is the value, "{total}" the samples of a step of all ranks.
- `[tail]`: final norm and head are one unit; `kept` = words for resharding with which it stays gathered, `sums` = how
  gradients of microbatches add up, `with` = a key that must be 2 for that.
- `[new]`: a new file: its `name`, its `text` in YAML's flow style, the command to `start` it, and where models are of
  their own, `models`: ours, family and flavor.
- `take` = another framework, whose rules count for `keys`, where the conditions of `when` hold.
- `include` = such a table in `shared.toml` or in this file, its keys with a prefix (the first one is shown as `shown`),
  under other `names`, or in capitals (`upper`).
"""

from __future__ import annotations

import functools
import pkgutil
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueshard.convert.engine import NOT_ASKED, Draft, Rule, Status, Word, number, our_fields, plain, positive, text
from trueshard.text import tomllib

FOLDER = Path(__file__).with_name("frameworks")
NOTHING = (None, "", "none")
COLUMNS = {"part": ("part", "why", "default"), "later": ("later", "why", "default"), "command": ("command", "why")}
COLUMNS |= {"always": ("always",), "none": ("none",)}
"""Kinds of keys that have a line each in a table → its cells after the keys."""
READERS: dict[Any, Callable[[Any], Any]] = {float: number, int: positive, str: text}
"""Readers of values that become a key of ours, by its type."""


@dataclass(frozen=True)
class Framework:
    """A kind of configuration that can be converted."""

    name: str
    title: str
    own: tuple[Rule, ...]  # those of its table
    rules: tuple[Rule, ...]  # and those of the framework that it extends
    finish: Callable[[Draft], None]  # sets what several keys decide, such as batch sizes, and asks for what is missing
    arrange: Callable[[dict[str, Any], Set[str]], dict[str, Any]]  # (tree, known sections) → its full present form
    marks: Sequence[str] = ()  # keys of the top level that only this kind has
    silent: Sequence[str] = ()  # a file of these sections alone says nothing of other keys, which else have defaults
    back: Sequence[Mapping[str, Any]] = ()  # `ours`, and `value` (absent: any), in `keys` of theirs, or as `say`
    tail: Mapping[str, Any] = field(default_factory=dict)  # as `[tail]` has it
    new: Mapping[str, Any] = field(default_factory=dict)  # as `[new]` has it

    @functools.cached_property
    def index(self) -> dict[str, Rule]:
        return {key: rule for rule in self.rules for key in rule.keys}

    def prepare(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a tree in the full present form; raises `Wrong` for one that cannot be brought into it."""
        return self.arrange(tree, {key.partition(".")[0] for key in self.index})

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the framework's values for absent keys, where they count."""
        if self.silent and {key.partition(".")[0] for key in given} <= set(self.silent):
            return {}
        return {rule.keys[0]: rule.default for rule in self.rules if rule.default is not None}


@functools.cache
def table(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def framework(file: str) -> Framework:
    tree = table(file)
    own = tuple(_rule(row) for row in _rows(tree))
    return Framework(
        name=tree["name"],
        title=tree["title"],
        own=own,
        rules=own + tuple(_inherited(tree, own)),
        finish=_named(tree["finish"]),
        arrange=_named(tree["prepare"]) if "prepare" in tree else lambda given, sections: given,
        **{name: tree[name] for name in ("marks", "silent", "back", "tail", "new") if name in tree},
    )


def _inherited(tree: Mapping[str, Any], own: Sequence[Rule]) -> Iterator[Rule]:
    """Yield the rules of the framework that this one `extends`, for the keys that it has no rule of its own for."""
    taken = {key for rule in own for key in rule.keys}
    defaults = tree.get("defaults", {})
    for row in _rows(table(tree["extends"])) if "extends" in tree else ():
        if keys := [key for key in row["keys"] if key not in taken]:
            default = {"default": defaults[keys[0]]} if keys[0] in defaults else {}
            yield _rule({**row, **default, "keys": keys})


def _rows(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rules of a table, with those it includes in their place, and its verdicts after them."""
    for row in tree["rule"]:
        if "take" in row:
            for taken in _rows(table(row["take"])):
                if keys := [key for key in taken["keys"] if key in row["keys"]]:
                    yield {**taken, "keys": keys, "when": taken.get("when", {}) | row.get("when", {})}
            continue
        if "include" not in row:
            yield {**row, "keys": _listed(row["keys"])}
            continue
        for included in _rows(tree.get(row["include"]) or table("shared")[row["include"]]):
            keys = included["keys"]
            shown = [row["shown"] + key for key in keys] if "shown" in row else spelled(row, keys)[: len(keys)]
            when = {spelled(row, [key])[0]: values for key, values in included.get("when", {}).items()}
            more = {name: spelled(row, included.get(name, ())) for name in ("needs", "beside")}
            yield {**included, **more, "keys": spelled(row, keys), "when": when, "shown": shown}
    for kind, columns in COLUMNS.items():
        for keys, *cells in tree.get(kind, ()):
            off = {"off": cells[1:]} if kind == "none" and cells[1:] else {}
            yield {"keys": _listed(keys), **dict(zip(columns, cells, strict=False)), **off}


def spelled(include: Mapping[str, Any], keys: Any) -> list[str]:
    """Return included keys as the framework spells them, under each of its prefixes."""
    named = [include.get("names", {}).get(key, key) for key in keys]
    spelling = [prefix + key for prefix in _listed(include["prefix"]) for key in named]
    return [key.upper() for key in spelling] if include.get("upper") else spelling


def _rule(row: Mapping[str, Any]) -> Rule:
    kind = next((kind for kind in ("function", "always", "none", "command", "part", "later") if kind in row), "set")
    becomes = {"always": "always so", "none": "no equivalent"}.get(kind) or row.get("becomes") or row[kind]
    why = _text(row[kind] if kind in ("always", "none") else row.get("why", "the same"))
    verdicts: dict[str, tuple[Status, str, str]] = {
        "always": ("always", why, ""),
        "none": ("none", why, ""),
        "command": ("command", becomes, ""),
        "part": ("set", why, becomes),
    }
    off = (*NOTHING, *row.get("off", ())) if kind == "none" else (None, *row["off"]) if "off" in row else ()
    listed: dict[Any, tuple[Status, str]] = dict.fromkeys(map(plain, off), NOT_ASKED)
    for exception in row.get("unless", ()):
        listed |= {plain(value): ("none", _text(exception["none"])) for value in exception["of"]}
    more: dict[str, Any] = {name: tuple(row[name]) for name in ("keys", "needs", "beside") if name in row}
    more |= {name: _text(row[name]) for name in ("default", "last", "otherwise") if name in row}
    function = {"function": row.get("function"), "later": "later"}.get(kind)
    return Rule(
        becomes=becomes,
        why=why,
        shown=tuple(_listed(row.get("shown", row["keys"]))),
        verdict=verdicts.get(kind),
        listed=listed,
        read=_named(row["read"]) if "read" in row else None if "words" in row or kind != "set" else _reader(becomes),
        words=dict(_words(row.get("words", ()), becomes)),
        when={key: tuple(values) for key, values in row.get("when", {}).items()},
        function=_named(function) if function else None,
        **more,
    )


def _reader(ours: str) -> Callable[[Any], Any] | None:
    annotation: Any = our_fields()[ours].annotation if ours in our_fields() else None
    while arguments := typing.get_args(annotation):  # of a union, the type that comes first
        annotation = arguments[0]
    return READERS.get(annotation)


def _words(listed: Any, becomes: str) -> Iterator[tuple[str, Word]]:
    if isinstance(listed, Mapping):
        off = [{"of": "false"}] if set(listed) == {"true"} else []
        listed = [*({"of": of, "value": value} for of, value in listed.items()), *off]
    for entry in _listed(listed):
        if isinstance(entry, str):
            yield from _words(table("shared")["words"][entry], becomes)
            continue
        more = {name: _text(value) for name, value in entry.items() if name not in ("of", "value", "sets")}
        sets = {becomes: entry["value"]} if "value" in entry else {}
        word = Word({**sets, **entry.get("sets", {})}, **more)
        yield from ((of, word) for of in _listed(entry["of"]))


def _text(value: Any) -> Any:
    """Return a text of `[texts]` for its name after "$"; any other value as it is."""
    return table("shared")["texts"][value[1:]] if isinstance(value, str) and value.startswith("$") else value


def _named(name: str) -> Any:
    """Return a reader of `engine`, or a function of the module before the dot."""
    return pkgutil.resolve_name(f"trueshard.convert.{name if '.' in name else f'engine.{name}'}")


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value)


FILES = tuple(
    framework(name)
    for name in (
        *("accelerate", "axolotl", "torchtitan", "torchtune", "deepspeed", "composer", "huggingface"),
        *("easyr1", "verl", "trl"),
    )
)
ENVIRONMENT = framework("environment")
FRAMEWORKS = (*FILES, ENVIRONMENT)
