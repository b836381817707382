"""Look at everything, and print each finding as it is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from trueshard.doctor import Finding, Report, processes, system
from trueshard.launching import python_command

SECTIONS = ("versions", "devices", "host", "environment", "extras", "processes")
STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}


def examine(nproc: int | None, limit: float) -> Iterator[tuple[str, Finding]]:
    """Yield (section, finding) as each is made; `nproc` and `limit` (seconds of a trial) as in `processes`."""
    said, failed = processes.answer(
        python_command(f"import {processes.__name__} as looked; looked.print_torch()"), limit
    )
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
        try:
            for finding in look():
                yield title, finding
        except Exception as error:  # the rest is still told
            says = f"could not be examined: {type(error).__name__}: {error}"
            yield title, Finding(title, says, "problem", "report this line")


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
