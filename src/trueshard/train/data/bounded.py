"""Call a function of somebody else's in a process that ends with it when it takes too much time, memory or text.

A chat template comes with a model, from anybody. The sandbox of transformers keeps it from Python and from large
ranges, but not from loops in loops, from `10**(10**9)`, or from a string of ten gigabytes; and nothing inside a process
can end a single call into C. So while data are prepared, records are rendered in a fork of the process, which has the
template already: an exchange of messages a rendering, some 0.1 ms. Only there, since a fork beside training would keep
copies of all memory that training writes to; what renders later is of the same template, and of records that have been
rendered once, or the first of a stream.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from trueshard.errors import with_kind

SECONDS = 5
"""Processor time that a call may take; renderings take a thousandth of one."""
MEMORY = 2**30
"""Bytes that a call may allocate."""
CHARACTERS = 2**24
"""Length of a text that it may return: four million tokens, longer than any sequence."""


class Failed(Exception):
    """Raised where the call failed; its text has the kind of the error, or which limit it went beyond."""


@contextlib.contextmanager
def bounded(function: Callable[..., tuple[str, Any]]) -> Iterator[Callable[..., tuple[str, Any]]]:
    """Yield ``function``, called in a fork of this process, with the errors that it raises as ``Failed``."""
    here, there = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: the child runs Python alone
        child = os.fork()
    if not child:
        _serve(function, there)
    there.close()

    def call(*arguments: Any) -> tuple[str, Any]:
        try:
            here.send(arguments)
            problem, result = here.recv()
        except (EOFError, ConnectionError):
            raise Failed(f"it takes more than {SECONDS} s, or crashes") from None
        if problem:
            raise Failed(problem)
        return result[0], result[1]

    try:
        yield call
    finally:
        here.close()
        os.waitpid(child, 0)


def _serve(function: Callable[..., tuple[str, Any]], connection: Connection) -> NoReturn:
    """Answer calls until the other side is gone, and end the process: here by itself, or by a signal at a limit."""
    try:
        os.closerange(3, connection.fileno())  # a lock that the run holds must not outlive it here
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other side's, which then closes this one
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        with contextlib.suppress(OSError, ValueError):  # not on macOS
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        while True:
            arguments = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            problem, result = "", None
            try:
                result = function(*arguments)
                if len(result[0]) > CHARACTERS:
                    problem, result = f"it writes more than {CHARACTERS:,} characters", None
            except MemoryError:
                problem = f"it takes more than {MEMORY / 2**30:.0f} GiB"
            except Exception as error:
                problem = with_kind(error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send((problem, result))
    finally:
        os._exit(0)
