"""One call's processes, each with a time limit, and the figures of all calls so far."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "TRUESHARD_GPU_STEP"
"""Environment variable by which a step's processes are known, in whatever session or group they put themselves."""
EMULATED = "EMULATED_CUDA" in os.environ
"""True on the emulated device of the tests (docs/emulated-cuda.md): seconds mean nothing, and nothing is compiled."""
LEAST = 15.0
"""Seconds that must be left for a step to begin."""


@dataclass
class Outcome:
    """What a step gave."""

    name: str
    seconds: float = 0.0
    failed: str = ""
    """Last line of its error, or that it took too long; "" if it ended well."""
    data: Any = None
    """Its figures, of a failed step those that it had until then."""


@dataclass
class Session:
    """All steps of one call, which share a budget of seconds."""

    out: Path
    environment: dict[str, str]
    device: str
    small: bool
    budget: float
    write: Callable[[Session], None]
    wheels: Path | None = None
    began: float = field(default_factory=time.monotonic)
    machine: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Step → outcome, of earlier calls too."""

    @property
    def left(self) -> float:
        return self.budget - (time.monotonic() - self.began)

    @property
    def file(self) -> Path:
        return self.out / "gpu.json"

    def keep(self) -> None:
        """Write figures and page, each whole or not at all."""
        figures = {"machine": self.machine, "small": self.small, "steps": [asdict(o) for o in self.outcomes.values()]}
        replace(self.file, json.dumps(figures, indent=1))
        self.write(self)

    def resume(self) -> None:
        """Take up the figures of an earlier call with the same machine and sizes."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            figures = json.loads(self.file.read_text())
            if figures["machine"] == self.machine and figures["small"] == self.small:
                self.outcomes = {step["name"]: Outcome(**step) for step in figures["steps"]} | self.outcomes

    def run(self, name: str, command: Sequence[str | Path], limit: float, **more: str) -> tuple[Outcome, Path]:
        """Run a command from the root of the checkout, at most ``limit`` seconds or what is left of all.

        Returns the outcome, whose ``data`` is what the command left as JSON in the file that ``$RESULT`` names, and the
        file of what it printed. Nothing of it runs any more then.
        """
        outcome = Outcome(name)
        stem = "".join(c if c.isalnum() else "-" for c in name)
        log, result = self.out / f"{stem}.txt", self.out / f"{stem}.json"
        result.unlink(missing_ok=True)
        seconds = max(1.0, min(limit, self.left))
        mark = uuid.uuid4().hex
        environment = self.environment | more | {MARK: mark, "RESULT": str(result)}
        print(f"{name} …", flush=True)
        began = time.monotonic()
        with log.open("w") as printed:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(seconds)
                outcome.failed = last_line(log, f"exit code {code}") if code else ""
            except subprocess.TimeoutExpired:
                outcome.failed = f"not done after {seconds:.0f} s"
            finally:
                _kill(mark, process)
        with contextlib.suppress(FileNotFoundError, ValueError):
            outcome.data = json.loads(result.read_text())
        outcome.seconds = time.monotonic() - began
        print(f"  {outcome.seconds:.0f} s{': ' + outcome.failed if outcome.failed else ''}", flush=True)
        return outcome, log

    def measure(self, name: str, module: str, limit: float, *words: str, **more: str) -> Outcome:
        """Run a measure of ``benchmarks.gpu`` in a process of its own."""
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *words, "--device", self.device]
        return self.run(name, [*command, *(["--small"] if self.small else [])], limit, **more)[0]


def leave(figures: Mapping[str, Any]) -> None:
    """Leave a step's figures for the session; called again, those that there are by then."""
    replace(Path(os.environ["RESULT"]), json.dumps(figures))


def replace(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def last_line(log: Path, otherwise: str = "") -> str:
    """Return the last line of a log that is not blank, cut; ``otherwise`` if there is none."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else otherwise


def _kill(mark: str, process: subprocess.Popen[Any]) -> None:
    """Kill all that the step started: ranks that outlive their launcher would stay on the GPU and falsify the rest."""
    for _ in range(5):  # one that is being forked is seen the next time
        marked = [pid for pid in _processes() if f"{MARK}={mark}".encode() in _environment_of(pid)]
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not marked:
            break
        time.sleep(0.2)
    process.kill()
    process.wait()


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
