"""The processes of the reward functions, and the calls that are given to them.

- A process is started when there is a call for it, and again after it was killed. Each is a session of its own: what a
  function starts ends with it, and a Ctrl-C reaches this process alone.
- A process works on one call at a time. One that takes longer than its limit is killed, with its process. Where calls
  are quick, the next ones are sent ahead, so that no process waits for its next call; after a kill they are sent again.
- Answers are in the order of calls. After a call that failed, no later one is sent, and every earlier one is
  finished: so the first failure does not depend on the number of processes.
- They end at ``close``, with this process, and, if this process is killed, by the end of their stdin.
"""

from __future__ import annotations

import contextlib
import json
import math
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
AHEAD_SECONDS = 0.02
"""Work, in seconds, that is sent to a process ahead."""
AHEAD_CALLS = 128
"""Calls on their way to a process, at most."""
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
    """End of the process in words, if it ended by itself: "was ended by SIGSEGV"."""

    @property
    def failed(self) -> bool:
        return bool(self.ended) or "error" in self.content


class Processes:
    """Pool of at most ``count`` processes with the same functions."""

    def __init__(self, count: int, functions: Sequence[str], arguments: dict[str, Any]) -> None:
        self.forms: list[str] = []
        """Form of each function; empty until one process has loaded them."""
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
        """Return the answers to calls, up to the first that failed; later ones may be None.

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
                for place in range(len(self)):
                    queue = own[place] or anywhere
                    room = self._room(place, busy, len(queue))
                    if given := [queue.popleft() for _ in range(min(room, len(queue))) if queue[0] < end]:
                        self._give(place, given, calls, busy)
                if not busy:
                    return answers
                for place in self._wait(busy):
                    running = busy[place]
                    for number, answer in self._advanced(place, running, calls):
                        answers[number] = answer
                        end = min(end, number) if answer.failed else end
                    if end < len(calls) and all(number > end for number, _ in running.sent):
                        self._kill(place)  # what it works on is not wanted any more
                    if self._processes[place] is not running.process:  # killed
                        for number, _ in reversed(running.sent):
                            (anywhere if calls[number].place is None else own[place]).appendleft(number)
                    elif running.sent:
                        continue
                    del busy[place]
        finally:  # after an exception, such as a Ctrl-C: what is on its way belongs to no later call
            for place in busy:
                self._kill(place)

    def _room(self, place: int, busy: dict[int, _Running], waiting: int) -> int:
        """Return how many of the calls that wait to give to a process now."""
        if place in busy:
            return busy[place].room(waiting)
        process = self._processes[place]
        return 1 if process is None else max(1, _Running(process, share=len(self)).room(waiting))

    def close(self) -> None:
        """End all processes."""
        _end(self._processes, os.getpid())

    def _give(self, place: int, numbers: list[int], calls: Sequence[Call], busy: dict[int, _Running]) -> None:
        """Send calls to a process, which is started if there is none."""
        running, process = busy.get(place), self._processes[place]
        if running is None:
            if process is not None and process.has_ended():  # between two calls
                self._kill(place)
                process = None
            running = busy[place] = _Running(process or _Process(), share=len(self))
            if process is None:
                self._processes[place] = running.process
                running.process.send([self._settings], time.monotonic() + LOADING)
                running.loads, running.deadline = True, time.monotonic() + LOADING
        if running.loads:
            running.sent += [(number, 0.0) for number in numbers]
        else:
            running.send(numbers, calls)

    def _advanced(self, place: int, running: _Running, calls: Sequence[Call]) -> list[tuple[int, Answer]]:
        """Return the calls of a process that are answered, ended or late, in their order."""
        process, result = running.process, []
        for content in process.receive():
            if not running.loads:
                result.append((running.answered(), Answer(content)))
            elif "error" in content:
                raise UserError(f"reward.function: {content['error']}")
            else:
                self.forms, running.loads = content["forms"], False
                numbers = [number for number, _ in running.sent]
                running.sent.clear()
                running.send(numbers, calls)
        is_late = bool(running.sent) and time.monotonic() >= running.deadline
        if process.is_closed or (is_late and not result):
            by_itself = process.is_closed or process.has_ended()
            code = self._kill(place)
            memory = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
            lost = self._lost(running, f"{how(code)}{memory}" if by_itself else "")
            if running.sent:
                result.append((running.sent.popleft()[0], lost))
        return result

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
    """A process that works, and the calls on their way to it."""

    process: _Process
    share: int
    """Processes that share the calls."""
    sent: deque[tuple[int, float]] = field(default_factory=deque)
    """Number and time limit of each call; the first is the one that it works on."""
    deadline: float = 0.0
    """Deadline of the first call in ``sent``, on ``time.monotonic``'s clock."""
    loads: bool = False
    """True while the process imports the functions; calls are sent after it."""
    _since: float = 0.0

    def room(self, waiting: int) -> int:
        """Return how many calls to send ahead, of so many that wait; many at a time."""
        most = min(AHEAD_CALLS, int(AHEAD_SECONDS / max(self.process.last, 1e-9)), -(-waiting // self.share))
        return max(0, most - len(self.sent)) if not self.loads and len(self.sent) <= most // 2 else 0

    def send(self, numbers: Sequence[int], calls: Sequence[Call]) -> None:
        """Send calls."""
        limits = [calls[number].seconds * self.process.turns(calls[number].request) for number in numbers]
        now = time.monotonic()
        if not self.sent:
            self._since, self.deadline = now, now + limits[0]
        self.sent += zip(numbers, limits, strict=True)
        requests = [{**calls[i].request, "seconds": limit} for i, limit in zip(numbers, limits, strict=True)]
        self.process.send(requests, max(self.deadline, now + limits[0]))

    def answered(self) -> int:
        """Return the number of the call that was answered; the next begins."""
        now = time.monotonic()
        number, _ = self.sent.popleft()
        self.process.last, self._since = now - self._since, now
        if self.sent:
            self.deadline = now + self.sent[0][1]
        return number


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
        self.last = math.inf
        """Seconds that its last answer took."""
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

    def send(self, requests: Sequence[dict[str, Any]], deadline: float) -> None:
        """Send requests; what is not taken until the deadline, or by a process that has ended, is dropped."""
        left = memoryview(json.dumps(requests, default=plain, skipkeys=True).encode() + b"\n")
        poll = select.poll()
        poll.register(self._stdin, select.POLLOUT)
        with contextlib.suppress(BrokenPipeError):
            while left and poll.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                left = left[os.write(self._stdin.fileno(), left) :]

    def receive(self) -> list[dict[str, Any]]:
        """Return the answers that are there as a whole."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.descriptor, 1 << 20):
                self._received += piece
            self.is_closed = True
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        return [json.loads(line) for line in lines]

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
