"""Starts a run, kills one of its processes, and clocks it until it has taken a step that is new.

- Every way is a command line, as its user writes it, in processes of its own. The clock is that of this process, which
  looks every few milliseconds at the file to which a run adds a line at the end of each step.
- The process is killed half a step after a step has ended. What the run had taken until then is what it may lose.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trueshard.launching import SPARE

ROOT = Path(__file__).parents[1]
LIMIT = 100.0
"""Seconds within which a step must end, imports included."""
LOOK = 0.005
"""Seconds between two looks at a file."""
UNCOUNTED = 3
"""Steps at the start of a run, whose time does not count."""
RANKS = 2


class Stuck(Exception):
    """A run ended by itself, or took no step in time."""


@dataclass(frozen=True)
class Line:
    """The end of a step."""

    step: int
    processes: int = RANKS
    incident: float = 0.0
    """Seconds from when the loss was noticed, where the run says it."""
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A way to run."""

    processes: tuple[tuple[str, ...], ...]
    """Command lines; ``{folder}`` stands for the folder of the sample."""
    victim: str = "RANK=1"
    """The variable of the process that is killed."""
    variables: tuple[dict[str, str], ...] = ({},)
    """Of each command line."""
    lighthouse: tuple[str, ...] = ()
    """What is started before, and leaves its address in the folder."""
    spares: int = 0
    """Processes that wait."""
    lines: Callable[[Path], list[Line]] = lambda folder: _own_lines(folder)


@dataclass
class Sample:
    """What a loss cost."""

    seconds: float = 0.0
    """From the kill to the end of the first step that is new."""
    together: float = 0.0
    """From the kill to the end of the first step that all processes take."""
    twice: int = 0
    """Steps."""
    step: float = 0.0
    """Median seconds of a step before the kill."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of ``seconds``, where the run says them."""
    failed: str = ""


def recorded(folder: Path) -> list[Line]:
    """Return the steps of a run of ours, by its own records."""
    return [
        Line(record["step"], RANKS, record.get("incident_seconds", 0.0), record.get("incident_parts", {}))
        for record in map(json.loads, _whole_lines(folder / "run" / "metrics.jsonl"))
    ]


def _own_lines(folder: Path) -> list[Line]:
    return [Line(*map(int, line.split())) for line in _whole_lines(folder / "steps")]


def _whole_lines(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def sample(command: Command, steps: int, *, lose: bool) -> Sample:
    """Run until ``steps`` steps have been taken together, then lose a process, or none; see how long it takes."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory(dir=_memory()) as memory:
        folder = Path(place)
        with _running(command, folder, memory) as run:
            try:
                return _clocked(run, steps, lose)
            except Stuck as error:
                return Sample(failed=f"{error}: {run.last_words()}")


def _memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


class _Run:
    def __init__(self, command: Command, folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
        self.command, self.folder, self.started = command, folder, started

    def lines(self) -> list[Line]:
        return self.command.lines(self.folder)

    def newest(self) -> int:
        return max((line.step for line in self.lines()), default=0)

    def wait(self, reached: Callable[[], bool], what: str) -> float:
        """Wait until something is so; return when."""
        deadline = time.perf_counter() + LIMIT
        while not reached():
            if time.perf_counter() > deadline:
                raise Stuck(f"{what} has not come within {LIMIT:g} s")
            if all(process.poll() is not None for process in self.started[-len(self.command.processes) :]):
                raise Stuck(f"it ended before {what}")
            time.sleep(LOOK)
        return time.perf_counter()

    def workers(self, variable: str, *, waiting: bool = False) -> list[psutil.Process]:
        """Return the processes that have a variable: those that train, or those that wait."""
        name, _, value = variable.partition("=")
        processes = []
        for started in self.started:
            for process in psutil.Process(started.pid).children(recursive=True):
                try:
                    variables = process.environ()
                except psutil.Error:
                    continue
                if variables.get(name) == value and (SPARE in variables) == waiting:
                    processes.append(process)
        return sorted(processes, key=lambda process: process.create_time())

    def last_words(self) -> str:
        """Return the last line of what the run said."""
        said = (self.folder / "said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return said[-1][:100] if said else ""

    def resumed(self) -> int | None:
        """Return the step from which a start of the run went on; None: no start did."""
        said = (self.folder / "said").read_text(encoding="utf-8", errors="replace")
        steps = re.findall(r"Resumed after step (\d+)", said)
        return int(steps[-1]) if steps else None


@contextmanager
def _running(command: Command, folder: Path, memory: str) -> Iterator[_Run]:
    """Start a run; at the end kill all of it."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TRUESHARD_MEMORY": memory}
    started: list[subprocess.Popen[bytes]] = []
    run = _Run(command, folder, started)

    def start(words: tuple[str, ...], more: dict[str, str]) -> None:
        words = tuple(word.replace("{folder}", str(folder)) for word in words)
        with open(folder / "said", "ab") as said:
            env = {**common, **more}
            started.append(subprocess.Popen([sys.executable, *words], cwd=folder, env=env, stdout=said, stderr=said))

    try:
        more = {}
        if command.lighthouse:
            start(command.lighthouse, {})
            deadline = time.perf_counter() + LIMIT
            while not (folder / "address").exists() and time.perf_counter() < deadline and started[0].poll() is None:
                time.sleep(LOOK)
            if (folder / "address").exists():
                more = {"TORCHFT_LIGHTHOUSE": (folder / "address").read_text()}
        for words, variables in zip(command.processes, command.variables, strict=True):
            start(words, {**variables, **more})
        yield run
    finally:
        for process in started:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            for process in below:
                if process.is_running():
                    process.kill()
            process.wait()
            psutil.wait_procs(below, timeout=10)


def _clocked(run: _Run, steps: int, lose: bool) -> Sample:
    ends: list[float] = []
    begun = 0
    while len(ends) < steps:
        before = run.newest()
        at = run.wait(lambda before=before: run.newest() > before, f"step {before + 1}")  # type: ignore[misc]
        if run.lines()[-1].processes == RANKS:
            begun += 1
            ends.append(at)
    passed = [later - earlier for earlier, later in zip(ends[UNCOUNTED:], ends[UNCOUNTED + 1 :], strict=False)]
    sample = Sample(step=sorted(passed)[len(passed) // 2])
    if lose:
        _lose(run, sample)
    return sample


def _lose(run: _Run, sample: Sample) -> None:
    if run.command.spares:
        _wait_for_spares(run)
        before = run.newest()
        run.wait(lambda: run.newest() > before, "a step beside the spares")
    time.sleep(sample.step / 2)
    victims = run.workers(run.command.victim)
    if not victims:
        raise Stuck(f"no process has {run.command.victim} after step {run.newest()}")
    victim = victims[0]
    victim.send_signal(signal.SIGKILL)
    killed = time.perf_counter()
    lines = run.lines()
    newest, count = lines[-1].step, len(lines)
    sample.seconds = run.wait(lambda: run.newest() > newest, f"step {newest + 1}") - killed
    new = next(line for line in run.lines() if line.step > newest)
    if new.processes == RANKS:
        sample.together = sample.seconds
    else:
        whole = run.wait(lambda: any(line.processes == RANKS for line in run.lines()[count:]), "a step of all")
        sample.together = whole - killed
    resumed = run.resumed()
    if resumed is not None:
        sample.twice = newest - resumed
    elif not run.command.lighthouse:
        sample.twice = newest
    if new.parts:
        sample.parts = {"notice": max(0.0, sample.seconds - new.incident), **new.parts}


def _wait_for_spares(run: _Run) -> None:
    """Wait until spares have done what they can do."""

    def spares() -> list[psutil.Process]:
        return [process for rank in range(RANKS) for process in run.workers(f"RANK={rank}", waiting=True)]

    run.wait(lambda: len(spares()) == run.command.spares, "the spares")

    def worked() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in spares())

    before, now = -1.0, worked()
    while now - before > 0.1:
        before = now
        time.sleep(2)
        now = worked()
