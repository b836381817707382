"""All that the doctor looks at, in order. What cannot be looked at is a finding too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from trueshard.doctor import child, devices, host, packages, processes, torch_facts
from trueshard.doctor.finding import Finding, Report


def examine(nproc: int | None, limit: float, tell: Callable[[str, Finding], None] = lambda *_: None) -> Report:
    """Look at everything.

    Args:
        nproc: processes that try to reach each other; None: two, and one for each GPU.
        limit: seconds that each trial with processes may take, and importing torch.
        tell: called with (section, finding) as soon as it is made.
    """
    torch = _ask_torch(limit)
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": lambda: packages.versions(torch),
        "devices": lambda: devices.devices(torch),
        "host": host.host,
        "environment": lambda: host.environment(os.environ),
        "extras": packages.by_extra,
        "processes": lambda: processes.processes(torch, nproc, limit),
    }
    report = Report({title: [] for title in sections})
    for title, look in sections.items():
        for finding in _guarded(title, look):
            report.sections[title].append(finding)
            tell(title, finding)
    return report


def _ask_torch(limit: float) -> dict[str, Any] | str:
    """What torch says of itself; or why it says nothing, as one line."""
    said, failed = child.answer(child.command(torch_facts.__name__), limit)
    if failed:
        return failed
    facts: dict[str, Any] = json.loads(child.last_line(said))
    return facts


def _guarded(title: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A section's findings. A machine may be broken in ways that nobody has seen: the rest is still worth telling."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(title, f"could not be examined: {type(error).__name__}: {error}", "problem", "report this line")
