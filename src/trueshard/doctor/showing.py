"""Findings as lines for a terminal, or to be pasted into a report: a line each, never broken."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from trueshard.doctor.finding import Finding, Report

STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}
NAMES = 24
"""Characters of the column of names."""


class Lines:
    """Prints findings as they are made, under the title of their section."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._section = ""

    def tell(self, section: str, finding: Finding) -> None:
        """Print one finding."""
        if section != self._section:
            self._console.print(Text(f"\n{section}" if self._section else section, style="bold"))
            self._section = section
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        mark = Text(f"  {finding.level:<8} ", style=STYLES[finding.level])
        self._console.print(mark + Text(f"{finding.name:<{NAMES}} {finding.says}{remedy}", style=""))

    def close(self, report: Report) -> None:
        """Print what all of it comes to."""
        problems, warnings = report.problems, report.count("warning")
        self._console.print()
        if problems:
            self._console.print(
                Text(f"Training does not work here: {_count(problems, 'problem')}.", style=STYLES["problem"])
            )
        elif warnings:
            self._console.print(Text(f"Training works; {_count(warnings, 'warning')}.", style=STYLES["warning"]))
        else:
            self._console.print(Text("Training works.", style=STYLES["ok"]))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
