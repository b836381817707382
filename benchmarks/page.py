"""The page of all tables, and before them what they say of TrueShard over each peer, in one.

One machine's figures stand on it: those that are not measured anew stay as they are. The summary is part of the page:
each of its rows names the benchmark that it is from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.table import Over, Table

_SUMMARY = "In short: TrueShard over each peer"


@dataclass
class Kept:
    """What an earlier page says, by benchmark."""

    sections: dict[str, str] = field(default_factory=dict)
    over: dict[str, list[Over]] = field(default_factory=dict)


def kept(path: Path, where: str) -> Kept:
    """What an earlier page says; nothing where there is no page.

    Args:
        path: of the page.
        where: the machine, as ``machine.describe`` says it.

    Raises:
        ValueError: the page is another machine's.
    """
    if not path.exists():
        return Kept()
    head, *sections = path.read_text(encoding="utf-8").rstrip("\n").split("\n\n## ")
    if head != _head(where):
        raise ValueError(f"{path} holds figures of another machine or version; run all benchmarks to write it anew")
    result = Kept()
    for section in sections:
        if section.startswith(_SUMMARY):
            result.over = _read_summary(section)
        elif name := re.search(r"^python -m benchmarks (\w+)", section, re.MULTILINE):
            result.sections[name[1]] = f"## {section}"
    return result


def page(where: str, order: Sequence[str], tables: Sequence[Table], others: Kept) -> str:
    """The page's text.

    Args:
        where: the machine.
        order: of benchmarks.
        tables: what was measured.
        others: what ``kept`` gave.
    """
    sections = {**others.sections, **{table.name: table.markdown() for table in tables}}
    over = {**others.over, **{table.name: list(table.over) for table in tables}}
    parts = [_head(where), _summary([(name, over.get(name, [])) for name in order])]
    return "\n\n".join([*parts, *(sections[name] for name in order if name in sections)]) + "\n"


def _head(where: str) -> str:
    return (
        "# Benchmarks\n\n"
        "What TrueShard costs, and what it gets right, beside a hand-written `fully_shard` loop and its peers. This "
        "page is what\n\n"
        "```bash\npython -m benchmarks --markdown docs/benchmarks.md\n```\n\n"
        f"wrote on this machine: {where}. `make bench` shows the tables for yours.\n\n"
        "On CPUs ratios carry over to other machines, absolute times do not: what is in seconds, is a promise or shown "
        "beside a ratio. Tokens per second and memory on a GPU are what `python -m benchmarks --device cuda` "
        "shows; it has not run on one yet, and nothing of it stands here."
    )


def _summary(over: Iterable[tuple[str, Sequence[Over]]]) -> str:
    """One row a figure, one column a peer. A peer that has no ratio at all is told in its benchmark's table alone."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    peers: dict[str, bool] = {}
    for name, row in over:
        for one in row:
            rows.setdefault((name, one.figure), {})[one.peer] = one.cell
            peers[one.peer] = peers.get(one.peer, False) or one.cell[:1].isdigit()
    columns = [peer for peer, has in peers.items() if has]
    lines = [
        "| " + " | ".join(["figure", *columns, "benchmark"]) + " |",
        "|---" + "|---:" * len(columns) + "|---|",
        *(
            "| " + " | ".join([figure, *(cells.get(p, "") for p in columns), name]) + " |"
            for (name, figure), cells in rows.items()
        ),
    ]
    words = (
        "Below one, TrueShard takes less. In parentheses the 95% interval of the median, or the least and the largest "
        "of few samples. What the figures are, and why a cell has none, stands in the benchmark's own section."
    )
    return "\n".join([f"## {_SUMMARY}", "", words, "", *lines])


def _read_summary(section: str) -> dict[str, list[Over]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    _, *peers, _ = lines[0]
    rows: dict[str, list[Over]] = {}
    for figure, *cells, name in lines[2:]:
        rows.setdefault(name, []).extend(Over(figure, p, c) for p, c in zip(peers, cells, strict=True) if c)
    return rows


def has_marks(path: Path | None, name: str) -> bool:
    """True if a page has a place for a benchmark's own part: ``<!-- table NAME -->`` to ``<!-- end NAME -->``."""
    return path is not None and path.exists() and _marks(name)[0] in path.read_text(encoding="utf-8")


def replaced(text: str, name: str, part: str) -> str:
    """Return a page with another part between a benchmark's marks."""
    start, end = _marks(name)
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{part}\n\n{end}{after}"


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- table {name} -->", f"<!-- end {name} -->"
