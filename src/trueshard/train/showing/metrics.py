"""`metrics.jsonl`: one JSON object a step, numbered 1, 2, 3, … without gaps or repeats, also after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of the file, or none where there is no file. A line cut off by a crash ends it."""
    records: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return records


class MetricsFile:
    """The file, open for the steps after `step`: lines beyond that step are dropped, they are taken again."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        scratch = path.with_suffix(".jsonl.new")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        scratch.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one step, at once visible to other programs."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
