"""Forked processes that do a search's work side by side: each has all that existed when it was forked.

A process that has not run a backward yet may be forked (autograd's threads do not survive it), so the one that forks
runs none: it hands out tasks, and gathers results in any order. Tasks are functions that existed before, by name.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NoReturn

from trueshard.errors import is_defect, with_kind
from trueshard.launching import how
from trueshard.machine import cpu_cores


class _Elsewhere(Exception):
    """Traceback of an error in a worker, as the cause of the error here."""


class Task:
    """A call that a worker makes.

    Attributes:
        is_done: whether ``result()`` returns at once.
    """

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.where = ""


class Workers:
    """Processes that are ended when the context is left; without any, tasks are done here when they are waited for.

    Args:
        functions: what tasks may call, by name.
        count: how many; None: one for each core, two at most, and none where a process cannot be forked.

    Attributes:
        count: how many there are.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], count: int | None = None) -> None:
        self._functions = functions
        if count is None:
            count = min(2, cpu_cores()) if sys.platform == "linux" else 0
        self.count = count if count > 1 else 0
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, Task]] = {}
        self._waiting: deque[Task] = deque()
        self._dead: RuntimeError | None = None
        """What ended the last worker that died."""

    def __enter__(self) -> Workers:
        for _ in range(self.count):
            self._idle.append(_Worker(self._functions, [each.connection for each in self._idle]))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, where: TracebackType | None) -> None:
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.end()

    def start(self, name: str, *arguments: Any) -> Task:
        """Hand a task to a worker, now or as soon as one is free."""
        task = Task(name, arguments)
        self._waiting.append(task)
        self._hand_out()
        return task

    def result(self, task: Task) -> Any:
        """Return what a task returned, or raise what it raised, once it is done.

        Raises:
            RuntimeError: its worker ended before.
        """
        while not task.is_done:
            if not self.count:
                self._waiting.remove(task)
                task.value, task.is_done = self._functions[task.name](*task.arguments), True
            else:
                self._gather(wait(list(self._busy)))
        if task.error is not None:
            raise task.error from _Elsewhere(task.where)
        return task.value

    def _hand_out(self) -> None:
        while self._waiting and self._idle:
            worker, task = self._idle.pop(), self._waiting.popleft()
            self._busy[worker.connection] = worker, task
            with contextlib.suppress(BrokenPipeError):  # it has died: there is no answer to read either
                worker.connection.send((task.name, task.arguments))
        if self.count and not self._idle and not self._busy:
            for each in self._waiting:
                each.error, each.is_done = self._dead, True
            self._waiting.clear()

    def _gather(self, ready: list[Any]) -> None:
        for connection in ready:
            worker, task = self._busy.pop(connection)
            try:
                task.value, task.error, task.where = connection.recv()
                self._idle.append(worker)
            except (EOFError, OSError):
                code = worker.code()
                memory = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
                task.error = RuntimeError(f"a process of the planner {how(code)} before it was done{memory}")
                self._dead = task.error
            task.is_done = True
        self._hand_out()


class _Worker:
    """A forked process and the connection to it."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], others: list[Connection]) -> None:
        self.connection, theirs = Pipe()
        gc.freeze()  # so that its pages are not written to by counting references of garbage
        self.process = os.fork()
        if self.process == 0:
            for each in (self.connection, *others):
                each.close()
            _work(theirs, functions)
        theirs.close()

    def end(self) -> None:
        """End the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        self.code()

    def code(self) -> int:
        """Return the exit code of a process that is ending."""
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def _work(connection: Connection, functions: Mapping[str, Callable[..., Any]]) -> NoReturn:
    """Do the tasks that come over a connection until it is closed."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that asks
        while True:
            name, arguments = connection.recv()
            answer = _done(functions[name], arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(answer)
    except EOFError:  # the one that asks has gone
        os._exit(0)
    finally:
        os._exit(1)


def _done(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return the message with the function's value, or with the error and its traceback."""
    try:
        return pickle.dumps((function(*arguments), None, ""), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        error.is_defect = is_defect(error)  # type: ignore[attr-defined] # its traceback stays here
        where = f"\n{traceback.format_exc()}"
        try:
            pickle.loads(packed := pickle.dumps((None, error, where)))
            return packed
        except Exception:  # it holds what cannot be sent
            return pickle.dumps((None, RuntimeError(with_kind(error)), where))
