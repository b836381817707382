"""`trueshard convert`: turn a configuration of another framework into one of `trueshard train`.

Reads the file, guesses whose it is, applies the rules of that framework (`tables`), and writes a text and a report.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trueshard.convert.engine import Draft, Entry, Rule, Wrong, nearest, our_fields, shown
from trueshard.convert.tables import ENVIRONMENT, FILES, FRAMEWORKS, Framework, table
from trueshard.errors import UserError, explained, one_line
from trueshard.files import replace_text
from trueshard.text import tomllib
from trueshard.train.config import Config
from trueshard.train.parse import read_text, set_key, toml_key, toml_value

ASSIGNED = re.compile(r"\s*(?:(?:export|env)\s+)?[A-Za-z_][A-Za-z0-9_]*=")
WORDS = {
    "set": "the same",
    "near": "differs",
    "always": "so anyway",
    "command": "when started",
    "none": "no equivalent",
}


def is_listed(key: str, name: str) -> bool:
    """True if a list of globs in `shared.toml` has one of their keys."""
    return any(fnmatch(key.lower(), glob) for glob in table("shared")[name])


@dataclass(frozen=True)
class Converted:
    """A configuration, and how it came about."""

    source: str
    title: str  # the framework in prose, and whether it was guessed
    toml: str
    entries: tuple[Entry, ...]  # what became of each key that was given, in order
    missing: tuple[str, ...]  # our keys that only the user can know; each stands in the text as a comment
    command: str

    @property
    def dropped(self) -> list[str]:
        """The keys that had no equivalent and without which the run computes something else."""
        without = dict.fromkeys(entry.key for entry in self.entries if entry.status == "none")
        return [key for key in without if is_listed(key, "changes")]

    def report(self) -> str:
        """Return a line for each key: what it became, how it differs, or why it has no equivalent."""
        rows = []
        for entry in self.entries:
            note = f"{entry.becomes} ({entry.note})" if entry.becomes and entry.note else entry.becomes or entry.note
            rows.append((WORDS[entry.status], f"{entry.key} = {shown(entry.value)}", note))
        wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"From {self.title}: {len({entry.key for entry in self.entries})} keys."]
        lines += [f"{state.ljust(wide[0])}  {key.ljust(wide[1])}  {note}".rstrip() for state, key, note in rows]
        if self.missing:
            lines.append(f"Yours to set: {', '.join(self.missing)}.")
        if self.dropped:
            lines.append(f"Dropped, so the run computes something else: {', '.join(self.dropped)}.")
        return "\n".join([*lines, f"Start it: {self.command}"])

    def write(self, out: Path) -> None:
        """Write the text to a new file, whole or not at all; raises `UserError`."""
        if out.exists():
            raise UserError(f"--out {out}: it exists already; remove it, or give another name")
        with explained(f"--out {out}: cannot be written", "give another place", OSError, one_line):
            replace_text(out, self.toml)


def convert(
    path: Path | None,
    source: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    ranks: int | None = None,
    out: Path | None = None,
) -> Converted:
    """Convert a YAML, JSON, TOML or shell file, or with path=None the `environment`.

    `source` (a framework's name) is guessed where it is None, `ranks` (processes of the run) taken from the file; `out`
    is the file that the command names. Raises `UserError`: no such file, an unknown key, or a value of the wrong kind.
    """
    draft, kind, title = drafted(path, source, ranks, environment)
    command = _command(draft, out or f"{draft.name}.toml")
    text = _toml(draft, f"From {_place(path)}, of {title}, by `trueshard convert`. Start it with: {command}")
    _check(text, draft, _place(path))
    return Converted(kind.name, title, text, draft.in_order(), tuple(_in_order(draft.asked)), command)


def _place(path: Path | None) -> str:
    return str(path or "the environment")


def drafted(
    path: Path | None, source: str | None, ranks: int | None, environment: Mapping[str, str] | None = None
) -> tuple[Draft, Framework, str]:
    """Return our configuration in the making with all rules applied, the framework, and its title; as `convert`."""
    tree, kind, title = _find(path, source, environment)
    try:
        given = dict(_flat(kind.prepare(tree), set(kind.index)))
    except Wrong as error:
        raise UserError(f"{_place(path)}: {error}") from None
    rules = _rules_of(given, kind, _place(path))
    if ranks is not None and ranks < 1:
        raise UserError(f"--ranks {ranks}: it is a whole number from 1 on")
    name = (path.stem.lstrip(".") if path else "") or kind.name
    draft = Draft(rules, given, kind.defaults(given), ranks, name)
    _apply(kind, draft, _place(path))
    return draft, kind, title


def _find(
    path: Path | None, source: str | None, environment: Mapping[str, str] | None
) -> tuple[dict[str, Any], Framework, str]:
    by_name = {framework.name: framework for framework in FRAMEWORKS}
    if source is not None and source not in by_name:
        raise UserError(f"--from {source}: unknown; use one of {', '.join(by_name)}")
    shell = path is None or path.suffix.lower() in (".env", ".sh") or path.name == ".env"
    if shell and source not in (None, ENVIRONMENT.name):
        remedy = "which file? give its path" if path is None else f"{path} is a shell file; leave --from out"
        raise UserError(f"--from {source}: {remedy}")
    tree: dict[str, Any] = dict(environment or {}) if path is None else _read(path)
    if path is None and not ENVIRONMENT.prepare(tree):
        raise UserError("no variable FSDP_*, ACCELERATE_* or PARALLELISM_CONFIG_* is set; give the path of a file")
    kind = by_name[source] if source else ENVIRONMENT if path is None or shell else _guess(tree, path)
    guessed = "" if source or path is None else f" (guessed by its {'ending' if shell else 'keys'})"
    return tree, kind, f"{kind.title}{guessed}"


def _read(path: Path) -> dict[str, Any]:
    """Read a YAML, JSON or TOML file, or the variables that a shell file sets; raises `UserError`."""
    content = read_text(path, "a text file")
    kind = path.suffix.lower() if path.name != ".env" else ".env"
    if kind not in READERS:
        raise UserError(f"{path}: a file of an unknown kind; give one that ends in {', '.join(READERS)}")
    with explained(f"{path}: malformed", "correct that place", (ValueError, RecursionError, yaml.YAMLError), one_line):
        tree = READERS[kind](content)
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path}: no keys are in it; give the file that holds the configuration")
    return tree


def _variables(content: str) -> dict[str, str]:
    """Return the variables that a shell file assigns, by `export`, alone, or before a command."""
    result: dict[str, str] = {}
    for line in content.replace("\\\n", " ").splitlines():
        if not ASSIGNED.match(line):
            continue
        for word in shlex.split(line, comments=True):
            name, equals, value = word.partition("=")
            if equals and name.isidentifier():
                result[name] = value
            elif word not in ("export", "env"):
                break
    return result


READERS: dict[str, Callable[[str], Any]] = {  # by the suffix of a file
    **dict.fromkeys((".yaml", ".yml"), yaml.safe_load),
    ".json": json.loads,
    ".toml": tomllib.loads,
    **dict.fromkeys((".env", ".sh"), _variables),
}


def _guess(tree: Mapping[str, Any], path: Path) -> Framework:
    """Return the framework whose keys these are; raises `UserError` where that is not plain."""
    if path.suffix.lower() == ".toml" and {"run", "shard", "data"} & set(tree):
        raise UserError(f"{path}: this is a configuration of TrueShard; start it with `trueshard train {path}`")
    candidates = [source for source in FILES if set(source.marks) & set(tree)]
    if len(candidates) != 1:
        candidates = candidates or [source for source in FILES if source.own == source.rules]  # others need a mark
        hits = [_hits(source, tree) for source in candidates]
        candidates = [source for source, hit in zip(candidates, hits, strict=True) if hit == max(hits) > 0]
    if len(candidates) != 1:
        which = " or ".join(source.title for source in candidates) or "none of the frameworks"
        names = ", ".join(source.name for source in FILES)
        raise UserError(f"{path}: its keys are those of {which}; say which with --from ({names})")
    return candidates[0]


def _hits(source: Framework, tree: Mapping[str, Any]) -> int:
    """Return the number of keys that the framework knows, less those that it does not."""
    known = set(source.index)
    try:
        return sum(1 if key in known else -1 for key, _ in _flat(source.prepare(dict(tree)), known))
    except Wrong:
        return 0


def _flat(tree: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value), going into tables of which any key is known."""
    for part, value in tree.items():
        key = f"{prefix}{part}"
        inside = any(name.startswith(f"{key}.") for name in known)
        if inside and isinstance(value, dict):
            yield from _flat(value, known, f"{key}.")
        elif key in known or not (inside and value is None):
            yield key, value


def _rules_of(given: Mapping[str, Any], source: Framework, where: str) -> dict[str, Rule]:
    """Return the rule of each known or given key, `section.*` that of any other in a section; raises `UserError`."""
    known, rules = list(source.index), dict(source.index)
    for key in given:
        section = key
        while key not in rules and (section := section.rpartition(".")[0]):
            if rule := source.index.get(f"{section}.*"):
                rules[key] = rule
        if key in rules:
            continue
        if any(name.startswith(f"{key}.") for name in known):
            raise UserError(f"{where}: {key}: found {given[key]!r}, wanted a table; correct it")
        near = nearest(key, known) or nearest(key.rpartition(".")[2], [name.rpartition(".")[2] for name in known])
        raise UserError(f"{where}: unknown key {key} for {source.title}{near}; correct it, or remove it")
    return rules


def _apply(kind: Framework, draft: Draft, where: str) -> None:
    """Apply all rules: of keys that are given, of those with a default, then what depends on several."""
    seen = {draft.rules[key].keys for key in draft.given}
    absent = [key for key in draft.defaults if draft.rules[key].keys not in seen]
    key = ""
    try:
        for key in sorted([*draft.given, *absent], key=draft.turn):
            draft.apply(key)
        key = ""
        kind.finish(draft)
    except Wrong as error:
        place = "" if not key or str(error).startswith(key) else f"{key}: "
        raise UserError(f"{where}: {place}{error}; correct it") from None
    untold = set(draft.given) - {entry.key for entry in draft.entries}
    assert not untold, f"no rule told what became of {sorted(untold)}"
    if "run.dir" not in draft.tree:
        draft.tree["run.dir"] = f"runs/{draft.name}"
        draft.origins["run.dir"] = "chosen by its name"
    if not {"model.path", "model.config", "model.architecture"} & {*draft.tree, *draft.asked}:
        draft.ask("model.path", '"path/to/model"', "a directory with config.json, weights and tokenizer")
    if "data.sources" not in draft.tree:
        draft.ask("data.path", '"path/to/data"', "a folder, a file, or the name of a data set")
    if "train.epochs" not in draft.tree:
        draft.ask("train.steps", "1000", "steps in the whole run, or train.epochs")


def _command(draft: Draft, out: Path | str) -> str:
    if draft.machines is not None and draft.machines > 1:
        of_machine = draft.ranks // draft.machines if draft.ranks else "RANKS"
        return f"torchrun --nnodes {draft.machines} --nproc-per-node {of_machine} -m trueshard train {out}"
    return f"trueshard train {out}" + (f" --nproc {draft.ranks}" if draft.ranks else "")


def _toml(draft: Draft, origin: str) -> str:
    """Return the configuration; above it as comments its origin, what is asked, what differs, what is lost."""
    head = [origin]
    if draft.asked:
        head += [f"Yours to set, where a line ends in it: {', '.join(_in_order(draft.asked))}"]
    for what, status in (("Differs:", "near"), ("No equivalent:", "none")):
        if entries := [entry for entry in draft.in_order() if entry.status == status]:
            head += [
                "",
                what,
                *dict.fromkeys(f"- {entry.key} = {shown(entry.value)}: {entry.note}" for entry in entries),
            ]
    lines = [f"# {line}".rstrip() for line in head]
    section = ""
    for key in _in_order([*draft.tree, *draft.asked]):
        first, *parts = key.split(".")
        lines += ["", f"[{first}]"] if first != section else []
        section, name = first, ".".join(map(toml_key, parts))
        if key in draft.tree:
            lines.append(f"{name} = {toml_value(draft.tree[key])}  # {draft.origins[key]}")
        else:
            lines.append("# {} = {}  # yours: {}".format(name, *draft.asked[key]))
    return "\n".join(lines) + "\n"


def _in_order(keys: Sequence[str] | Mapping[str, Any]) -> list[str]:
    order = list(our_fields())
    return sorted(keys, key=lambda key: order.index(".".join(key.split(".")[:2])))


def _check(text: str, draft: Draft, where: str) -> None:
    """Raise `UserError` if the text is no configuration once what is asked is set."""
    tree = tomllib.loads(text)
    for key, (example, _) in draft.asked.items():
        set_key(tree, f"{key}={example}")
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        ours = ".".join(str(part) for part in first["loc"])
        cause = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"].lower()
        origin = next((draft.origins[key] for key in draft.origins if ours.startswith(key)), "its values")
        raise UserError(f"{where}: {origin}: {cause}; correct it") from None
