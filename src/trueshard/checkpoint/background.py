"""Saves that go on while training does: one at a time, and no error of one is lost.

A thread, not a process: writing and checksums leave the interpreter free, and nothing has to be copied twice.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable


class Saving:
    """A save in the background."""

    def __init__(self, work: Callable[[], None], what: str) -> None:
        self._work, self.what = work, what
        self.failure: BaseException | None = None
        """Not raised yet."""
        # No daemon: a script that ends waits for its checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"trueshard: {what}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.failure = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until the checkpoint is complete.

        Raises:
            OSError, RuntimeError: it is not; the error is the one that a ``save`` which waits would have raised.
        """
        global _running
        self._thread.join()
        if _running is self:
            _running = None
        error, self.failure = self.failure, None
        if error is not None:
            raise error


_running: Saving | None = None


def _tell() -> None:
    """At the end of the process: an error that nobody asked for."""
    if _running is not None and _running.failure is not None:
        print(f"trueshard: {_running.what} failed: {_running.failure}", file=sys.stderr)


def start(work: Callable[[], None], what: str) -> Saving:
    """Do ``work`` in the background; nothing else may be running."""
    global _running
    assert _running is None
    _running = Saving(work, what)
    atexit.unregister(_tell)
    atexit.register(_tell)
    return _running


def finish() -> None:
    """Wait for what is running, and raise its error."""
    if _running is not None:
        _running.wait()
