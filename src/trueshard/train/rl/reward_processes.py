"""The processes of the reward functions, and the calls that are given to them.

- A process is started when there is a call for it, and again after it was killed. Each is a session of its own: what a
  function starts ends with it, and a Ctrl-C reaches this process alone.
- A process has one call at a time. One that takes longer than its limit is killed, with its process.
- Answers are in the order of calls. After a call that failed, no later one is begun, and every earlier one is
  finished: so the first failure does not depend on the number of processes.
- They end at ``close``, with this process, and, if this process is killed, by the end of their stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trueshard.errors import UserError
from trueshard.launching import how, python_command

LOADING = 600.0
"""Seconds that a process has to import the files of its functions."""
_END = 1.0
"""Seconds that idle processes have to end by themselves."""


@dataclass(frozen=True)
class Call:
    """A request to a process; see ``reward_worker``."""

    request: dict[str, Any]
    seconds: float
    """Time limit."""
    place: int | None = None
    """Number of the process; None: whichever is free."""


@dataclass(frozen=True)
class Answer:
    """The end of a call."""

    content: dict[str, Any] = field(default_factory=dict)
    """The process's answer."""
    slow: bool = False
    """True if it was killed at its time limit."""
    ended: str = ""
    """How the process ended, if it did by itself: "was ended by SIGSEGV"."""

    @property
    def failed(self) -> bool:
        return bool(self.ended) or "error" in self.content


class Processes:
    """At most ``count`` processes with the same functions."""

    def __init__(self, count: int, functions: Sequence[str], arguments: dict[str, Any]) -> None:
        self.forms: list[str] = []
        """Of each function; empty until one process has loaded them."""
        self._settings = {"functions": list(functions), "arguments": arguments}
        self._processes: list[_Process | None] = [None] * count
        weakref.finalize(self, _end, self._processes, os.getpid())

    def __len__(self) -> int:
        return len(self._processes)

    def is_live(self, place: int) -> bool:
        """True if the process has been started, and not been killed."""
        return self._processes[place] is not None

    def load(self) -> list[str]:
        """Return the form of each function. Raises `UserError` if one cannot be loaded."""
        if not self.forms:
            self.run([Call({"drop": []}, LOADING)])
        return self.forms

    def run(self, calls: Sequence[Call]) -> list[Answer | None]:
        """Return the answers to calls, up to the first that failed; None for later ones that were not begun.

        Raises:
            UserError: a function cannot be loaded.
        """
        answers: list[Answer | None] = [None] * len(calls)
        anywhere = deque(number for number, call in enumerate(calls) if call.place is None)
        own = [deque(i for i, call in enumerate(calls) if call.place == place) for place in range(len(self))]
        busy: dict[int, _Running] = {}  # by place
        end = len(calls)
        try:
            while True:
                for place in [place for place in range(len(self)) if place not in busy]:
                    queue = own[place] or anywhere
                    if queue and queue[0] < end:
                        busy[place] = self._begin(place, queue.popleft(), calls)
                if not busy:
                    return answers
                for place in self._wait(busy):
                    running = busy[place]
                    answer = self._advanced(place, running, calls[running.number])
                    if answer is not None:
                        answers[running.number] = answer
                        del busy[place]
                        end = min(end, running.number) if answer.failed else end
        finally:  # after an exception, such as a Ctrl-C: what is on its way belongs to no later call
            for place in busy:
                self._kill(place)

    def close(self) -> None:
        """End all processes."""
        _end(self._processes, os.getpid())

    def _begin(self, place: int, number: int, calls: Sequence[Call]) -> _Running:
        process = self._processes[place]
        if process is not None and process.has_ended():  # between two calls
            self._kill(place)
            process = None
        if process is None:
            process = self._processes[place] = _Process()
            process.send(self._settings, time.monotonic() + LOADING)
            return _Running(process, number, time.monotonic() + LOADING, loads=True)
        return _sent(process, number, calls[number])

    def _advanced(self, place: int, running: _Running, call: Call) -> Answer | None:
        """Return the answer to a call that is ready, ended or late; None if it goes on."""
        process = running.process
        content = process.receive()
        if content is None:
            if time.monotonic() < running.deadline and not process.is_closed:
                return None
            by_itself = process.is_closed or process.has_ended()
            code = self._kill(place)
            memory = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
            return self._lost(running, f"{how(code)}{memory}" if by_itself else "")
        if not running.loads:
            return Answer(content)
        if "error" in content:
            raise UserError(f"reward.function: {content['error']}")
        self.forms = content["forms"]
        sent = _sent(process, running.number, call)
        running.loads, running.deadline = False, sent.deadline
        return None

    def _lost(self, running: _Running, ended: str) -> Answer:
        if running.loads:
            names = ", ".join(self._settings["functions"])
            what = f"their process {ended}" if ended else f"they took longer than {LOADING:g} s"
            raise UserError(f"reward.function: {names}: {what} when the files were imported; correct them")
        return Answer(ended=ended, slow=not ended)

    def _wait(self, busy: dict[int, _Running]) -> list[int]:
        """Wait; return the places of calls that are ready, ended or late."""
        poll, by_descriptor = select.poll(), {}
        for place, running in busy.items():
            by_descriptor[running.process.descriptor] = place
            poll.register(running.process.descriptor, select.POLLIN)
        left = min(running.deadline for running in busy.values()) - time.monotonic()
        ready = {by_descriptor[descriptor] for descriptor, _ in poll.poll(max(0, int(left * 1000) + 1))}
        now = time.monotonic()
        return [place for place, running in busy.items() if place in ready or running.deadline <= now]

    def _kill(self, place: int) -> int:
        """End a process at once; return its exit code."""
        process, self._processes[place] = self._processes[place], None
        return process.end(0.0) if process is not None else 0


@dataclass
class _Running:
    process: _Process
    number: int
    """Of the call."""
    deadline: float
    loads: bool = False
    """True while the process imports the functions; the call is sent after it."""


def _sent(process: _Process, number: int, call: Call) -> _Running:
    seconds = call.seconds * process.turns(call.request)
    deadline = time.monotonic() + seconds
    process.send({**call.request, "seconds": seconds}, deadline)
    return _Running(process, number, deadline)


class _Process:
    """A process and the pipes to it."""

    def __init__(self) -> None:
        # Sets of strings have the same order in each process, and in each run.
        environment = {"PYTHONHASHSEED": "0", **os.environ}
        self._process = subprocess.Popen(
            python_command("from trueshard.train.rl.reward_worker import main; main()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.descriptor = self._stdout.fileno()
        self.is_closed = False
        """True if it closed its end, as it does when it ends."""
        self._received = bytearray()
        self._episodes: set[str] = set()
        for stream in (self._stdin, self._stdout):
            os.set_blocking(stream.fileno(), False)

    def turns(self, request: dict[str, Any]) -> int:
        """Return 1; of an episode that this process has not begun, the number of turns that it will play again."""
        name = request.get("episode")
        if name is None or name in self._episodes:
            return 1
        self._episodes.add(name)
        return len(request["answers"]) + 1

    def send(self, request: dict[str, Any], deadline: float) -> None:
        """Send a request; what is not taken until the deadline, or by a process that has ended, is dropped."""
        left = memoryview(json.dumps(request, default=plain, skipkeys=True).encode() + b"\n")
        poll = select.poll()
        poll.register(self._stdin, select.POLLOUT)
        with contextlib.suppress(BrokenPipeError):
            while left and poll.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                left = left[os.write(self._stdin.fileno(), left) :]

    def receive(self) -> dict[str, Any] | None:
        """Return the answer if it is there as a whole."""
        with contextlib.suppress(BlockingIOError):
            while not self._received.endswith(b"\n"):
                piece = os.read(self.descriptor, 1 << 20)
                if not piece:
                    self.is_closed = True
                    return None
                self._received += piece
            line, self._received = bytes(self._received), bytearray()
            content: dict[str, Any] = json.loads(line)
            return content
        return None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Ask it to end, which it does when it is idle."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def end(self, grace: float) -> int:
        """Return the exit code; after ``grace`` seconds it is killed, and what it started is in any case."""
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END if self.is_closed else grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._stdout.close()
        return self._process.wait()


def _end(processes: list[_Process | None], owner: int) -> None:
    """End processes; in a fork of their owner, leave them."""
    if os.getpid() != owner:
        return
    live = [process for process in processes if process is not None]
    processes[:] = [None] * len(processes)
    deadline = time.monotonic() + _END
    for process in live:
        process.close()
    for process in live:
        process.end(max(0.0, deadline - time.monotonic()))


def plain(value: Any) -> Any:
    """Return what JSON has for a value that it has not: numbers and lists of numpy, ISO dates, and else a note.

    Bytes of an image, and whatever else a record may hold, are not sent: the note says so.
    """
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    return f"<{type(value).__name__}: not sent to a reward>"
