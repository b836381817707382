"""How a run is asked to stop: the first signal asks, the second insists.

- SIGINT (Ctrl-C), SIGTERM and SIGHUP set a flag that the loop reads between steps, so that it can save first. A second
  signal ends the process at once, even inside a collective: it meets the system's own handling.
- Before the first step there is nothing to save: until the flag is read for the first time, every signal ends the
  process at once, also one that waits for the others.
- A worker whose launcher has died asks itself.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = 130
"""Exit code of a run that was stopped and can be resumed, whichever of the signals asked."""


class StopRequest:
    """`requested` is what the loop reads."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a signal has come since `requested` was first read."""
        self._waits = False
        self._parent = os.getppid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop; ranks agree by an all-reduce of it."""
        if not self._waits:
            self._waits = True
            for number in SIGNALS:
                signal.signal(number, self._handle)
        return self.asked or os.getppid() != self._parent

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
