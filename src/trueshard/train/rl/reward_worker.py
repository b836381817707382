"""The program in which reward functions run, in a process of its own; ``reward_processes`` starts it.

It reads requests from stdin, a JSON list of them a line, and answers each on stdout, one JSON object a line:

- first the settings, ``{"functions", "arguments"}``; answer: ``{"forms"}``, or ``{"error"}`` if a function cannot be
  loaded;
- ``{"function", "inputs": [[record, sample], …]}``: call a function; answer: ``{"rewards": [[reward, parts], …]}``;
- ``{"episode", "record", "answers"}``: take an episode to its next turn; answer: ``{"messages"}``, or ``{"rewards"}``
  of one. An episode that is not live here is begun and given all its answers again;
- ``{"drop": [episode, …]}``: close episodes; answer: ``{}``.

An ``{"error", "at"}`` says what a function did wrong, and for which of the inputs (null: for all).

Both descriptors are moved away before anything of the user's is imported, so what functions print goes to stderr.
Neither torch nor transformers is imported. Random numbers and the order of sets follow from the sample and not from the
process: ``random`` and numpy are seeded for each call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import random
import select
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

from trueshard.train.rl.reward_functions import Function, Wrong, load, messages_of, reward_of, rewards_of
from trueshard.train.rl.samples import Sample

Request = dict[str, Any]
Episode = Generator[Any, str | None, Any]
_GRACE = 1.0
"""Seconds that a function may go on after the caller has gone."""


def main() -> None:
    """Serve one caller until it closes stdin."""
    requests, reply = _protocol()
    settings = next(requests, None)
    if settings is None:
        return
    try:
        worker = Worker([load(words, settings[0]["arguments"]) for words in settings[0]["functions"]])
    except Wrong as error:
        reply({"error": str(error)})
        return
    reply({"forms": [function.form for function in worker.functions]})
    for several in requests:
        armed = -math.inf
        for request in several:
            # The caller ends what is slow. This is for the case that it has gone, and a function never lets go of
            # Python's lock, as a regular expression that backtracks does: no thread of Python runs then.
            if time.monotonic() - armed > _GRACE / 2:
                armed = time.monotonic()
                faulthandler.dump_traceback_later(2 * request["seconds"] + _GRACE, exit=True, file=2)
            reply(worker.answer(request))
        faulthandler.cancel_dump_traceback_later()


class Worker:
    """The functions, and the episodes that are live."""

    def __init__(self, functions: list[Function]) -> None:
        self.functions = functions
        self._episodes: dict[str, tuple[Episode, int]] = {}  # with the number of answers that it got

    def answer(self, request: Request) -> dict[str, Any]:
        """Return the answer to any request but the first."""
        try:
            if "drop" in request:
                for name in request["drop"]:
                    self._close(name)
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
        with function.explained():
            value = function.on(records, samples)
        return rewards_of(value, function, len(samples))

    def _turn(self, name: str, record: dict[str, Any], answers: list[str]) -> dict[str, Any]:
        """Give an episode the answers that it has not got; all of them and a new beginning if it is not live."""
        function = self.functions[0]
        if not answers:
            self._close(name)
        episode, got = self._episodes.pop(name, (None, -1))
        with function.explained():
            episode = episode or function.call(record, **function.arguments)
        value, ended = None, False
        for number, answer in list(enumerate([None, *answers]))[got + 1 :]:
            if ended:
                raise Wrong(
                    f"it ended after {number - 1} answers when it was repeated in a new process, and had not before; "
                    "it must depend on the record and on the answers alone"
                )
            _seed(name, number)
            with function.explained():
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
            with self.functions[0].explained():
                episode.close()


def _advance(episode: Episode, answer: str | None) -> tuple[Any, bool]:
    """Return what an episode yields next and False, or what it returns and True."""
    try:
        return episode.send(answer), False
    except StopIteration as end:
        return end.value, True


def _seed(*name: object) -> None:
    """Make the random numbers of a call follow from its name."""
    text = "/".join(map(str, name))
    random.seed(text)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(zlib.crc32(text.encode()))


def _protocol() -> tuple[Iterator[list[Request]], Callable[[dict[str, Any]], None]]:
    """Take stdin and stdout; return the requests, and a function that sends an answer."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # what is killed shows what it printed

    def watch() -> None:
        """End the process, whatever it does, when the caller has gone."""
        gone = select.poll()
        gone.register(incoming, 0)  # its end is always told
        gone.poll()
        time.sleep(_GRACE)  # in which a process that waits for requests ends by itself
        os.killpg(os.getpid(), signal.SIGKILL)

    def reply(answer: dict[str, Any]) -> None:
        outgoing.write(json.dumps(answer).encode() + b"\n")
        outgoing.flush()

    threading.Thread(target=watch, daemon=True).start()
    return (json.loads(line) for line in incoming), reply
