"""Look at everything, print each finding as it is made, and conclude whether training works."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from trueshard.doctor import processes, system
from trueshard.doctor.system import Finding, Level
from trueshard.launching import python_command

STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Report:
    """All findings, by section in the order in which they were made."""

    sections: dict[str, list[Finding]]

    def count(self, level: Level) -> int:
        return sum(finding.level == level for findings in self.sections.values() for finding in findings)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: `problems`, `warnings`, and the findings of each section."""
        sections = {title: [asdict(finding) for finding in findings] for title, findings in self.sections.items()}
        return {"problems": self.count("problem"), "warnings": self.count("warning"), "sections": sections}

    def conclusion(self) -> tuple[Level, str]:
        """Return (level, sentence): whether training works here."""
        problems, warnings = self.count("problem"), self.count("warning")
        if problems:
            return "problem", f"Training does not work here: {problems} problem{'s' if problems > 1 else ''}."
        if warnings:
            return "warning", f"Training works; {warnings} warning{'s' if warnings > 1 else ''}."
        return "ok", "Training works."


def report(nproc: int | None, limit: float, aloud: bool) -> Report:
    """Look at everything; `aloud`, print each finding as one unbroken line, under the title of its section.

    `nproc` and `limit` (seconds of a trial) as in `processes`.
    """
    said, failed = system.answer(python_command(f"import {processes.__name__} as looked; looked.print_torch()"), limit)
    torch: dict[str, Any] | str = failed or json.loads(system.last_line(said))
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": lambda: system.versions(torch),
        "devices": lambda: system.devices(torch),
        "host": system.host,
        "environment": lambda: system.environment(os.environ),
        "extras": system.by_extra,
        "processes": lambda: processes.processes(torch, nproc, limit),
    }
    console, result = Console(highlight=False, soft_wrap=True, quiet=not aloud), Report({})
    for title, look in looks.items():
        section = result.sections.setdefault(title, [])
        for finding in _findings(title, look):
            if not section:
                console.print(Text(f"\n{title}" if len(result.sections) > 1 else title, style="bold"))
            section.append(finding)
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            mark = Text(f"  {finding.level:<8} ", style=STYLES[finding.level])
            console.print(mark + Text(f"{finding.name:<24} {finding.says}{remedy}", style=""))
    level, sentence = result.conclusion()
    console.print()
    console.print(Text(sentence, style=STYLES[level]))
    return result


def _findings(title: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:  # the rest is still told
        says = f"could not be examined: {type(error).__name__}: {error}"
        yield Finding(title, says, "problem", "report this line")
