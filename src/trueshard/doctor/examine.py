"""Look at everything, and print each finding as it is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from trueshard.doctor import Finding, Report, processes, system

STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}


def examine(nproc: int | None, limit: float, tell: Callable[[str, Finding], None] = lambda *_: None) -> Report:
    """Look at everything; `nproc` and `limit` (seconds of a trial) as in `processes`.

    `tell` is called with (section, finding) as soon as one is made.
    """
    said, failed = processes.answer(processes.command("torch"), limit)
    torch: dict[str, Any] | str = failed or json.loads(processes.last_line(said))
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": lambda: system.versions(torch),
        "devices": lambda: system.devices(torch),
        "host": system.host,
        "environment": lambda: system.environment(os.environ),
        "extras": system.by_extra,
        "processes": lambda: processes.processes(torch, nproc, limit),
    }
    report = Report({title: [] for title in sections})
    for title, look in sections.items():
        for finding in _guarded(title, look):
            report.sections[title].append(finding)
            tell(title, finding)
    return report


def _guarded(title: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield a section's findings; an unexpected failure is one too, so that the rest is still told."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(title, f"could not be examined: {type(error).__name__}: {error}", "problem", "report this line")


def show(nproc: int | None, limit: float) -> Report:
    """Examine as `examine` does and print each finding as one unbroken line, under the title of its section."""
    console = Console(highlight=False, soft_wrap=True)
    titles: list[str] = []

    def tell(section: str, finding: Finding) -> None:
        if section not in titles:
            console.print(Text(f"\n{section}" if titles else section, style="bold"))
            titles.append(section)
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        mark = Text(f"  {finding.level:<8} ", style=STYLES[finding.level])
        console.print(mark + Text(f"{finding.name:<24} {finding.says}{remedy}", style=""))

    report = examine(nproc, limit, tell)
    level, sentence = report.conclusion()
    console.print()
    console.print(Text(sentence, style=STYLES[level]))
    return report
