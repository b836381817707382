"""Start processes on this machine: N copies of a command, with a report of how each ended.

- The processes are those of torch elastic's ``SubprocessContext``. Each is a session of its own, so that a Ctrl-C in a
  terminal reaches the launcher alone. When one fails, the others get SIGTERM and, 30 seconds later, SIGKILL. A process
  that was stopped (SIGSTOP) is continued with every signal, on which it could not act otherwise.
- The first SIGINT, SIGTERM, SIGHUP or SIGQUIT that the launcher receives is passed on, and the processes have ``grace``
  seconds to end; a second one kills them. The caller learns of the signal from ``Ended``, not from an exception.
- When the time limit has passed, each process prints the stacks of its threads and is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from types import FrameType
from typing import Any

from trueshard.files import replace_text

FAILED = 1
"""Exit code of a run after any failure without a code of its own."""
USER_ERROR = 2
"""Exit code after a ``UserError``."""
STOPPED = 130
"""Exit code of a run that a signal stopped, whichever signal it was."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a launcher to end."""

LAST_WORDS = 5.0
"""Seconds that ranks have to end after another has failed."""
_POLL = 0.05
"""Seconds between two looks at the processes."""
SPARE = "TRUESHARD_SPARE"
"""Environment variable of a process of ``Spares``: the file that tells it to run."""
_LOOK = 0.02
"""Seconds between its looks for that, and between those at ranks that are about to end."""
_TAIL = 100
"""Lines that ``last_lines`` returns at most: a stack of a deep model, whose most recent call comes first."""
_HANDLED_BY_ELASTIC = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Variable with the signals on which elastic raises: none while ranks run; they get all back, to launch others."""
_PRELUDE = """
import sys
sys.path[:] = {path!r}
import faulthandler, os, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)
signal.signal(signal.SIGINT, lambda *_: os._exit({stopped}))
{statement}
"""


@dataclass(frozen=True)
class Ended:
    """The end of all processes."""

    codes: Mapping[int, int]
    """Exit code by rank, below 0 for a signal, of every process that failed by itself: without those that were ended
    because another one had failed. Empty if all succeeded, were stopped by a signal, or ran into the limit."""
    signal: int | None = None
    """The signal by which this process was asked to end."""
    is_late: bool = False
    """True if the time limit passed."""
    noticed: float = 0.0
    """Time at which the first failure was noticed, in seconds of ``time.time``; 0: none was."""

    def raise_for_signal(self) -> None:
        """Raise what Python raises for the signal that was received: ``KeyboardInterrupt``, or ``SystemExit``."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)


def how(code: int) -> str:
    """Return an exit code in words: "was ended by SIGKILL", or "ended with exit code 7"."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def python_command(statement: str, *arguments: str) -> list[str]:
    """Return a command line that runs ``statement`` in a new Python with this one's import path.

    The process prints its stacks on SIGUSR1, and exits with ``STOPPED`` on a Ctrl-C until it installs its own handler.
    """
    code = _PRELUDE.format(path=sys.path, stopped=STOPPED, statement=statement)
    return [sys.executable, "-c", code, *arguments]


def run_ranks(
    command: Sequence[str],
    ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    logs: Path | None = None,
    limit: float | None = None,
    grace: float = 0.0,
    spares: Spares | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``command`` once a rank, with ``RANK``, ``WORLD_SIZE`` and their local forms set, until all have ended.

    ``environment``: variables set on top of this process's own. ``logs``: folder for each rank's stdout and stderr, see
    ``last_lines``; None: the processes share this terminal. ``limit``: seconds after which processes that still run
    print their stacks and are killed. ``grace``: seconds that they have to end after a signal was passed on. ``spares``
    of the same command take the place of new processes. ``meanwhile`` is called again and again while they run.
    """
    with _quiet_elastic(), _collected_signals() as received:
        context = _context(command, ranks, environment or {}, logs) if spares is None else spares.context
        try:
            if spares is None:
                context.start()
            else:
                spares.begin(environment or {})
            return _wait(context, received, limit, grace, meanwhile)
        finally:
            context.close(signal.SIGKILL)


def _context(command: Sequence[str], ranks: int, environment: Mapping[str, str], logs: Path | None) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    # Without logs, no folder that could be left over.
    specs = DefaultLogsSpecs(log_dir=str(logs or os.devnull), redirects=Std.NONE if logs is None else Std.ALL)
    return SubprocessContext(
        name="trueshard",
        entrypoint=command[0],
        args={rank: tuple(command[1:]) for rank in range(ranks)},
        envs={rank: {**environment, **_variables(rank, ranks)} for rank in range(ranks)},
        logs_specs=specs,
    )


class Spares:
    """Copies of a command, one a rank, that were started before they are needed.

    They come as far as ``wait_to_begin``, with all imported by then, and go on when ``run_ranks`` takes them.
    """

    def __init__(self, command: Sequence[str], ranks: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="trueshard-spares-")
        self._word = Path(self._folder, "word")
        self.context = _context(command, ranks, {SPARE: str(self._word)}, None)
        with _quiet_elastic():
            self.context.start()

    def begin(self, environment: Mapping[str, str]) -> None:
        """Let them run, with variables on top of those that they have."""
        replace_text(self._word, json.dumps(dict(environment)))

    def close(self) -> None:
        """End those that wait, and remove what they had."""
        with _quiet_elastic():
            self.context.close(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


def wait_to_begin() -> None:
    """Wait, in a process of ``Spares``, until it is to run; take over its variables. Ends with its parent."""
    word, parent = Path(os.environ.pop(SPARE)), os.getppid()
    while not word.exists():
        if os.getppid() != parent:
            os._exit(FAILED)
        time.sleep(_LOOK)
    os.environ.update(json.loads(word.read_text(encoding="utf-8")))


class Served:
    """A new Python that answers over ``connection``: it runs ``serve(descriptor)`` of ``module``."""

    def __init__(self, module: str, **options: Any) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            # Not by multiprocessing, whose spawn imports __main__: a script without a guard would run twice.
            command = python_command(f"from {module} import serve; serve(int(sys.argv[1]))", str(theirs.fileno()))
            # A session of its own: a Ctrl-C in a terminal reaches the caller alone, and what it starts ends with it.
            options |= {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()], "start_new_session": True}
            self.process = subprocess.Popen(command, **options)

    def kill(self) -> None:
        """Kill the process, with those that it started; a thread that waits for it sees it end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, grace: float = 0.0) -> int:
        """Return the exit code; after ``grace`` seconds it is killed, and what it started is in any case."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self.kill()
        return self.process.wait()


def out_of_memory_hint(code: int) -> str:
    """Return what may have happened to a process that ended with a code; "" if nothing is known."""
    return "; the machine may have run out of memory" if code == -signal.SIGKILL else ""


def end_with_parent(clean: Callable[[], None] = lambda: None) -> None:
    """End this process, whatever it does, when its parent has gone, since nobody else would; ``clean`` before."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        clean()
        os._exit(FAILED)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


def last_lines(logs: Path, rank: int) -> str:
    """Return the last lines that a rank of ``run_ranks(logs=...)`` wrote to stderr; "" if it wrote none."""
    files = sorted(logs.glob(f"**/{rank}/stderr.log"))
    lines = files[-1].read_text(encoding="utf-8", errors="replace").splitlines() if files else []
    return "\n".join(lines[-_TAIL:])


def _variables(rank: int, ranks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        _HANDLED_BY_ELASTIC: ",".join(number.name for number in SIGNALS),
    }


def _wait(context: Any, received: list[int], limit: float | None, grace: float, meanwhile: Callable[[], None]) -> Ended:
    deadline = float("inf") if limit is None else time.monotonic() + limit
    noticed = 0.0
    while not received:
        first = {rank for rank, handler in context.subprocess_handlers.items() if handler.proc.poll()}
        if first:
            noticed = noticed or time.time()
            _end_others(context)
        result = context.wait(timeout=0)
        if result is not None:
            # Elastic sends SIGTERM to those that are left when one fails, and then SIGKILL.
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            ends = -signal.SIGTERM, -signal.SIGKILL
            failed = {rank: code for rank, code in codes.items() if rank in first or code not in ends}
            return Ended(failed or codes, received[0] if received else None, noticed=noticed)
        if time.monotonic() > deadline:
            _signal(context, signal.SIGUSR1)
            time.sleep(1)  # in which they print their stacks
            return Ended({}, is_late=True)
        meanwhile()
        time.sleep(_POLL)
    _signal(context, received[0])
    deadline = time.monotonic() + grace
    while _running(context) and len(received) == 1 and time.monotonic() < deadline:
        time.sleep(_POLL)
    return Ended({}, received[0])


def _end_others(context: Any) -> None:
    """Give ranks that are left after a failure a few seconds. Elastic would give them 30.

    One that waits in NCCL for who has failed runs no Python, so it takes no signal but SIGKILL.
    """
    _signal(context, signal.SIGTERM)
    deadline = time.monotonic() + LAST_WORDS
    while _running(context) and time.monotonic() < deadline:
        time.sleep(_LOOK)
    _signal(context, signal.SIGKILL)


def _running(context: Any) -> list[int]:
    return [handler.proc.pid for handler in context.subprocess_handlers.values() if handler.proc.poll() is None]


def _signal(context: Any, number: int) -> None:
    for pid in _running(context):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
            os.killpg(pid, signal.SIGCONT)


@contextlib.contextmanager
def _collected_signals() -> Iterator[list[int]]:
    """Collect ``SIGNALS`` in a list instead of acting on them. In a thread, which gets none, do nothing."""
    received: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, collect) for number in SIGNALS} if is_main else {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence elastic's account of signals and failures, which callers report, and keep it from handling signals.

    Its handlers raise wherever the process is: also between two starts.
    """
    elastic, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    propagated, handled = elastic.propagate, os.environ.get(_HANDLED_BY_ELASTIC)
    elastic.propagate, os.environ[_HANDLED_BY_ELASTIC] = False, ""
    elastic.addHandler(silent)
    try:
        yield
    finally:
        elastic.removeHandler(silent)
        elastic.propagate = propagated
        os.environ.pop(_HANDLED_BY_ELASTIC)
        if handled is not None:
            os.environ[_HANDLED_BY_ELASTIC] = handled
