"""A trace of some steps by torch's profiler, for Perfetto or chrome://tracing.

Each rank writes its own, gzipped, which gets its name once it is complete. Steps count from the start of the process: a
resumed run is profiled too, after its own warm-up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trueshard.files import replacing
from trueshard.train.trainer import Callback, Trainer


class Profile(Callback):
    """Profiles the steps `first` (from 2 on) … `last` since the start on every rank, each into `rank-N.json.gz`.

    The step before is profiled and dropped, so that the profiler's own start is not in the trace.
    """

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._folder, self._first, self._last = folder, first, last
        self._profiler: torch.profiler.profile | None = None
        self._taken, self._written, self._rank = 0, False, 0

    def on_start(self, trainer: Trainer) -> None:
        self._rank = trainer.rank
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr at its start and stop
        steps = torch.profiler.schedule(wait=self._first - 2, warmup=1, active=self._last - self._first + 1, repeat=1)
        self._profiler = torch.profiler.profile(schedule=steps, on_trace_ready=self._write, acc_events=True)
        self._profiler.start()

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self._taken += 1
        if self._profiler is not None:
            self._profiler.step()
        if self._taken == self._last:
            self.on_end(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        last = min(self._taken, self._last)
        steps = f"step {last}" if last == self._first else f"steps {self._first} to {last}"
        said = f"Profile of {steps} since the start: {self._folder}/rank-*.json.gz"
        if not self._written:
            said = f"No profile: the run ended before step {self._first} since its start"
        if self._rank == 0:
            print(said, flush=True)

    def _write(self, profiler: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank-{self._rank}.json.gz"
        with replacing(file) as scratch:  # of the same suffix, by which the profiler gzips
            profiler.export_chrome_trace(str(scratch))
        self._written = True
