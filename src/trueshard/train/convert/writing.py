"""Our configuration as TOML, each line with where it comes from."""

from __future__ import annotations

import functools

from trueshard.train.config import Config
from trueshard.train.convert.sheet import Sheet, section_of, toml_key, toml_value


def write(sheet: Sheet, head: list[str]) -> str:
    """The text: `head` as comments, then the sections in our order; what is asked stands there as a comment."""
    lines = [f"# {line}".rstrip() for line in head]
    keys = _sorted([*sheet.tree, *sheet.asked])
    for section in Config.model_fields:
        own = [key for key in keys if key.startswith(f"{section}.")]
        if own:
            lines += ["", f"[{section}]", *(_line(sheet, key) for key in own)]
    return "\n".join(lines) + "\n"


def ordered(sheet: Sheet) -> tuple[str, ...]:
    """The keys that are asked, in our order."""
    return tuple(_sorted(list(sheet.asked)))


def _sorted(keys: list[str]) -> list[str]:
    order = _order()
    return sorted(keys, key=lambda key: order[".".join(key.split(".")[:2])])


@functools.cache
def _order() -> dict[str, int]:
    """The place of each key in a file."""
    keys = [
        f"{section}.{field.alias or name}"
        for section in Config.model_fields
        for name, field in section_of(section).model_fields.items()
    ]
    return {key: place for place, key in enumerate(keys)}


def _line(sheet: Sheet, key: str) -> str:
    name = ".".join(toml_key(part) for part in key.split(".")[1:])
    if key in sheet.tree:
        return f"{name} = {toml_value(sheet.tree[key])}  # {sheet.origins[key]}"
    example, what = sheet.asked[key]
    return f"# {name} = {example}  # yours: {what}"
