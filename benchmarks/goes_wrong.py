"""What users of sharded training report as gone wrong, tried under each system and held against one process.

- Every cell is found by running it: ``benchmarks.goes_wrong_cases`` says what is tried, ``goes_wrong_systems`` how each
  system is asked. Each cell has processes of its own, and a time limit.
- "same" is what is as near to one process as one process is to itself when it adds up in another order, times
  ``MARGIN``: so bfloat16 needs no tolerance of its own.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.goes_wrong_cases import CASES, TRAINED, Case, Result, Run
from benchmarks.goes_wrong_systems import ALONE, SYSTEMS
from benchmarks.processes import Unfinished, on_ranks_within
from benchmarks.table import Table, Tell

MARGIN = 5.0
LEAST = 1e-4
"""Of relative differences: below it, all is the same, whatever another order makes."""
LENGTH = 60
"""Characters of an error that a cell shows; of what is logged, twice as many."""


def run(tell: Tell, quick: bool = False) -> Table:
    """Every case under every system; ``quick``: the first case."""
    rows: list[tuple[str, ...]] = []
    numbers: list[dict[str, Any]] = []
    for which, case in enumerate(CASES[: 1 if quick else None]):
        right, reordered = (_alone(which, case, name) for name in ALONE)
        limits = {key: max(LEAST, MARGIN * far) for key, far in _differences(reordered, right).items()}
        cells: dict[str, Cell] = {name: told(*_tried(which, case, name), right, limits, case.limit) for name in SYSTEMS}
        rows.append((case.label, case.thread, *(cell.words for cell in cells.values())))
        numbers.append({"case": case.label, "limits": limits} | {name: asdict(cell) for name, cell in cells.items()})
        tell(f"{case.label}: " + "; ".join(f"{name} {cell.words}" for name, cell in cells.items()))
    return Table(
        name="goes_wrong",
        title="What goes wrong, by system",
        note=_note(),
        columns=("case", "reported in", *SYSTEMS),
        rows=tuple(rows),
        numbers=numbers,
        words=True,
    )


@dataclass(frozen=True)
class Found:
    """What one rank came to."""

    result: Result | None = None
    phase: str = ""
    """What it was at when an error was raised."""
    error: str = ""
    at: float = 0.0
    """When, seconds."""


@dataclass(frozen=True)
class Cell:
    """What a case came to under a system."""

    words: str
    differences: Mapping[str, float] = field(default_factory=dict)
    """Relative, by what differs."""
    error: str = ""
    """In full."""


def attempt(which: int, phase: int, name: str, folder: Path) -> Found:
    """One phase of a case on this rank, under the system of that name."""
    from transformers.utils import logging as chatter

    warnings.simplefilter("ignore")
    chatter.disable_progress_bar()
    chatter.set_verbosity_error()
    handler = logging.FileHandler(_log(folder, dist.get_rank()), delay=True)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    run = Run({**SYSTEMS, **ALONE}[name], folder)
    try:
        return Found(CASES[which].phases[phase][1](run))
    except BaseException as error:  # DCP's errors are no Exception
        return Found(phase=run.phase, error=_words(error), at=time.time())


def _log(folder: Path, rank: int) -> Path:
    return folder / f"log-{rank}"


def _words(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # DCP's: by rank, each with its traceback
    if failures:
        error = next(iter(failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())


def _tried(which: int, case: Case, name: str) -> tuple[list[Found | Unfinished], str]:
    """What each rank of the last phase that ran came to, and the last line that a rank logged in it."""
    ranks: list[Found | Unfinished] = []
    with tempfile.TemporaryDirectory() as folder:
        for phase, (processes, _) in enumerate(case.phases):
            count = 1 if name in ALONE else processes
            patience = timedelta(seconds=case.limit / 2)
            ranks = on_ranks_within(case.limit, patience, attempt, count, which, phase, name, Path(folder))
            if any(not isinstance(rank, Found) or rank.error for rank in ranks):
                break
        logs = [_log(Path(folder), rank) for rank in range(len(ranks))]
        lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    return ranks, lines[-1] if lines else ""


def _alone(which: int, case: Case, name: str) -> Result:
    (result,), _ = _tried(which, case, name)
    if isinstance(result, Unfinished) or result.result is None:
        raise RuntimeError(f"{case.label}: {name} came to {result}")
    return result.result


def told(
    ranks: list[Found | Unfinished], logged: str, right: Result, limits: Mapping[str, float], seconds: float
) -> Cell:
    """What goes into a table.

    Args:
        ranks: what each came to.
        logged: the last line that one of them logged: where ranks wait in vain, it says more than the error.
        right: the result of one process.
        limits: by key of the result, the relative difference that is still the same.
        seconds: the time limit that a rank that hung was killed at.
    """
    also = f"; logs: {_short(logged, 2 * LENGTH)}" if logged else ""
    crashed = [rank.code for rank in ranks if isinstance(rank, Unfinished) and not rank.hung]
    failed = [rank for rank in ranks if isinstance(rank, Found) and rank.error]
    if crashed:  # then other ranks' errors say that they lost it
        code = crashed[0] or 0
        return Cell(f"crash: {signal.Signals(-code).name if code < 0 else f'exit status {code}'}")
    if failed:
        first = min(failed, key=lambda rank: rank.at)
        return Cell(f"error in {first.phase}: {_short(first.error)}{also}", error=f"{first.error}\n{logged}")
    if any(isinstance(rank, Unfinished) for rank in ranks):
        return Cell(f"hangs ({seconds:.0f} s){also}", error=logged)
    results = [rank.result or {} for rank in ranks if isinstance(rank, Found)]
    apart = [_differences(result, right) for result in results]
    worst = {key: max(distances[key] for distances in apart) for key in right}
    return Cell(_differing({key: far for key, far in worst.items() if far > limits[key]}), worst)


def _differences(result: Result, right: Result) -> dict[str, float]:
    """By key: the largest relative difference of a tensor; of plain values 0 if they are equal, else infinity."""
    distances: dict[str, float] = {}
    for key, value in right.items():
        other = result.get(key)
        if isinstance(value, dict) and all(isinstance(item, torch.Tensor) for item in value.values()):
            alike = isinstance(other, dict) and other.keys() == value.keys()
            distances[key] = max(_relative((other or {})[name], value[name]) for name in value) if alike else math.inf
        else:
            distances[key] = 0.0 if other == value else math.inf
    return distances


def _relative(one: torch.Tensor, right: torch.Tensor) -> float:
    """2-norm of the difference over that of what is right; 0 where both are 0, infinity where one is not finite."""
    if one.shape != right.shape:
        return math.inf
    apart, length = (one - right).norm().item(), right.norm().item()
    if math.isnan(apart):
        return math.inf
    return apart / length if length else (math.inf if apart else 0.0)


def _differing(wrong: Mapping[str, float]) -> str:
    """A cell's words, of what differs and by how much."""
    if not wrong:
        return "same"
    if TRAINED in wrong and wrong[TRAINED] < math.inf:
        return f"differs by {_percent(wrong[TRAINED])}"
    return "differs: " + ", ".join(
        key if far == math.inf else f"{key} by {_percent(far)}" for key, far in wrong.items()
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}" if share >= 0.001 else f"{share:.0e}"


def _short(words: str, length: int = LENGTH) -> str:
    words = re.sub(r"\[/[^]]*\] ", "", words.replace("|", "/"))  # without the line of gloo's source
    return words if len(words) <= length else words[: length - 1].rstrip() + "…"


def _note() -> str:
    peers = ", ".join(f"{name} {version(name)}" for name in ("accelerate", "transformers", "lightning-fabric"))
    return (
        "A Llama of two blocks over two gloo processes, held against one process without sharding on the same batches; "
        f"torch {version('torch')}, {peers}. Each case is what users reported, in the thread beside it, of whichever "
        "system. **Same**: every rank is as near to one process as one process is that cuts its batch in two, times "
        f"{MARGIN:.0f}. **Differs**: nothing is raised, and the parameter that is furthest off has changed by so much "
        "more or less than it should (or its gradient, or what was read). **Error**, **crash**: what was raised, by "
        "its first words. **Hangs**: killed after these seconds; the process group's own time limit is half as long."
        "\n\n"
        "By hand: `fully_shard` on each block and the root, then an optimizer; `torch.distributed.checkpoint` saves, "
        "loads, and puts momenta into the new optimizer. Accelerate: `prepare` of model and optimizer, `save_state`, "
        "`load_state`, told that it is on an accelerator. transformers: `from_pretrained` with `DistributedConfig`, "
        "then an optimizer; `save_pretrained(distributed_checkpoint=True)` and `save_optimizer_distributed`. Lightning "
        "Fabric: `ModelParallelStrategy`, then an optimizer; `save` and `load`. Values are read as on one device, "
        "without `full_tensor()`. The new head is assigned after sharding, and an optimizer made for all."
    )
