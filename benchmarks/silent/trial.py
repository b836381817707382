"""The benchmark: each program with its bug and without, held against one process.

- A run is recorded by ``trueshard.verification.record``, in processes of its own. ``verify_runs`` compares it with one
  process without the bug; a third recording, a rounding error away, tells what may be apart.
- A bug is found if the runs differ; localised if what is named first is what is at fault.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.processes import Unfinished, on_ranks_within
from benchmarks.silent.frame import STEPS, Program, start
from benchmarks.table import Table, Tell

FAMILIES = ("data_parallel", "megatron", "pipeline", "context", "between_runs")
LIMIT, PATIENCE = 300.0, timedelta(seconds=60)
ENDS, RAISES = "does not end", "raises an error"
QUICK = ("final_norm", "stale", "dropout")
"""Programs of a quick run."""


@dataclass(frozen=True)
class Found:
    """What verification says of a run, held against its reference."""

    differs: bool
    module: str = ""
    """Module or parameter that is named first."""
    where: str = ""
    words: str = ""


def programs() -> Iterator[tuple[str, Program]]:
    """Yield the programs, each with the name of its family."""
    for family in FAMILIES:
        for program in import_module(f"benchmarks.silent.{family}").PROGRAMS.values():
            yield family, program


def run(tell: Tell, quick: bool = False) -> Table:
    """Try every program with its bug and without; ``quick``: three programs."""
    rows, numbers = list[tuple[str, ...]](), list[dict[str, Any]]()
    for family, program in programs():
        if quick and program.name not in QUICK:
            continue
        with tempfile.TemporaryDirectory() as folder:
            compare = Compared(functools.partial(recorded, family, program.name), Path(folder))
            with_bug, without = compare.of(program.ranks, bug=True), compare.of(program.ranks)
        cells = cells_of(program, with_bug)
        rows.append((program.title, program.source, *cells, "yes" if without.differs else "no"))
        numbers.append({"program": program.name, "bug": asdict(with_bug), "without": asdict(without)})
        tell(f"{program.name}: {', '.join(rows[-1][2:])}")
    return Table(
        name="silent",
        title="Bugs that raise nothing",
        note=note(rows),
        columns=("bug", "reported in", "found", "localised", "what is said", "false alarm without it"),
        rows=tuple(rows),
        numbers=numbers,
        words=True,
    )


class _FailedError(Exception):
    """A run with other roundings ended otherwise."""


class Compared:
    """Runs held against the same reference, which is recorded once.

    Args:
        record: the run of a rank.
        folder: of the recordings.
        options: of the reference.
    """

    def __init__(self, record: Callable[..., None], folder: Path, **options: Any) -> None:
        self._record, self._folder = record, folder
        self._options = options
        self._error = self._run("reference", 1, **options)

    def of(self, ranks: int, **options: Any) -> Found:
        """Return what is said of a run on ``ranks`` processes."""
        from trueshard.verification.programs import verified

        name = f"run-{'-'.join([str(ranks), *map(str, options.values())])}"
        error = self._error or self._run(name, ranks, **options)
        if error:
            return Found(True, words=error)
        try:
            report = verified(self._folder / "reference", self._folder / name, self._shaken)
        except _FailedError as failure:
            return Found(True, words=str(failure))
        first = report.first
        if first is None:
            return Found(not report.held, words="" if report.held else str(report))
        return Found(True, first.module, first.where, str(first).removeprefix("First: "))

    def _shaken(self, seed: str) -> Path:
        folder = self._folder / f"shaken-{seed}"
        if not folder.exists() and (error := self._run(folder.name, 1, seed, **self._options)):
            raise _FailedError(error)
        return folder

    def _run(self, name: str, ranks: int, seed: str = "", **options: Any) -> str:
        """Record a run; return what went wrong, or nothing."""
        ends = on_ranks_within(LIMIT, PATIENCE, _as_recorded, ranks, self._record, self._folder / name, seed, options)
        wrong = [end for end in ends if isinstance(end, Unfinished)]
        return (ENDS if any(end.hung for end in wrong) else RAISES) if wrong else ""


def _as_recorded(record: Callable[..., None], folder: Path, seed: str, options: dict[str, Any]) -> None:
    """Run with the environment variables that ``trueshard verify`` sets."""
    os.environ |= {"TRUESHARD_RECORD": str(folder), "TRUESHARD_RECORD_STEPS": str(STEPS - 1)}
    os.environ["TRUESHARD_RECORD_SHAKEN"] = seed
    record(**options)


def recorded(family: str, name: str, bug: bool = False) -> None:
    start(import_module(f"benchmarks.silent.{family}").PROGRAMS[name], bug)


def cells_of(program: Program, trial: Found) -> tuple[str, str, str]:
    """Return whether a bug was found and localised, and what was said."""
    if program.kind == "end":
        return "not silent", "", f"the run {trial.words}" if trial.words in (ENDS, RAISES) else trial.words
    if not trial.differs:
        return "no", "no", ""
    if not trial.where:
        return "no", "no", trial.words  # it ended otherwise, which is not silent
    named = re.findall(r"(?<=')[\w.]+(?=')|(?<=put of )[\w.]+|(?<=gradient of )[\w.]+", trial.words)
    at = not program.where or any(re.search(program.where, name) for name in (trial.module, *named) if name)
    is_right = at and program.kind == trial.where.replace("clipped gradients", "gradient")
    return "yes", "yes" if is_right else "no", trial.words.partition(" (allowed")[0].partition(";")[0]


def note(rows: list[tuple[str, ...]]) -> str:
    """Return what the table says, in sentences."""
    detected, localised, alarms = (sum(row[i] == "yes" for row in rows) for i in (2, 3, 5))
    silent = sum(row[2] != "not silent" for row in rows)
    return (
        "Each bug is written anew as a small program, that runs with the bug and without, on 2 processes (4 for a "
        "pipeline) against one, or on one against another version or setting of itself. It is found if `verify_runs` "
        "says that they differ, and localised if the module or parameter named first, and where it shows, is what is "
        f"at fault. Of {silent} bugs that show in numbers {detected} are found and {localised} localised; without "
        f"them, {alarms} false alarms. {len(rows) - silent} of TrainCheck's list is reported as a run that does not "
        "end: here gloo gives up waiting, and no number is wrong before."
    )
