"""Read a TOML file and `--set` overrides into a validated `Config`, and write one. A wrong input is one line.

- `--set a.b=c` reads c as a TOML value, and as a string where that fails, so that paths need no quotes.
- `--set a.b=` takes a key, a list or a table away: it has its default then.
- Of keys that exclude each other, `--set` of one replaces the other of the file: `--set model.path=…` is enough.
- What `to_toml` writes means the same as the configuration: settings that were left out stand there with their
  defaults, as comments where they would not go with others.
"""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trueshard.errors import UserError, explained, one_line
from trueshard.text import tomllib
from trueshard.train.config import Config

REPLACES = {
    "model.path": ("model.config", "model.architecture", "model.build", "model.fields", "tokenizer.vocab_size"),
    "model.config": ("model.path", "model.revision", "model.architecture", "model.build", "model.fields"),
    "model.architecture": ("model.path", "model.revision", "model.config", "model.build", "model.fields"),
    "model.build": ("model.path", "model.revision", "model.config", "model.architecture", "model.fields"),
    "tokenizer.path": ("tokenizer.vocab_size",),
    "tokenizer.vocab_size": ("tokenizer.path",),
    "data.path": ("data.sources",),
    "data.sources": ("data.path",),
    "train.steps": ("train.epochs",),
    "train.epochs": ("train.steps",),
    "train.microbatch": ("train.accumulate",),
    "train.accumulate": ("train.microbatch",),
    "train.exact": ("train.accumulate",),
}
"""Key of `--set` → keys of the file that it excludes and removes."""
SILENT = ("include",)
"""Keys that mean more if they are set, even to their default: `to_toml` does not set them."""


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration file and `--set` overrides, of which the last wins. Raises `UserError` of one line."""
    tree, overrides = _read(path), list(overrides)
    split = (override.partition("=") for override in overrides)
    set_keys = {key.strip() for key, _, value in split if value.strip() not in ("", "false")}
    replaced = {other for key in set_keys for other in REPLACES.get(key, ())} - set_keys
    for section, name in (key.split(".") for key in replaced):
        if isinstance(tree.get(section), dict):
            tree[section].pop(name, None)
    for override in overrides:
        set_key(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        set_by = {override.partition("=")[0].strip(): f"--set {override}" for override in overrides}
        raise UserError(f"{set_by.get(next(iter(_problems(error))), path)}: {described(error)}") from None


def _read(path: Path) -> dict[str, Any]:
    kinds = (tomllib.TOMLDecodeError, RecursionError)
    with explained(f"{path}: not valid TOML", "correct that place", kinds, one_line):
        return tomllib.loads(read_text(path, "a TOML file"))


def read_text(path: Path, wanted: str) -> str:
    """Return the text of a configuration. Raises `UserError` of one line, which says what is ``wanted``."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"{path}: cannot be read ({reason}); give {wanted}") from None


def set_key(tree: dict[str, Any], text: str) -> None:
    """Set "section.key=value" in a tree of tables; without a value, remove the key. Raises `UserError` of one line."""
    key, equals, value = text.partition("=")
    *tables, last = parts = [part.strip() for part in key.split(".")]
    removes, name = not value.strip(), ".".join(parts)
    if not equals or not all(parts) or not (tables or removes):
        raise UserError(f"--set {text}: wanted section.key=value, such as train.steps=100, or section.key= to unset it")
    tops = (known for known, field in fields().items() if known == name or not section_of(field.annotation))
    if removes and not any(f"{name}.".startswith(f"{top}.") for top in tops):  # "model.fields.x" is known by its top
        raise UserError(f"--set {text}: unknown key {name}; {_nearest(name)}")
    table = tree
    for depth, part in enumerate(tables, start=1):
        table = table.get(part, {}) if removes else table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {text}: {'.'.join(parts[:depth])} is a value, not a table; set it itself")
    if removes:
        table.pop(last, None)
        return
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    table[last] = parsed["value"] if list(parsed) == ["value"] else value.strip()


def described(error: ValidationError) -> str:
    """Return the first problem of a configuration, with its key, in one line."""
    problems = _problems(error)
    key, items = next(iter(problems.items()))
    more, first = f" (and {len(problems) - 1} more)" if len(problems) > 1 else "", items[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}; {_nearest(key)}{more}"
    if first["type"] == "missing":
        return f"{key} is missing; set it{more}"
    if first["type"] == "value_error":
        return f"{first['ctx']['error']}{more}"
    wanted = dict.fromkeys(item["msg"][0].lower() + item["msg"][1:] for item in items)
    return f"{key}: found {json.dumps(first['input'], default=str)}; {' or '.join(wanted)}{more}"


def _problems(error: ValidationError) -> dict[str, list[Any]]:
    """Return the problems of a configuration by key, in order; of a union, each branch has one."""
    problems: dict[str, list[Any]] = {}
    for item in error.errors():
        problems.setdefault(_dotted(item["loc"]), []).append(item)
    return problems


def _dotted(location: tuple[int | str, ...]) -> str:
    """Return the key of a problem, without the branch of a union, which pydantic appends."""
    all_fields, key = fields(), ""
    for part in location:
        if key and section_of(all_fields[_without_places(key)].annotation) is None:
            break
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    return key


def _without_places(key: str) -> str:
    return re.sub(r"\[\d+\]", "", key)


def fields(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Return the field of each key, dotted, in a file's order; a section stands before its own keys."""
    result: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        section = section_of(field.annotation)
        result |= {key: field} | (fields(section, f"{key}.") if section else {})
    return result


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field holds, one or several; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = map(section_of, typing.get_args(annotation))
    return next((section for section in sections if section), None)


def _nearest(key: str) -> str:
    """Return the valid key whose last part resembles that of an unknown one most; of equals, that in its section."""
    section, _, last = _without_places(key).rpartition(".")
    keys = fields()
    siblings = [valid for valid in keys if valid.rpartition(".")[0] == section]
    by_last_part = {valid.rpartition(".")[2]: valid for valid in (*reversed(keys), *siblings)}  # the last one wins
    near = difflib.get_close_matches(last, by_last_part, n=1, cutoff=0.5)
    return f"nearest valid one: {by_last_part[near[0]]}" if near else f"valid ones: {', '.join(siblings)}"


def toml_value(value: Any) -> str:
    """Return a value as TOML: a word, a number, an array or an inline table."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update(value)
        return table.as_string()
    if isinstance(value, list):  # tomlkit writes several tables as sections
        return f"[{', '.join(map(toml_value, value))}]"
    return tomlkit.item(value).as_string()


def toml_key(key: str) -> str:
    """Return a key as TOML: bare where that is allowed."""
    return tomlkit.key(key).as_string()


def to_toml(config: Config) -> str:
    """Return a configuration with all its settings as TOML; those that may not be set are comments."""
    set_keys = config.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    lines: list[str] = []
    for name, section in config:
        if section is None:
            continue
        settings, kept = section.model_dump(mode="json", by_alias=True, exclude_none=True), set_keys.get(name, {})
        is_live = name in set_keys or _is_valid({**set_keys, name: settings})
        lines += ["", f"[{name}]" if is_live else f"# [{name}]"]
        tables: list[str] = []
        for key, value in settings.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                for row in value:
                    tables += ["", f"[[{name}.{key}]]", *(_line(inner, cell) for inner, cell in row.items())]
                continue
            trial = {**set_keys, name: {**kept, key: value}}
            is_live = key in kept or (key not in SILENT and _is_valid(trial))
            lines.append(("" if is_live else "# ") + _line(key, value))
        lines += tables
    return "\n".join(lines).lstrip("\n") + "\n"


def _line(key: str, value: Any) -> str:
    return f"{toml_key(key)} = {toml_value(value)}"


def _is_valid(tree: dict[str, Any]) -> bool:
    try:
        Config.model_validate(tree)
    except ValueError:
        return False
    return True
