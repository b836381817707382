"""A file of another framework as a tree of keys, and which framework's it is."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trueshard.errors import UserError, one_line
from trueshard.train.convert.rules import Source
from trueshard.train.convert.sheet import Wrong, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".env", ".sh")
ASSIGNED = re.compile(r"\s*(?:(?:export|env)\s+)?[A-Za-z_][A-Za-z0-9_]*=")
OURS = ("run", "shard", "data")


def read(path: Path) -> dict[str, Any]:
    """The tree in a YAML, JSON or TOML file, or the variables that a shell file sets.

    Raises `UserError` for a file that is missing, malformed, or of another kind.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); give a text file") from None
    kind = path.suffix.lower() if path.name != ".env" else ".env"
    if kind not in SUFFIXES:
        raise UserError(f"{path}: a file of an unknown kind; give one that ends in {', '.join(SUFFIXES)}")
    try:
        tree = _variables(content) if kind in (".env", ".sh") else _parse(content, kind)
    except (ValueError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: malformed: {one_line(error)}; correct that place") from None
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path}: no keys are in it; give the file that holds the configuration")
    return tree


def _parse(content: str, kind: str) -> Any:
    if kind == ".toml":
        return tomllib.loads(content)
    if kind == ".json":
        return json.loads(content)
    try:
        import yaml
    except ImportError:
        raise UserError("PyYAML is missing, which reads YAML; install pyyaml") from None
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _variables(content: str) -> dict[str, str]:
    """What a shell file assigns, by `export`, alone, or before a command; other lines are no settings."""
    found: dict[str, str] = {}
    for line in content.replace("\\\n", " ").splitlines():
        if not ASSIGNED.match(line):
            continue
        for word in shlex.split(line, comments=True):
            name, equals, value = word.partition("=")
            if equals and name.isidentifier():
                found[name] = value
            elif word not in ("export", "env"):
                break
    return found


def guess(tree: Mapping[str, Any], path: Path, sources: Sequence[Source]) -> Source:
    """The framework whose keys these are; raises `UserError` where that is not plain."""
    if path.suffix.lower() == ".toml" and set(OURS) & set(tree):
        raise UserError(f"{path}: this is a configuration of TrueShard; start it with `trueshard train {path}`")
    marked = [source for source in sources if set(source.marks) & set(tree)]
    if len(marked) == 1:
        return marked[0]
    candidates = marked or list(sources)
    hits = {source.name: _known(source, tree) for source in candidates}
    best = [source for source in candidates if hits[source.name] == max(hits.values()) > 0]
    if len(best) != 1:
        which = "none of the frameworks" if not best else " or ".join(source.title for source in best)
        names = ", ".join(source.name for source in sources)
        raise UserError(f"{path}: its keys are those of {which}; say which with --from ({names})")
    return best[0]


def _known(source: Source, tree: Mapping[str, Any]) -> int:
    """How many keys the framework knows, less those that it does not."""
    known = set(source.index)
    try:
        return sum(1 if key in known else -1 for key, _ in flat(source.prepare(dict(tree)), known))
    except Wrong:
        return 0


def flat(tree: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value): tables are gone into unless they are themselves a known key."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        inside = any(each.startswith(f"{key}.") for each in known)
        if key not in known and inside and isinstance(value, dict):
            yield from flat(value, known, f"{key}.")
        elif key in known or not (inside and value is None):
            yield key, value


def refuse_unknown(given: Mapping[str, Any], source: Source, where: str) -> None:
    """Raises `UserError` for the first key that the framework does not know, with the nearest one that it does."""
    known = list(source.index)
    for key in given:
        if key not in source.index:
            near = nearest(key, known) or nearest(key.rpartition(".")[2], [each.rpartition(".")[2] for each in known])
            raise UserError(f"{where}: unknown key {key} for {source.title}{near}; correct it, or remove it")
