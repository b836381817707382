"""Look at everything, and print each finding as it is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from trueshard.doctor import Finding, Report, processes, system

SECTIONS = ("versions", "devices", "host", "environment", "extras", "processes")
STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}


def examine(nproc: int | None, limit: float) -> Iterator[tuple[str, Finding]]:
    """Yield (section, finding) as each is made; `nproc` and `limit` (seconds of a trial) as in `processes`."""
    said, failed = processes.answer(processes.command("torch"), limit)
    torch: dict[str, Any] | str = failed or json.loads(processes.last_line(said))
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        lambda: system.versions(torch),
        lambda: system.devices(torch),
        system.host,
        lambda: system.environment(os.environ),
        system.by_extra,
        lambda: processes.processes(torch, nproc, limit),
    )
    for title, look in zip(SECTIONS, looks, strict=True):
        yield from ((title, finding) for finding in _guarded(title, look))


def _guarded(title: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield a section's findings; an unexpected failure is one too, so that the rest is still told."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(title, f"could not be examined: {type(error).__name__}: {error}", "problem", "report this line")


def report(nproc: int | None, limit: float, aloud: bool) -> Report:
    """Examine; `aloud`, print each finding as one unbroken line, under the title of its section."""
    console, found = Console(highlight=False, soft_wrap=True, quiet=not aloud), Report({each: [] for each in SECTIONS})
    for section, finding in examine(nproc, limit):
        if not found.sections[section]:
            console.print(Text(section if section == SECTIONS[0] else f"\n{section}", style="bold"))
        found.sections[section].append(finding)
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        mark = Text(f"  {finding.level:<8} ", style=STYLES[finding.level])
        console.print(mark + Text(f"{finding.name:<24} {finding.says}{remedy}", style=""))
    level, sentence = found.conclusion()
    console.print()
    console.print(Text(sentence, style=STYLES[level]))
    return found
