"""Writes docs/configuration.md from the classes of the configuration: `make tables`."""

from __future__ import annotations

import json
import re
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trueshard.train.config import Config
from trueshard.train.parse import section_of

FILE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# The configuration of a training run

`trueshard train CONFIG.toml` reads these tables and keys, and no others. `--set section.key=value` wins over the file
(and over a key there that excludes it: `--set model.path=…` is enough where the file has `model.architecture`);
`--dry-run` prints what results. `examples/` has a short one for each recipe. This page is written by `make tables`.
"""


def reference() -> str:
    """The page."""
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        assert section is not None
        parts.append(table(f"[{name}]", section))
        for key, inner in section.model_fields.items():
            if (nested := section_of(inner.annotation)) is not None:
                parts.append(table(f"[[{name}.{key}]]", nested))
    return "\n".join(parts)


def table(title: str, section: type[BaseModel]) -> str:
    """A heading, what the section is, and a row a key."""
    rows = [f"## `{title}`\n", f"{one_line(section.__doc__)}\n", "| key | values | default | |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if section_of(field.annotation) is not None and "list" in str(field.annotation):
            rows.append(f"| `{name}` | tables, below | none | {one_line(field.description)} |")
            continue
        default = "needed" if field.is_required() else shown(field.get_default(call_default_factory=True))
        values = kinds(field.annotation, field.metadata)
        rows.append(f"| `{field.alias or name}` | {values} | {default} | {one_line(field.description)} |")
    return "\n".join(rows) + "\n"


def kinds(annotation: Any, metadata: Any = ()) -> str:
    """The values that a type takes, in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kinds(arguments[0], arguments[1].metadata if hasattr(arguments[1], "metadata") else arguments[1:])
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(each)}`" for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kinds(each) for each in arguments if each is not type(None)))
    if origin is list:
        return f"array: {kinds(arguments[0])}"
    if origin is dict:
        return f"table: {kinds(arguments[1])}" if arguments[1] is not Any else "table"
    words = {bool: "true, false", int: "integer", float: "number", str: "string", Any: "value"}
    return words[annotation] + bounds(metadata)


def bounds(metadata: Any) -> str:
    """≥ 1 and the like."""
    found = []
    for each in metadata:
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            value = getattr(each, name, None)
            if value is not None:
                found.append(f" {sign} {value if value < 2**32 else '2^63'}")
    return ",".join(found)


def shown(value: Any) -> str:
    """A default as TOML has it."""
    if value is None or value is PydanticUndefined or value in ([], {}):
        return "none"
    if isinstance(value, list) and len(value) > 4:
        return f"{len(value)} patterns" if value else "none"
    return f"`{json.dumps(value)}`"


def one_line(text: str | None) -> str:
    """A docstring as one line of Markdown in a table."""
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
