"""`trueshard doctor`: what is on this machine, and whether training works on it; findings as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "problem"]
"""`ok`: good. `note`: good to know. `warning`: slower, or fails in some uses. `problem`: stops training."""


@dataclass(frozen=True)
class Finding:
    name: str
    says: str
    level: Level = "ok"
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""


def judged(name: str, says: str, wrong: bool, remedy: str, level: Level = "warning") -> Finding:
    """Return a finding of `level` with a remedy if something is wrong, else one that is good."""
    return Finding(name, says, level, remedy) if wrong else Finding(name, says)


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
