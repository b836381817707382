"""Trackers of metrics beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, or any class of the same shape.

- A tracker is three methods. Its package is looked for when it is made, and imported when it starts.
- A resumed run continues its curves, with each step once.
- A tracker that fails during training is dropped with a message: the file has the metrics.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trueshard.errors import UserError, one_line
from trueshard.files import replace_text
from trueshard.text import nearest
from trueshard.train.trainer import Callback, Trainer


class Tracker(Protocol):
    """Shows metrics elsewhere; called on rank 0 only."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        """Begin or continue a run.

        Args:
            config: of the run, JSON values.
            folder: of the run, the same after a resume.
            project: name for several runs.
            step: last step taken; later ones that an earlier start was told of will be told again.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a step."""

    def finish(self) -> None:
        """End the run."""


class TensorBoard:
    """Writes to `tensorboard/` in the run's folder, and flushes each step."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        # Readers leave out points of earlier files from purge_step on.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # One event for all values: an add_scalar() for each takes twenty times as long.
        points = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._writer.file_writer.add_summary(self._summary(value=points), step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _RunTracker:
    """Logs to a run of wandb or of trackio, from the first step that it does not have."""

    _run: Any
    _next: int

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._next:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class WandB(_RunTracker):
    """Weights & Biases. Its environment variables apply: WANDB_MODE=offline keeps everything in `wandb/` of the run."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=folder.resolve().name,
                id=_run_id(folder),
                dir=str(folder),
                config=dict(config),
                resume="allow",
            )
        except wandb.Error as error:
            raise UserError(
                f"log.to: wandb does not start: {one_line(error)}; log in with `wandb login`, set WANDB_MODE=offline, "
                "or leave it out"
            ) from error
        self._next = self._run.step


class Trackio(_RunTracker):
    """trackio, on this machine or where its environment variables say."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{folder.resolve().name}-{_run_id(folder)}"
        known = SQLiteStorage.get_max_step_for_run(project, name)
        self._next = 0 if known is None else known + 1
        self._run = trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False)


TRACKERS: dict[str, type[TensorBoard] | type[WandB] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}
"""Name in `log.to`, which is also the package → tracker."""


def trackers(names: Iterable[str]) -> list[Tracker]:
    """Return the trackers of `log.to`.

    Raises:
        UserError: an unknown name, or a package that is not installed.
    """
    found: list[Tracker] = []
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"log.to: {name!r} is no tracker.{nearest(name, TRACKERS)} Known: {', '.join(TRACKERS)}")
        if sys.modules.get(name, ...) is None or importlib.util.find_spec(name) is None:
            raise UserError(f'log.to: the package {name!r} is not installed; install it, or leave "{name}" out')
        found.append(TRACKERS[name]())
    return found


def _run_id(folder: Path) -> str:
    """Return the id of the run for trackers, made once and kept in its folder as `tracking-id`."""
    file = folder / "tracking-id"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, uuid.uuid4().hex[:8] + "\n")
    return file.read_text(encoding="utf-8").strip()


class Tracking(Callback):
    """Passes each step to trackers, on rank 0; to be given after the callbacks that add to the record.

    Args:
        trackers: started with the training.
        config: of the run, JSON values.
        folder: of the run.
        project: name for several runs.
    """

    def __init__(self, trackers: Sequence[Tracker], config: Mapping[str, Any], folder: Path, project: str) -> None:
        self._trackers, self._config, self._folder, self._project = list(trackers), config, folder, project

    def on_start(self, trainer: Trainer) -> None:
        if trainer.rank != 0:
            self._trackers = []
        for each in self._trackers:
            each.start(self._config, self._folder, self._project, trainer.step)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, (int, float))}
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        for each in list(self._trackers):
            try:
                each.log(record["step"], finite)
            except Exception as error:
                self._trackers.remove(each)
                print(
                    f"{type(each).__name__} failed at step {record['step']} ({one_line(error)}) and is told no more; "
                    "metrics.jsonl goes on",
                    flush=True,
                )

    def on_end(self, trainer: Trainer) -> None:
        for each in self._trackers:
            try:
                each.finish()
            except Exception as error:
                print(
                    f"{type(each).__name__} failed at the end ({one_line(error)}); metrics.jsonl is whole", flush=True
                )
