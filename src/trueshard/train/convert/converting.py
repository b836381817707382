"""`trueshard convert`: a configuration of another framework becomes one of `trueshard train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.convert import accelerate, composer, environment, huggingface, torchtitan
from trueshard.train.convert.batches import ask_the_rest, started
from trueshard.train.convert.reading import flat, guess, read, refuse_unknown
from trueshard.train.convert.rules import MISSING, Source
from trueshard.train.convert.sheet import Entry, Sheet, Wrong, shown
from trueshard.train.convert.writing import ordered, write

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCES = (accelerate.SOURCE, torchtitan.SOURCE, composer.SOURCE, huggingface.SOURCE, environment.SOURCE)
FILES = SOURCES[:-1]
WORDS = {
    "set": "the same",
    "near": "differs",
    "always": "so anyway",
    "command": "when started",
    "none": "no equivalent",
}


@dataclass(frozen=True)
class Converted:
    """A configuration, and how it came about."""

    source: str
    """The framework's name, as `--from` takes it."""
    title: str
    """The same in prose, and whether it was guessed."""
    toml: str
    """The text of the configuration."""
    entries: tuple[Entry, ...]
    """What became of each key that was given, in order."""
    missing: tuple[str, ...]
    """Our keys that only the user can know; each stands in the text as a comment."""
    command: str
    """What starts the run."""

    def report(self) -> str:
        """What was mapped, how, and what has no equivalent and why: a line for each key."""
        rows = [(WORDS[each.status], f"{each.key} = {shown(each.value)}", _became(each)) for each in self.entries]
        wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"From {self.title}: {len({each.key for each in self.entries})} keys."]
        lines += [f"{state.ljust(wide[0])}  {key.ljust(wide[1])}  {note}".rstrip() for state, key, note in rows]
        if self.missing:
            lines.append(f"Yours to set: {', '.join(self.missing)}.")
        return "\n".join([*lines, f"Start it: {self.command}"])

    def write(self, out: Path) -> None:
        """Write the text to a file that does not exist yet; it is there whole, or not at all.

        Raises `UserError` where it exists, or cannot be written.
        """
        if out.exists():
            raise UserError(f"--out {out}: it exists already; remove it, or give another name")
        beside = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            beside.write_text(self.toml, encoding="utf-8")
            beside.rename(out)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written ({error.strerror}); give another place") from None


def convert(
    path: Path | None,
    source: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    ranks: int | None = None,
    out: Path | None = None,
) -> Converted:
    """Convert a file, or the environment.

    Args:
        path: YAML, JSON or TOML, or a shell file that sets variables; None: `environment` is converted.
        source: "accelerate", "torchtitan", "composer", "hf" or "environment"; None: guessed from the keys.
        environment: variables; those of other programs are passed over.
        ranks: processes of the run; None: as the source says, if it does.
        out: what the configuration will be called, for the command that starts it.

    Raises:
        UserError: no such file, a key that the framework does not know, or a value that it would not take.
    """
    tree, kind, title = _find(path, source, environment)
    where = str(path) if path is not None else "the environment"
    known = set(kind.index)
    try:
        given = dict(flat(kind.prepare(tree), known))
    except Wrong as error:
        raise UserError(f"{where}: {error}") from None
    refuse_unknown(given, kind, where)
    if ranks is not None and ranks < 1:
        raise UserError(f"--ranks {ranks}: it is a whole number from 1 on")
    sheet = Sheet(given, {}, ranks, _name(path, kind))
    if kind.assumes(given):
        sheet.defaults = {
            key: rule.default for rule in kind.rules if rule.default is not MISSING for key in rule.keys[:1]
        }
    _apply(kind, sheet, where)
    target = str(out) if out is not None else f"{sheet.name}.toml"
    text = write(sheet, _head(sheet, title, where, target))
    _check(text, sheet, where)
    return Converted(kind.name, title, text, sheet.in_order(), ordered(sheet), started(sheet, target))


def _find(
    path: Path | None, source: str | None, environment: Mapping[str, str] | None
) -> tuple[dict[str, Any], Source, str]:
    """The tree, whose it is, and that in words."""
    chosen = next((each for each in SOURCES if each.name == source), None)
    if source is not None and chosen is None:
        names = ", ".join(each.name for each in SOURCES)
        raise UserError(f"--from {source}: unknown; use one of {names}")
    if path is None:
        if chosen not in (None, SOURCES[-1]):
            raise UserError(f"--from {source}: which file? give its path")
        if not SOURCES[-1].prepare(dict(environment or {})):
            raise UserError("no variable FSDP_*, ACCELERATE_* or PARALLELISM_CONFIG_* is set; give the path of a file")
        return dict(environment or {}), SOURCES[-1], SOURCES[-1].title
    tree = read(path)
    shell = path.suffix.lower() in (".env", ".sh") or path.name == ".env"
    if shell and chosen not in (None, SOURCES[-1]):
        raise UserError(f"--from {source}: {path} is a shell file; leave --from out")
    kind = chosen or (SOURCES[-1] if shell else guess(tree, path, FILES))
    return tree, kind, kind.title if chosen else f"{kind.title} (guessed by its {'ending' if shell else 'keys'})"


def _name(path: Path | None, kind: Source) -> str:
    return path.stem.lstrip(".") or kind.name if path is not None else kind.name


def _apply(kind: Source, sheet: Sheet, where: str) -> None:
    """All rules: those of keys that are given, then those that have a default, then what depends on several."""
    present = [(key, kind.index[key]) for key in sheet.given]
    seen = {id(rule) for _, rule in present}
    absent = [(rule.keys[0], rule) for rule in kind.rules if rule.keys[0] in sheet.defaults and id(rule) not in seen]
    key = ""
    try:
        for key, rule in sorted(present + absent, key=lambda pair: pair[1].together):
            rule.apply(sheet, key, sheet.get(key))
        key = ""
        kind.finish(sheet)
        ask_the_rest(sheet)
    except Wrong as error:
        place = "" if not key or str(error).startswith(key) else f"{key}: "
        raise UserError(f"{where}: {place}{error}; correct it") from None
    untold = set(sheet.given) - {entry.key for entry in sheet.entries}
    assert not untold, f"no rule told what became of {sorted(untold)}"


def _head(sheet: Sheet, title: str, where: str, target: str) -> list[str]:
    lines = [f"From {where}, of {title}, by `trueshard convert`. Start it with: {started(sheet, target)}"]
    if sheet.asked:
        lines += [f"Yours to set, where a line ends in it: {', '.join(ordered(sheet))}"]
    differs = [each for each in sheet.in_order() if each.status == "near"]
    lost = [each for each in sheet.in_order() if each.status == "none"]
    for what, entries in (("Differs:", differs), ("No equivalent:", lost)):
        if entries:
            lines += ["", what, *(f"- {each.key} = {shown(each.value)}: {each.note}" for each in entries)]
    return lines


def _became(entry: Entry) -> str:
    return f"{entry.becomes} ({entry.note})" if entry.becomes and entry.note else entry.becomes or entry.note


def _check(text: str, sheet: Sheet, where: str) -> None:
    """The text is a configuration, once what is asked is set."""
    tree = tomllib.loads(text)
    for key, (example, _) in sheet.asked.items():
        *parents, last = key.split(".")
        table = tree
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = tomllib.loads(f"value = {example}")["value"]
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        ours = ".".join(str(part) for part in first["loc"])
        cause = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"].lower()
        origin = next((sheet.origins[key] for key in sheet.origins if ours.startswith(key)), "its values")
        raise UserError(f"{where}: {origin}: {cause}; correct it") from None
