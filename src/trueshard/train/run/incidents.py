"""Incidents: a lost process, and what it cost from then to the end of the first step after it, by part."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trueshard.train.callbacks import Callback
from trueshard.train.trainer import Trainer

VARIABLE = "TRUESHARD_INCIDENT"
"""Environment variable by which our launcher tells the next workers why they are started."""
LOST = "lost"
"""Name of the empty file in a run's folder that says when a rank noticed, by its time; torchrun tells nothing."""


class Incident:
    """An incident, as a worker that is started because of it sees it."""

    def __init__(self, what: str, since: float, parts: Mapping[str, float]) -> None:
        self.what = what
        """Words: who was lost, and how."""
        self.parts = dict(parts)
        """Word for what took time → seconds, in order."""
        self._since = since
        self._last = since + sum(self.parts.values())

    @classmethod
    def told(cls, environment: Mapping[str, str], folder: Path) -> Incident | None:
        """Return the incident because of which this process was started; None if it was the first start."""
        if VARIABLE in environment:
            return cls(**json.loads(environment[VARIABLE]))
        if not int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")):
            return None
        return cls("a process was lost", _noticed(int(environment["RANK"]), folder), {})

    @classmethod
    def of_another_host(cls, rank: int, folder: Path) -> Incident:
        """Return the incident for a rank on a host that came in the place of a lost one, once the others said so."""
        since = _noticed(rank, folder)
        return cls("a host was replaced", since, {"the host in its place": round(time.time() - since, 3)})

    def variables(self) -> dict[str, str]:
        """Return the environment variables that tell the next workers."""
        return {VARIABLE: json.dumps({"what": self.what, "since": self._since, "parts": self.parts})}

    def mark(self, part: str) -> None:
        """Count the time since the mark before as that of ``part``."""
        now = time.time()  # not of one process alone, as a monotonic clock may be
        self.parts[part] = round(now - self._last, 3)
        self._last = now

    @property
    def seconds(self) -> float:
        """Seconds from the loss to the last mark."""
        return round(self._last - self._since, 3)


def _noticed(rank: int, folder: Path) -> float:
    """Return when a rank noticed a loss; now if nobody can have, since all ranks of this host were killed."""
    if rank == 0:
        with contextlib.suppress(OSError):
            since = (folder / LOST).stat().st_mtime
            (folder / LOST).unlink()
            return since
    return time.time()


class IncidentReport(Callback):
    """Says what an incident cost, once the first step after it is done, and puts it into the record of that step."""

    def __init__(self, incident: Incident) -> None:
        self._incident: Incident | None = incident
        self._origin = ""

    def on_start(self, trainer: Trainer) -> None:
        self._origin = f"step {trainer.step} {'in memory' if trainer.from_memory else 'on disk'}"

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        incident, self._incident = self._incident, None
        if incident is None:
            return
        incident.mark("first step")
        record["incident"], record["incident_seconds"] = incident.what, incident.seconds
        record["incident_parts"] = incident.parts
        if trainer.rank == 0:
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in incident.parts.items())
            print(f"Went on from {self._origin} in {incident.seconds:.1f} s ({parts}): {incident.what}", flush=True)
