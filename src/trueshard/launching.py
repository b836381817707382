"""Start processes on this machine: N copies of a command, with a report of how each ended.

- Each process is a session of its own, so that a Ctrl-C in a terminal reaches the launcher alone. When one fails, the
  others get SIGTERM and, seconds later, SIGKILL. A process that was stopped (SIGSTOP) is continued with every signal:
  it could not act on it otherwise.
- The first SIGINT, SIGTERM, SIGHUP or SIGQUIT that the launcher receives is passed on, and the processes have ``grace``
  seconds to end; a second one kills them. The caller learns of the signal from ``Ended``, not from an exception.
- When the time limit has passed, each process prints the stacks of its threads and is killed.

``[Note: Forks of a spare]`` A new process imports for seconds. So one, the ``Spare``, may wait with all imported, and
processes are forks of a child of it that ends at once: so they become children of the launcher, which the system makes
the parent of orphans (``PR_SET_CHILD_SUBREAPER``). A fork cannot use CUDA if its parent has, and one beside threads may
wait for a lock that nobody holds; so where a library did that in the spare, each fork begins as a new program.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

FAILED = 1
"""Exit code of a run after any failure without a code of its own."""
USER_ERROR = 2
"""Exit code after a ``UserError``."""
STOPPED = 130
"""Exit code of a run that a signal stopped, whichever signal it was."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a launcher to end."""

LAST_WORDS = 5.0
"""Seconds that ranks have to end after another has failed, and a killed one that the kernel holds."""
_POLL = 0.02
"""Seconds between two looks at the processes."""
SPARE = "TRUESHARD_SPARE"
"""Environment variable of the process of a ``Spare``: the number of the socket that says when to fork."""
_MONITOR = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable by which torch asks for devices without the use of one."""
_BEGIN = 60.0
"""Seconds in which a spare has imported all and forked."""
_TAIL = 100
"""Lines that ``last_lines`` returns at most: a stack of a deep model, whose most recent call comes first."""
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
    spare: Spare | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``command`` once a rank, with ``RANK``, ``WORLD_SIZE`` and their local forms set, until all have ended.

    ``environment``: variables set on top of this process's own. ``logs``: folder for each rank's stdout and stderr, see
    ``last_lines``; None: the processes share this terminal. ``limit``: seconds after which processes that still run
    print their stacks and are killed. ``grace``: seconds that they have to end after a signal was passed on. ``spare``
    of the same command: ranks are forks of it. ``meanwhile`` is called again and again while they run.
    """
    with _collected_signals() as received:
        variables = [{**(environment or {}), **_variables(rank, ranks)} for rank in range(ranks)]
        processes: list[_Process] = [] if spare is None else spare.forks(variables)
        try:
            if not processes:
                processes += (_started(command, own, logs) for own in variables)
            return _wait(processes, received, limit, grace, meanwhile)
        finally:
            _end(processes, 0)


def _started(command: Sequence[str], variables: Mapping[str, str], logs: Path | None, *passed: int) -> _Process:
    options: Any = {"env": {**os.environ, **variables}, "start_new_session": True, "pass_fds": passed}
    if logs is None:
        return subprocess.Popen(command, **options)
    folder = logs / variables["RANK"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, **options)


class _Fork:
    """Child of this process that a spare has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, below 0 for a signal; None while the process runs."""
        if self._code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._code = os.waitstatus_to_exitcode(ended[1])
        return self._code


_Process: TypeAlias = "subprocess.Popen[bytes] | _Fork"


class Spare:
    """Process of a command that comes as far as ``wait_to_begin``, with all imported by then, and is forked there.

    See ``[Note: Forks of a spare]``. Ranks of every start can be forks of one spare.
    """

    def __init__(self, command: Sequence[str], ranks: int) -> None:
        self._line, theirs = socket.socketpair()
        self._line.settimeout(_BEGIN)
        # Whether there is CUDA is asked of the driver's monitor: else no fork could use it.
        variables = {SPARE: str(theirs.fileno()), _MONITOR: "1", **_variables(0, ranks)}
        with theirs:
            self._process = _started(command, variables, None, theirs.fileno())

    def forks(self, variables: Sequence[Mapping[str, str]]) -> list[_Process]:
        """Return a process for each set of variables, on top of those of this process; none if it cannot be done."""
        if not sys.platform.startswith("linux"):
            return []
        control, subreaper = ctypes.CDLL(None).prctl, 36
        control(subreaper, 1, 0, 0, 0)
        try:
            self._line.sendall(json.dumps([os.getpid(), variables]).encode() + b"\n")
            with self._line.makefile() as answers:
                pids = dict(json.loads(answers.readline()) for _ in variables)
            return [_Fork(pids[rank]) for rank in range(len(variables))]
        except (OSError, ValueError):  # it has ended, or hangs
            self.close()
            return []
        finally:
            control(subreaper, 0, 0, 0, 0)  # what ranks leave behind is not this process's

    def close(self) -> None:
        """End the process."""
        self._line.close()
        _end([self._process], 0)


def wait_to_begin() -> None:
    """Wait, in the process of a ``Spare``, and return in each process that is forked from it, with its variables."""
    torch: Any = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_available()
    os.environ.pop(_MONITOR)
    line = socket.socket(fileno=int(os.environ.pop(SPARE)))
    gc.freeze()  # else a fork's collections write to every page
    requests = line.makefile()
    while request := requests.readline():
        (launcher, variables), threads = json.loads(request), threading.active_count()
        for environment in variables:
            if between := os.fork():
                os.waitpid(between, 0)
                continue
            between = os.getpid()
            if os.fork():
                os._exit(0)
            os.setsid()
            while os.getppid() == between:
                time.sleep(0.001)
            if os.getppid() != launcher:
                os._exit(FAILED)
            line.sendall(json.dumps([int(environment["RANK"]), os.getpid()]).encode() + b"\n")
            line.close()
            os.environ.update(environment)
            with contextlib.suppress(RuntimeError):  # of CUDA, if the spare has used it
                if threads == 1:
                    if has_cuda:
                        torch.cuda.init()
                    return
            os.execv(sys.executable, sys.orig_argv)
    os._exit(0)


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
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()}


def _wait(
    processes: Sequence[_Process],
    received: list[int],
    limit: float | None,
    grace: float,
    meanwhile: Callable[[], None],
) -> Ended:
    deadline = float("inf") if limit is None else time.monotonic() + limit
    while not received:
        if _failed(processes) or not _running(processes):
            noticed = time.time()
            time.sleep(_POLL)  # others may have been lost at the same moment
            first = _failed(processes)
            # Beside one that was killed no other has a cause to tell.
            _end(processes, 0 if {*first.values()} == {-signal.SIGKILL} else LAST_WORDS)
            ends = -signal.SIGTERM, -signal.SIGKILL
            failed = {rank: code for rank, code in _failed(processes).items() if rank in first or code not in ends}
            return Ended(failed, received[0] if received else None, noticed=noticed if first else 0.0)
        if time.monotonic() > deadline:
            _signal(processes, signal.SIGUSR1)
            time.sleep(1)  # in which they print their stacks
            return Ended({}, is_late=True)
        meanwhile()
        time.sleep(_POLL)
    _signal(processes, received[0])
    deadline = time.monotonic() + grace
    while _running(processes) and len(received) == 1 and time.monotonic() < deadline:
        time.sleep(_POLL)
    return Ended({}, received[0])


def _end(processes: Sequence[_Process], patience: float) -> None:
    """Ask processes to end, and kill those that have not in so many seconds: one that waits in NCCL takes no signal."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, LAST_WORDS)):
        _signal(processes, number)
        deadline = time.monotonic() + seconds
        while _running(processes) and time.monotonic() < deadline:
            time.sleep(_POLL / 10)


def _failed(processes: Sequence[_Process]) -> dict[int, int]:
    return {rank: code for rank, process in enumerate(processes) if (code := process.poll())}


def _running(processes: Sequence[_Process]) -> list[int]:
    return [process.pid for process in processes if process.poll() is None]


def _signal(processes: Sequence[_Process], number: int) -> None:
    for pid in _running(processes):
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
