"""Writes the tables of docs/coming-from.md from the rules of `trueshard convert`: `make tables`."""

from __future__ import annotations

from pathlib import Path

from trueshard.convert.engine import Rule
from trueshard.convert.tables import FRAMEWORKS, Framework

FILE = Path(__file__).parents[1] / "docs" / "coming-from.md"
HEAD = "| key | becomes | how, or why not |\n|---|---|---|"


def markdown(source: Framework) -> str:
    """Return a table with a row for each rule, section by section: its keys, what they become, and why."""
    sections = list(dict.fromkeys(_section(rule) for rule in source.own))
    rows = [
        f"| {', '.join(f'`{key}`' for key in rule.shown)} | {_cell(rule.becomes)} | {_cell(_sentence(rule))} |"
        for rule in sorted(source.own, key=lambda rule: sections.index(_section(rule)))
    ]
    return "\n".join([HEAD, *rows])


def _section(rule: Rule) -> str:
    return rule.shown[0].partition(".")[0]


def fill(page: str) -> str:
    """Return a page with the present table between the marks of each framework."""
    for source in FRAMEWORKS:
        begin, end = f"<!-- table {source.name} -->", f"<!-- end {source.name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{markdown(source)}\n{end}{after}"
    return page


def _sentence(rule: Rule) -> str:
    """Return why, and which values have no equivalent."""
    reasons: dict[str, list[str]] = {}
    for value, (status, reason) in rule.listed.items():
        if status == "none":
            reasons.setdefault(reason, []).append(f"`{str(value).lower()}`")
    return "; ".join([rule.why, *(f"{', '.join(each)}: {reason}" for reason, each in reasons.items())])


def _cell(text: str) -> str:
    ours = "." in text and " " not in text and "*" not in text
    return f"`{text}`" if ours or text.startswith("[") else text.replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(fill(FILE.read_text(encoding="utf-8")), encoding="utf-8")
