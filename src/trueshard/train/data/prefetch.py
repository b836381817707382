"""Work ahead: an iterator that is read in a thread, a few items before they are asked for.

- What the thread raises is raised by the call that would have got the item, once all items before it were given.
- The thread holds nothing of its reader. When that is closed, forgotten, or the interpreter ends, the thread ends too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

PATIENCE = 2.0
"""Seconds that closing waits for the item at work; a thread that needs longer ends after it, by itself."""


class _End:
    """What comes last: the error that ended the items, or None."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[Item]):
    """Gives the items of an iterator in their order.

    Args:
        items: read by one thread alone.
        depth: how many items wait to be taken, at least 1; one more may be at work.
        begin: called in the thread before the first item.
    """

    def __init__(self, items: Iterator[Item], depth: int, begin: Callable[[], None] = lambda: None) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._end: _End | None = None
        stopped = threading.Event()
        thread = threading.Thread(
            target=_fill, args=(items, self._queue, stopped, begin), name="trueshard-prefetch", daemon=True
        )
        self.close = weakref.finalize(self, _stop, self._queue, stopped, thread)
        """Ends the thread; may be called twice."""
        thread.start()

    def __iter__(self) -> Prefetcher[Item]:
        return self

    def __next__(self) -> Item:
        if self._end is None:
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def waiting(self) -> int:
        """Items that are ready to be taken."""
        return self._queue.qsize()


def _fill(items: Iterator[Any], ready: queue.Queue[Any], stopped: threading.Event, begin: Callable[[], None]) -> None:
    end = _End(None)
    try:
        begin()
        for item in items:
            ready.put(item)
            if stopped.is_set():
                return
    except BaseException as error:  # the reader's to handle
        end = _End(error)
    ready.put(end)


def _stop(ready: queue.Queue[Any], stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    with contextlib.suppress(queue.Empty):
        while True:
            ready.get_nowait()  # makes room: the thread is never left waiting for a reader
    if thread is not threading.current_thread():
        thread.join(PATIENCE)
