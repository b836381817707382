"""The rules as tables in Markdown, for `docs/coming-from.md`.

`python -m trueshard.train.convert.tables docs/coming-from.md` puts them between their marks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trueshard.train.convert.converting import SOURCES
from trueshard.train.convert.rules import Source

HEAD = "| key | becomes | how, or why not |\n|---|---|---|"


def table(source: Source) -> str:
    """One row for each rule: its keys, what they become, and the sentence to it."""
    rows = [
        f"| {', '.join(f'`{key}`' for key in _shown(source, rule.keys))} | {_cell(rule.becomes)} | {_cell(rule.why)} |"
        for rule in source.rules
    ]
    return "\n".join([HEAD, *rows])


def fill(page: str) -> str:
    """The page with the present table between the marks of each source."""
    for source in SOURCES:
        begin, end = f"<!-- table {source.name} -->", f"<!-- end {source.name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table(source)}\n{end}{after}"
    return page


def _shown(source: Source, keys: tuple[str, ...]) -> list[str]:
    """Composer's three sections take the same keys, which the page says once."""
    if source.name != "composer":
        return list(keys)
    first = [key for key in keys if not key.startswith(("parallelism_config.fsdp2.", "fsdp_config."))]
    return [key.removeprefix("parallelism_config.") for key in first]


def _cell(text: str) -> str:
    ours = "." in text and " " not in text and "*" not in text
    return f"`{text}`" if ours or text.startswith("[") else text.replace("|", "\\|")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(fill(place.read_text(encoding="utf-8")), encoding="utf-8")
