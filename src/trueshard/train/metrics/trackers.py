"""Trackers beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, MLflow, `logging`, or a package's own class.

A resumed run continues its curves, with each step once. A tracker that fails during training is dropped with a message.
"""

from __future__ import annotations

import html
import importlib.util
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trueshard.errors import UserError, explained, one_line
from trueshard.files import replace_text
from trueshard.train import plugins
from trueshard.train.callbacks import Callback
from trueshard.train.metrics.step_metrics import before_training
from trueshard.train.trainer import Trainer


class Tracker(Protocol):
    """Shows metrics elsewhere; called on rank 0 only.

    One that shows texts too has a method ``text(step, tag, markdown)``.
    """

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        """Begin a run or, in the same folder, continue it after ``step``; later steps are logged again."""

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

    def text(self, step: int, tag: str, markdown: str) -> None:
        self._writer.add_text(tag, markdown, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. Its environment variables apply: WANDB_MODE=offline keeps everything in `wandb/` of the run."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import wandb

        remedy = "log in with `wandb login`, set WANDB_MODE=offline, or leave it out"
        with explained("log.to: wandb does not start", remedy, wandb.Error, one_line):
            self._run: Any = wandb.init(
                project=project,
                name=folder.resolve().name,
                id=_run_id(folder),
                dir=str(folder),
                config=dict(config),
                resume="allow",
            )
        self._next = self._run.step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step >= self._next:  # the first one that the run does not have
            self._run.log(dict(values), step=step)

    def text(self, step: int, tag: str, markdown: str) -> None:
        self.log(step, {tag: self._page(markdown)})

    def _page(self, markdown: str) -> Any:
        import wandb

        return wandb.Html(f"<pre>{html.escape(markdown)}</pre>", data_is_not_path=True)

    def finish(self) -> None:
        self._run.finish()


class Trackio(WandB):
    """trackio, on this machine or where its environment variables say."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{folder.resolve().name}-{_run_id(folder)}"
        last = SQLiteStorage.get_max_step_for_run(project, name)
        self._next = 0 if last is None else last + 1
        self._run = trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False)

    def _page(self, markdown: str) -> Any:
        import trackio

        return trackio.Markdown(markdown)


class MLflow:
    """MLflow: where MLFLOW_TRACKING_URI says, else in `mlflow.db` of the run's folder, with files in `mlflow/`."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._metric, place, name = Metric, folder.resolve(), _run_id(folder)
        address = os.environ.get("MLFLOW_TRACKING_URI")
        files = None if address else (place / "mlflow").as_uri()
        remedy = "set MLFLOW_TRACKING_URI to a server or database, or leave it out"
        with explained("log.to: mlflow does not start", remedy, mlflow.MlflowException, one_line):
            self._client: Any = mlflow.MlflowClient(address or f"sqlite:///{place / 'mlflow.db'}")
            known = self._client.get_experiment_by_name(project)
            experiment = known.experiment_id if known else self._client.create_experiment(project, files)
            runs = self._client.search_runs([experiment], f"tags.trueshard = '{name}'")
            run = runs[0] if runs else self._client.create_run(experiment, None, {"trueshard": name}, place.name)
            self._run = run.info.run_id
            self._client.update_run(self._run, "RUNNING")
            self._client.log_dict(self._run, dict(config), "config.json")
        self._next = run.data.metrics.get("step", -1) + 1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._next:  # the first one that the run does not have
            now, named = time.time_ns() // 10**6, {**values, "step": step}
            self._client.log_batch(self._run, [self._metric(key, float(x), now, step) for key, x in named.items()])

    def text(self, step: int, tag: str, markdown: str) -> None:
        self._client.log_text(self._run, markdown, f"{tag}/{step}.md")

    def finish(self) -> None:
        self._client.set_terminated(self._run)


class Logging:
    """Passes metrics to the handlers of Python's logger `trueshard.metrics`, at INFO: as a line, and as `metrics`."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        self._logger = logging.getLogger("trueshard.metrics")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shown = " ".join(f"{key}={value:.6g}" for key, value in values.items())
        self._logger.info("step %d %s", step, shown, extra={"step": step, "metrics": dict(values)})

    def finish(self) -> None:
        pass


PACKAGES = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio, "mlflow": MLflow, "logging": Logging}
"""Name in `log.to`, which is also the package → tracker."""
TRACKERS: dict[str, type[Tracker]] = plugins.Table("log.to", PACKAGES)


def trackers(names: Sequence[str]) -> list[Tracker]:
    """Return the trackers of `log.to`. Raises `UserError` for a package that is not installed."""
    for name in names:
        if name in PACKAGES and (sys.modules.get(name, ...) is None or importlib.util.find_spec(name) is None):
            raise UserError(f'log.to: the package {name!r} is not installed; install it, or leave "{name}" out')
    return [TRACKERS[name]() for name in names]


def _run_id(folder: Path) -> str:
    """Return the id of the run for trackers, made once and kept in its folder as `tracking-id`."""
    file = folder / "tracking-id"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, uuid.uuid4().hex[:8] + "\n")
    return file.read_text(encoding="utf-8").strip()


class Tracking(Callback):
    """Passes each step to trackers, on rank 0; to be given after the callbacks that add to the record."""

    def __init__(self, trackers: Sequence[Tracker], config: Mapping[str, Any], folder: Path, project: str) -> None:
        self._trackers = list(trackers)  # without those that failed; none on other ranks
        self._config, self._folder, self._project = config, folder, project

    def on_start(self, trainer: Trainer) -> None:
        if trainer.rank != 0:
            self._trackers = []
        for tracker in self._trackers:
            tracker.start(self._config, self._folder, self._project, trainer.step)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, (int, float))}
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        self._call(f"at step {record['step']}", "log", record["step"], finite)

    def on_evaluation(self, trainer: Trainer, record: dict[str, float]) -> None:
        if (first := before_training(trainer, record)) is not None:
            self.on_step(trainer, first)

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Pass a text to the trackers that show texts."""
        self._call(f"at step {step}", "text", step, tag, markdown)

    def on_end(self, trainer: Trainer) -> None:
        self._call("at the end", "finish")

    def _call(self, when: str, method: str, *arguments: Any) -> None:
        """Call a method of each tracker that has it; drop a tracker that fails."""
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method, lambda *_: None)(*arguments)
            except Exception as error:
                self._trackers.remove(tracker)
                name, reason = type(tracker).__name__, one_line(error)
                print(f"{name} failed {when} ({reason}) and is left out; metrics.jsonl is complete", flush=True)
