"""A trace of some steps by torch's profiler, for Perfetto or chrome://tracing.

- Each rank writes its own, gzipped, which gets its name once it is complete.
- Steps count from the start of the process: a resumed run is profiled too, after its own warm-up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trueshard.files import replacing
from trueshard.train.trainer import Callback, Trainer


class Profile(Callback):
    """Profiles the steps `first` … `last` on every rank, each into `rank-N.json.gz`.

    Args:
        folder: for the traces; made if missing.
        first: from 2 on; 2 is the second step after the start or the resume. The step before is profiled and dropped,
            so that the profiler's own start is not in the trace.
        last: at least `first`. If the run ends earlier, the trace has the steps that were taken.
    """

    def __init__(self, folder: Path, first: int, last: int) -> None:
        if not 2 <= first <= last:
            raise ValueError(f"profile: steps {first} to {last} are no range from 2 on")
        self._folder, self._first, self._last = folder, first, last
        self._profiler: torch.profiler.profile | None = None
        self._taken, self._written, self._rank = 0, False, 0

    def on_start(self, trainer: Trainer) -> None:
        self._rank = trainer.rank
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr at its start and stop
        activities = [torch.profiler.ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=self._first - 2, warmup=1, active=self._last - self._first + 1, repeat=1
            ),
            on_trace_ready=self._write,
            acc_events=True,
        )
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
        if self._rank != 0:
            return
        if self._written:
            last = min(self._taken, self._last)
            steps = f"step {last}" if last == self._first else f"steps {self._first} to {last}"
            print(f"Profile of {steps} since the start: {self._folder}/rank-*.json.gz", flush=True)
        else:
            print(f"No profile: the run ended before step {self._first} since its start", flush=True)

    def _write(self, profiler: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank-{self._rank}.json.gz"
        with replacing(file) as scratch:  # of the same suffix, by which the profiler gzips
            profiler.export_chrome_trace(str(scratch))
        self._written = True
