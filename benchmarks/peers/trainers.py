"""What trainings by TRL's trainers share: a clock of their steps, silence, and FSDP2 on CPUs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.accelerated import use_fsdp2

MARK = "the last step"


def clock(steps: list[tuple[float, float]]) -> Any:
    """Return a callback that adds the seconds of each step, by the wall's and the processor's clock, to ``steps``.

    They count from the end of a step to the end of the next; the first from the start of training.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *words: Any, **more: Any) -> None:
            self.last = time.perf_counter(), time.process_time()

        def on_step_end(self, *words: Any, **more: Any) -> None:
            self.last, (wall, processor) = (time.perf_counter(), time.process_time()), self.last
            steps.append((self.last[0] - wall, self.last[1] - processor))

    return Clock()


def marking() -> Any:
    """Return a callback that puts the last step under ``MARK`` in profiles."""
    import torch
    from transformers import TrainerCallback

    class Marking(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.last = torch.profiler.record_function(MARK)
            if state.global_step == args.max_steps - 1:
                self.last.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == args.max_steps:
                self.last.__exit__(None, None, None)

    return Marking()


def train_with_fsdp2(trainer: Any, *, always: bool) -> None:
    """Let a trainer shard as Accelerate does, by FSDP2, once it has made its accelerator and prepared nothing.

    ``always``: every unit is freed after forward, which is Accelerate's default; else none is.
    """
    use_fsdp2(trainer.accelerator, ram_efficient=False, always=always)
    trainer.is_fsdp_enabled = True


def is_sharded(model: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Print nothing: what a run says of itself is not the table's."""
    from datasets import disable_progress_bars
    from transformers.utils import logging

    disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        sys.stdout.flush()
        yield
