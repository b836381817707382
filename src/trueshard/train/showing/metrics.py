"""`metrics.jsonl`: one JSON object a step, numbered 1, 2, 3, … without gaps or repeats, also after a resume.

- The file is the truth about a run's figures: a resume drops the lines of steps that are taken again, by writing the
  others beside and renaming.
- Each line reaches the operating system before the next step begins: a killed process loses none.
- It is JSON as every language reads it: what is not finite is null, and is read back as NaN.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trueshard.errors import UserError
from trueshard.replacing import replace_text
from trueshard.train.events import Callback

if TYPE_CHECKING:
    from trueshard.train.trainer import Trainer

NAME = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of the file, in its order; none where there is no file. A last line that a crash cut off is left out.

    Raises:
        UserError: another line is damaged.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise UserError(
                f"{path}, line {number}: is no JSON object with a step; delete that line, or move the file away"
            ) from None
        records.append({key: math.nan if value is None else value for key, value in record.items()})
    return records


def line_of(record: dict[str, Any]) -> str:
    """A record as a line of the file."""
    plain = {key: _plain(value) for key, value in record.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsWriter(Callback):
    """Writes `metrics.jsonl` in a folder, on rank 0. To be given after the callbacks that add to the record."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: TextIO | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.rank != 0:
            return
        kept = [record for record in read_metrics(self.path) if record["step"] <= trainer.step]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.path, "".join(map(line_of, kept)))
        self._file = self.path.open("a", encoding="utf-8")

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(line_of(record))
            self._file.flush()

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
