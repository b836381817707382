"""Where metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, or anything in the same shape.

- A tracker is three methods. Each package is imported when its tracker starts, and looked for when it is made.
- A resumed run goes on in the same curves, and each step is in them once.
- A tracker that fails while training goes on is left out from then on, and says so: the file has the figures.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trueshard.errors import UserError, one_line
from trueshard.names import nearest
from trueshard.replacing import replace_text
from trueshard.train.events import Callback

if TYPE_CHECKING:
    from trueshard.train.trainer import Trainer


class Tracker(Protocol):
    """What shows metrics elsewhere; all of it is called on rank 0 alone."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        """Begin, or go on.

        Args:
            config: the run's configuration, JSON values.
            folder: the run's, the same when it is resumed.
            project: a name for several runs.
            step: the last that was taken; what an earlier start was told of later ones will be told again.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a step."""

    def finish(self) -> None:
        """No more come."""


class TensorBoard:
    """Writes to `tensorboard/` in the run's folder, and each step to the operating system before the next begins."""

    def __init__(self) -> None:
        need("tensorboard")

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        # Readers leave out the points from purge_step on that earlier files have.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # One event for all figures: add_scalar() for each takes twenty times as long.
        points = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._writer.file_writer.add_summary(self._summary(value=points), step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. Its environment variables count: WANDB_MODE=offline keeps everything in `wandb/` of the run."""

    def __init__(self) -> None:
        need("wandb")

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=folder.resolve().name,
                id=run_id(folder),
                dir=str(folder),
                config=dict(config),
                resume="allow",
            )
        except wandb.Error as error:
            raise UserError(
                f"log.to: wandb does not start: {one_line(error)}; log in with `wandb login`, set WANDB_MODE=offline, "
                "or leave it out"
            ) from error
        self._known = self._run.step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._known:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    """trackio, on this machine or where its environment variables say."""

    def __init__(self) -> None:
        need("trackio")

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{folder.resolve().name}-{run_id(folder)}"
        known = SQLiteStorage.get_max_step_for_run(project, name)
        self._known = -1 if known is None else known
        self._run = trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._known:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[WandB] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def trackers(names: Iterable[str]) -> list[Tracker]:
    """The trackers of `log.to`.

    Raises:
        UserError: an unknown name, or a package that is not installed.
    """
    found: list[Tracker] = []
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"log.to: {name!r} is no tracker.{nearest(name, TRACKERS)} Known: {', '.join(TRACKERS)}")
        found.append(TRACKERS[name]())
    return found


def need(package: str) -> None:
    """Raise `UserError` if a tracker's package is not installed."""
    if sys.modules.get(package, ...) is None or importlib.util.find_spec(package) is None:
        raise UserError(f'log.to: the package {package!r} is not installed; install it, or leave "{package}" out')


def run_id(folder: Path) -> str:
    """What the run in `folder` is called for trackers: made once, and kept there in `tracking-id`."""
    file = folder / "tracking-id"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, uuid.uuid4().hex[:8] + "\n")
    return file.read_text(encoding="utf-8").strip()


class Tracking(Callback):
    """Tells trackers of each step, on rank 0. To be given after the callbacks that add to the record.

    Args:
        trackers: started when training is.
        config: of the run, JSON values.
        folder: of the run.
        project: a name for several runs.
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
