"""Models known by name: short names such as ``llama-3-70b``, and names on the Hugging Face hub. Nothing is downloaded.

A hub name is looked for in the hub's cache on this machine first, then among the known ones.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from trueshard.text import nearest, tomllib

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TUNED = re.compile(r"(-(instruct|chat|base|it|pt|hf|thinking|\d{4}))+$")
"""Endings, in lower case, of names of models that were trained further and have the same architecture."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of the table: enough of its ``config.json`` to build the model."""

    name: str
    hub: tuple[str, ...]
    """Names on the hub; the first one's ``config.json`` is the source."""
    also: tuple[str, ...]
    """Other short names."""
    parameters: int
    fields: Mapping[str, Any]
    """Settings of ``config.json``."""


@functools.cache
def known() -> dict[str, Architecture]:
    """Return the table of architectures, by name."""
    text = resources.files("trueshard.planner.inputs").joinpath("architectures.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)

    def fields(name: str) -> dict[str, Any]:
        entry = table[name]
        inherited = fields(entry["like"]) if "like" in entry else {}
        return inherited | {k: value for k, value in entry.items() if k not in ("like", "hub", "also", "parameters")}

    return {
        name: Architecture(name, tuple(entry["hub"]), tuple(entry.get("also", ())), entry["parameters"], fields(name))
        for name, entry in table.items()
    }


def architecture(words: str) -> Architecture | None:
    """Return the architecture of a short name or of a name on the hub, in any case; None if it is not known."""
    wanted = {words.lower(), _untuned(words)}
    for entry in known().values():
        names = {name.lower() for name in (entry.name, *entry.also, *entry.hub)} | set(map(_untuned, entry.hub))
        if names & wanted:
            return entry
    return None


def _untuned(name: str) -> str:
    return _TUNED.sub("", name.lower())


def cached(words: str) -> Path | None:
    """Return the ``config.json`` of a hub name in the hub's cache on this machine; None if it is not there."""
    if not _HUB_NAME.fullmatch(words):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(words, "config.json")
    except (ImportError, ValueError):  # no such library, or no valid name
        return None
    return Path(path) if isinstance(path, str) else None


def listed() -> str:
    """Return all short names, sizes of a family together: ``gpt2, llama-2-7b/13b/70b, …``."""
    families: dict[str, list[str]] = {}
    for name in known():
        match = re.fullmatch(r"(.+)-((?:\d+x)?[\d.]+[bm])", name)
        family, size = match.groups() if match else (name, "")
        families.setdefault(family, []).append(size)
    return ", ".join(f"{family}-{'/'.join(sizes)}" if all(sizes) else family for family, sizes in families.items())


def unknown(words: str, folder: Path) -> str:
    """Return what to do about a model that is neither on disk nor known, in one line; ``folder``: where it would be."""
    name = words.rpartition("/")[2].lower()
    near = difflib.get_close_matches(_untuned(name).removeprefix("meta-"), known(), n=1, cutoff=0.5)
    nearby = f"the nearest known architecture is {near[0]} (--help lists all)" if near else f"known are {listed()}"
    if _HUB_NAME.fullmatch(words) and not folder.is_dir():
        return (
            f"{words!r} is not on this machine: the planner needs its config.json alone, no weights "
            f"(hf download {words} config.json --local-dir {name}; then give {name}); {nearby}"
        )
    beside = nearest(Path(words).name, [path.name for path in folder.glob("[!.]*")])
    return (
        f"there is no model {words!r}: give a folder with a config.json, that file, file.py:factory, or a known "
        f"architecture; {nearby}.{beside}"
    )
