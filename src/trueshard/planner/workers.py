"""Run a search's tasks side by side in forked processes, which have all that existed when they were forked.

A process that has not run a backward yet may be forked (autograd's threads do not survive it), so the one that forks
runs none: it hands out tasks. A task names one of the functions that existed before: they hold models and closures,
which cannot be sent.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from trueshard.errors import is_defect, with_kind
from trueshard.launching import how
from trueshard.machine import cpu_cores

Task: TypeAlias = Callable[[], Any]
"""Return the result of a task that was started, or raise its error."""


class Workers:
    """A pool of processes that are killed when the context is left; without any, tasks run here when waited for.

    Args:
        functions: what tasks may call, by name.
        count: how many; None: one for each core, two at most, and none where a process cannot be forked.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], count: int | None = None) -> None:
        self._functions = functions
        if count is None:
            count = min(2, cpu_cores()) if sys.platform == "linux" else 0
        self.count = count if count > 1 else 0
        """Processes of the pool; 0: tasks run here. One alone would only add the cost of sending."""
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()
        """Held to be killed, and for the exit code of one that died."""

    def __enter__(self) -> Workers:
        if self.count:
            gc.freeze()  # so that pages are not copied by counting references of garbage
            context = get_context("fork")
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_begin, initargs=(self._functions,))
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            for process in self._processes:
                process.kill()
            self._pool.shutdown()
            self._pool = None

    def start(self, name: str, *arguments: Any) -> Task:
        """Hand a task to the pool. Raises RuntimeError if a process of it has died."""
        if self._pool is None:
            return functools.cache(functools.partial(self._functions[name], *arguments))
        before = set(active_children())
        try:
            future = self._pool.submit(_run, name, arguments)
        except BrokenProcessPool:
            raise self._death() from None
        self._processes |= set(active_children()) - before
        return functools.partial(self._result, future)

    def result(self, task: Task) -> Any:
        """Return what a task returned, or raise what it raised, once it is done.

        Raises:
            RuntimeError: a process of the pool died before.
        """
        return task()

    def _result(self, future: Future[Any]) -> Any:
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            raise self._death() from None
        if error is not None:
            raise error  # here, so that ``errors.is_defect`` takes it for one of this library
        return future.result()

    def _death(self) -> RuntimeError:
        """Return the error for a process that died; the pool has ended the others by SIGTERM."""
        assert self._pool is not None
        self._pool.shutdown()
        codes = [process.exitcode for process in self._processes]
        code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), -signal.SIGTERM)
        memory = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
        return RuntimeError(f"a process of the planner {how(code or 0)} before it was done{memory}")


# A process of the pool

_functions: Mapping[str, Callable[..., Any]] = {}


def _begin(functions: Mapping[str, Callable[..., Any]]) -> None:
    global _functions
    _functions = functions
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that waits
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that forked it is gone, which a pool by itself would not notice."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _run(name: str, arguments: tuple[Any, ...]) -> Any:
    """Call a function; raise an error that can be sent."""
    try:
        return _functions[name](*arguments)
    except BaseException as error:
        error.is_defect = is_defect(error)  # type: ignore[attr-defined] # its traceback stays here
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(with_kind(error)) from error
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
