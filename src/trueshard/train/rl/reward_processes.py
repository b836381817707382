"""The processes in which reward functions run: the pool that calls them, and the program of a process.

- A process is started when there is a call for it, and again after it was killed. Each is a session of its own: what a
  function starts ends with it, and a Ctrl-C reaches this process alone.
- A process works on one call at a time. One that takes longer than its limit is killed, with its process.
- Answers are in the order of requests. After one that failed, no later one is begun, and every earlier one is finished:
  so the first failure does not depend on the number of processes.
- Processes end at ``close``, with this process, and, if this process is killed, when their connection closes.

Messages are JSON; a record may hold anything, and pickle would import for it what a reward has no need of, torch too.
The first message to a process is [functions, arguments], answered by ``{"forms"}``. Requests, and their answers:

- ``{"function", "inputs": [[record, sample], …]}``: call a function; ``{"rewards": [[reward, parts], …]}``;
- ``{"episode", "record", "answers"}``: take an episode to its next turn; ``{"messages"}``, or ``{"rewards"}`` of one.
  An episode that is not live in the process is begun and given all its answers again;
- ``{"drop": episode}``: close an episode, if it is live; ``{}``.

An answer ``{"error", "at"}`` says what went wrong, and for which of the inputs (null: for all). ``{"slow"}`` stands for
the answer of a process that took too long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from trueshard.errors import UserError
from trueshard.launching import Served, end_with_parent, how, out_of_memory_hint
from trueshard.train.own_code import Wrong, explained
from trueshard.train.rl.reward_functions import Function, load, messages_of, reward_of, rewards_of
from trueshard.train.rl.samples import Sample

Message = dict[str, Any]
Episode = Generator[Any, str | None, Any]

LOADING = 600.0
"""Seconds that a process has to import the files of its functions."""
_GRACE = 1.0
"""Seconds that an idle process has to end by itself."""


class Processes:
    """Pool of at most ``count`` processes with the same functions; ``seconds``: the time limit of a call."""

    def __init__(self, count: int, functions: Sequence[str], arguments: dict[str, Any], seconds: float) -> None:
        self._processes = [_Process(functions, arguments, seconds) for _ in range(count)]
        weakref.finalize(self, _end, self._processes, os.getpid())

    def __len__(self) -> int:
        return len(self._processes)

    def load(self) -> list[str]:
        """Return the form of each function. Raises `UserError` if one cannot be loaded."""
        first = self._processes[0]
        if not first.forms:
            first.start()
        return first.forms

    def run(self, requests: Sequence[Message], places: Sequence[int] | None = None) -> list[Message | None]:
        """Return the answers to requests, up to the first that failed; later ones may be None.

        ``places``: the number of the process for each; None: whichever is free. Raises `UserError` if a function cannot
        be loaded.
        """
        answers: list[Message | None] = [None] * len(requests)
        anywhere = deque(range(len(requests)) if places is None else ())
        failed: list[int] = []

        def work(place: int) -> None:
            queue = anywhere if places is None else deque(i for i, chosen in enumerate(places) if chosen == place)
            while True:
                try:
                    number = queue.popleft()
                except IndexError:
                    return
                if any(number > other for other in failed):
                    return
                answers[number] = answer = self._processes[place].call(requests[number])
                if "error" in answer:
                    failed.append(number)

        with ThreadPoolExecutor(len(self)) as threads:
            futures = [threads.submit(work, place) for place in range(len(self))]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # such as a Ctrl-C: what is on its way belongs to no later call
                failed.append(-1)
                for process in self._processes:
                    process.kill()
                raise
        return answers

    def close(self) -> None:
        """End all processes."""
        _end(self._processes, os.getpid())


class _Process:
    """A process of the pool, started when it is first called, and the connection to it."""

    def __init__(self, functions: Sequence[str], arguments: dict[str, Any], seconds: float) -> None:
        self._functions, self._arguments, self._seconds = list(functions), arguments, seconds
        self._served: Served | None = None
        self._episodes: set[str] = set()
        """Episodes that this process has begun, and so need no time to be played again."""
        self.forms: list[str] = []
        """Form of each function, once they have been loaded."""

    def start(self) -> None:
        """Start the process, unless it runs. Raises `UserError` if a function cannot be loaded."""
        if self._served is not None and self._served.process.poll() is None:
            return
        self.end()  # one that ended between two calls
        # Sets of strings have the same order in each process. Functions print to stderr, and at once: what is
        # killed shows what it printed.
        environment = {"PYTHONHASHSEED": "0", **os.environ, "PYTHONUNBUFFERED": "1"}
        self._served = Served(__name__, stdout=2, env=environment)
        try:
            answer = self._exchange([self._functions, self._arguments], LOADING)
        except BaseException:
            self.kill()
            raise
        if "forms" in answer:
            self.forms = answer["forms"]
            return
        names = ", ".join(self._functions)
        if "slow" in answer:
            raise UserError(
                f"reward.function: {names}: their process took longer than {LOADING:g} s to import the files"
            )
        if "ended" in answer:
            raise UserError(
                f"reward.function: {names}: their process {answer['ended']} when the files were imported; correct them"
            )
        self.end()
        raise UserError(f"reward.function: {answer['error']}")

    def call(self, request: Message) -> Message:
        """Return the answer to a request. Raises `UserError` if a function cannot be loaded."""
        self.start()
        seconds, episode = self._seconds, request.get("episode")
        if episode is not None and episode not in self._episodes:
            self._episodes.add(episode)
            seconds *= len(request["answers"]) + 1  # it is played again from its beginning
        answer = self._exchange({**request, "seconds": seconds}, seconds)
        return {"error": f"its process {answer['ended']}"} if "ended" in answer else answer

    def _exchange(self, message: Any, seconds: float) -> Message:
        """Return the answer to a message; ``{"slow"}`` or ``{"ended": words}`` of a process that is no more."""
        assert self._served is not None
        connection = self._served.connection
        try:
            connection.send_bytes(json.dumps(message, default=_plain, skipkeys=True).encode())
            if not connection.poll(seconds):
                self.end()
                return {"slow": True}
            answer: Message = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            code = self.end(_GRACE)
            return {"ended": f"{how(code)}{out_of_memory_hint(code)}"}
        return answer

    def kill(self) -> None:
        """Kill the process; a thread that waits for it sees it end."""
        served = self._served  # another thread may end it meanwhile
        if served is not None:
            served.kill()

    def hang_up(self) -> None:
        """Close the connection, whereupon an idle process ends."""
        if self._served is not None:
            self._served.connection.close()

    def end(self, grace: float = 0.0) -> int:
        """Return the exit code; after ``grace`` seconds it is killed, and what it started is in any case."""
        code = 0 if self._served is None else self._served.end(grace)
        self._served, self._episodes = None, set()
        return code


def _end(processes: Sequence[_Process], owner: int) -> None:
    """End processes; in a fork of their owner, leave them."""
    if os.getpid() == owner:
        for process in processes:
            process.hang_up()
        for process in processes:
            process.end(_GRACE)


def _plain(value: Any) -> Any:
    """Return what JSON has for a value that it has not: numbers and lists of numpy, ISO dates, and else a note.

    Bytes of an image, and whatever else a record may hold, are not sent: the note says so.
    """
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    return f"<{type(value).__name__}: not sent to a reward>"


# The program of a process. Neither torch nor transformers is imported.


def serve(descriptor: int) -> None:
    """Answer one caller until it closes its end of the connection."""
    connection = Connection(descriptor)
    end_with_parent(lambda: os.killpg(os.getpid(), signal.SIGKILL))  # with all that functions have started

    def reply(answer: Message) -> None:
        connection.send_bytes(json.dumps(answer).encode())

    with contextlib.suppress(EOFError, ConnectionError):
        functions, arguments = json.loads(connection.recv_bytes())
        try:
            worker = _Worker([load(words, arguments) for words in functions])
        except Wrong as error:
            reply({"error": str(error)})
            return
        reply({"forms": [function.form for function in worker.functions]})
        while True:
            request = json.loads(connection.recv_bytes())
            # The caller ends what is slow. This is for the case that it has gone, and a function never lets go of
            # Python's lock, as a regular expression that backtracks does: no thread of Python runs then.
            faulthandler.dump_traceback_later(2 * request["seconds"] + _GRACE, exit=True, file=2)
            answer = worker.answer(request)
            faulthandler.cancel_dump_traceback_later()
            reply(answer)


class _Worker:
    """The functions, and the episodes that are live."""

    def __init__(self, functions: list[Function]) -> None:
        self.functions = functions
        self._episodes: dict[str, tuple[Episode, int]] = {}  # with the number of answers that it got

    def answer(self, request: Message) -> Message:
        """Return the answer to a request."""
        try:
            if "drop" in request:
                self._close(request["drop"])
                return {}
            if "episode" in request:
                return self._turn(request["episode"], request["record"], request["answers"])
            return {"rewards": self._call(request["function"], request["inputs"])}
        except Wrong as error:
            return {"error": str(error), "at": error.at}

    def _call(self, number: int, inputs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
        function = self.functions[number]
        records = [record for record, _ in inputs]
        samples = [Sample(**fields) for _, fields in inputs]
        _seed(number, *samples[0].name)
        with explained(function.folder):
            value = function.on(records, samples, is_trial=not samples[0].tokens)  # an answer has a token or more
        return rewards_of(value, function, len(samples))

    def _turn(self, name: str, record: dict[str, Any], answers: list[str]) -> Message:
        """Give an episode the answers that it has not got; all of them and a new beginning if it is not live."""
        function = self.functions[0]
        if not answers:
            self._close(name)
        episode, received = self._episodes.pop(name, (None, -1))
        with explained(function.folder):
            episode = episode or function.call(record, **function.arguments)
        value, ended = None, False
        for number, answer in list(enumerate([None, *answers]))[received + 1 :]:
            if ended:
                raise Wrong(
                    f"it ended after {number - 1} answers when it was repeated in a new process, and had not before; "
                    "it must depend on the record and on the answers alone"
                )
            _seed(name, number)
            with explained(function.folder):
                value, ended = _advance(episode, answer)
        if ended and not answers:
            raise Wrong("it returned before it yielded; an episode asks the model at least once")
        if ended:
            return {"rewards": [reward_of(value, function)]}
        messages = messages_of(value)
        self._episodes[name] = episode, len(answers)
        return {"messages": messages}

    def _close(self, name: str) -> None:
        episode, _ = self._episodes.pop(name, (None, 0))
        if episode is not None:
            with explained(self.functions[0].folder):
                episode.close()


def _advance(episode: Episode, answer: str | None) -> tuple[Any, bool]:
    """Return what an episode yields next and False, or what it returns and True."""
    try:
        return episode.send(answer), False
    except StopIteration as end:
        return end.value, True


def _seed(*name: object) -> None:
    """Make the random numbers of a call follow from its name, and not from the process."""
    text = "/".join(map(str, name))
    random.seed(text)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(zlib.crc32(text.encode()))
