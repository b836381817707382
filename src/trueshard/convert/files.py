"""`trueshard plan --for NAME --out DIR`: a plan as the files that a user of another framework runs."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
import yaml

from trueshard.convert.planning import FRAMEWORKS, Advice, Change, advise
from trueshard.convert.tables import Framework, framework
from trueshard.errors import UserError
from trueshard.files import replacing
from trueshard.planner.choose_plan import Progress
from trueshard.planner.inputs.architectures import architecture

_YAML = yaml.safe_load, functools.partial(yaml.safe_dump, sort_keys=False)
FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".toml": (tomlkit.parse, tomlkit.dumps),  # with comments
    ".json": (json.loads, lambda tree: json.dumps(tree, indent=2) + "\n"),
    ".yaml": _YAML,
    ".yml": _YAML,
}
"""Suffix of a configuration → its reader and its writer."""


def planned(
    source: str, words: str, model: str, progress: Progress, options: Mapping[str, Any]
) -> tuple[Advice, dict[str, str], str]:
    """Return the advice for a configuration, or for a new one; name and text of the best plan's; and how to start it.

    Args:
        source: a framework.
        words: its configuration, or the model of a new one.
        model, progress, options: of ``advise``.

    Raises as ``advise``, and UserError where the framework trains models of its own, and this is none of them.
    """
    if source not in FRAMEWORKS:
        raise UserError(f"--for {source}: unknown; use one of fsdp2, {', '.join(FRAMEWORKS)}")
    path, start = Path(words), "as before"
    with tempfile.TemporaryDirectory() as folder:
        if path.suffix.lower() not in FORMATS:
            kind, model = framework(source), words
            values = _values(kind, model, options)
            path, start = Path(folder, kind.new["name"]), f"by: {kind.new['start'] % values}"
            path.write_text(FORMATS[path.suffix][1](yaml.safe_load(kind.new["text"] % values)), encoding="utf-8")
        advice = advise(path, source, model, progress=progress, workers=None, **{"ranks": None, **options})
        return advice, {path.name: _changed(path, advice.changes)}, start


def _values(kind: Framework, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the text of a new configuration, and the command that starts it, are filled with."""
    values = {"ranks": 8, "ranks_per_node": 8, "sequence": 2048, "microbatch": 1, **options, "file": kind.new["name"]}
    nodes, node = -(-values["ranks"] // values["ranks_per_node"]), min(values["ranks"], values["ranks_per_node"])
    theirs = {name: names for name, *names in map(str.split, kind.new.get("models", ()))}
    match = architecture(model)
    family, flavor = theirs.get(match.name if match else "", (None, None))
    if theirs and not family:
        raise UserError(
            f"{model}: {kind.title} trains models of its own; give one of {', '.join(theirs)}, or your "
            f"{values['file']} and this model after it"
        )
    return {**values, "nodes": nodes, "per_node": node, "family": family, "flavor": flavor}


def _changed(path: Path, changes: Sequence[Change]) -> str:
    """Return the text of a configuration with changes of its keys."""
    read, write = FORMATS[path.suffix.lower()]
    tree = read(path.read_text(encoding="utf-8"))
    for *sections, name, value in ([*change.key.split("."), change.value] for change in changes if change.key):
        functools.reduce(lambda table, section: table.setdefault(section, {}), sections, tree)[name] = value
    return write(tree)


def check_new(folder: Path) -> None:
    """Raise UserError for a path that is there, and no empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"--out {folder}: it is there, and no empty folder; give another name, or remove it")


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files, name → text, into a new folder: all of them, or none."""
    check_new(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as scratch:
        scratch.mkdir()
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")
