"""The page of all tables. One machine's figures stand on it: those that are not measured anew stay as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.table import Table


def kept(path: Path, where: str) -> dict[str, str]:
    """The sections of an earlier page, by benchmark; none where there is no page.

    Args:
        path: of the page.
        where: the machine, as ``machine.describe`` says it.

    Raises:
        ValueError: the page is another machine's.
    """
    if not path.exists():
        return {}
    head, *sections = path.read_text(encoding="utf-8").rstrip("\n").split("\n\n## ")
    if head != _head(where):
        raise ValueError(f"{path} holds figures of another machine or version; run all benchmarks to write it anew")
    found = {}
    for section in sections:
        if name := re.search(r"^`python -m benchmarks (\w+)`$", section, re.MULTILINE):
            found[name[1]] = f"## {section}"
    return found


def page(where: str, order: Sequence[str], tables: Sequence[Table], others: Mapping[str, str]) -> str:
    """The page's text.

    Args:
        where: the machine.
        order: of benchmarks.
        tables: what was measured.
        others: what ``kept`` gave.
    """
    sections = {**others, **{table.name: table.markdown() for table in tables}}
    return "\n\n".join([_head(where), *(sections[name] for name in order if name in sections)]) + "\n"


def _head(where: str) -> str:
    return (
        "# Benchmarks\n\n"
        "What TrueShard costs beside a hand-written `fully_shard` loop. This page is what\n\n"
        "```\npython -m benchmarks --markdown docs/benchmarks.md\n```\n\n"
        f"wrote on this machine: {where}. `make bench` shows the tables for yours."
    )
