"""Trackers with their own packages, offline, if they are installed (`make trackers` has all); and one missing."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import forks
from messages import lacking, naming
from running import CONFIG as RUN
from showing import Lost, trainer
from trueshard.errors import UserError
from trueshard.train.callbacks import Callback
from trueshard.train.metrics.step_metrics import Measures, MetricsWriter, read_metrics
from trueshard.train.metrics.trackers import Tracker, Tracking, trackers
from trueshard.train.parse import load_config
from trueshard.train.trainer import Trainer

CONFIG = {"train": {"steps": 6}}


class Texts(Callback):
    """Tells a text in each step."""

    def __init__(self, tracking: Tracking) -> None:
        self.tracking = tracking

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self.tracking.text(record["step"], "samples", f"**Step** {record['step']} <b>")


def interrupted_and_resumed(folder: Path, name: str) -> list[dict[str, Any]]:
    """Six steps, of which 3 and 4 are taken twice, with a text each; their records."""

    def shown() -> list[Callback]:
        tracking = Tracking(trackers([name]), CONFIG, folder, "trial")
        return [Measures(), MetricsWriter(folder), tracking, Texts(tracking)]

    first = trainer([*shown(), Lost(4)], 6, folder)
    with pytest.raises(InterruptedError):
        first.fit()
    trainer(shown(), 6, folder).fit()
    return read_metrics(folder / "metrics.jsonl")


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = interrupted_and_resumed(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in events.Scalars("loss")]
    assert points == [(record["step"], pytest.approx(record["loss"])) for record in records]
    assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6]
    assert {"grad_norm", "lr", "tokens_per_second", "memory_allocated", "data_wait"} <= set(events.Tags()["scalars"])


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from showing import Lost, trainer
from trueshard.train.metrics.step_metrics import Measures
from trueshard.train.metrics.trackers import Tracking, trackers

class Kills:
    def __getattr__(self, event):
        is_fifth = lambda value: isinstance(value, dict) and value["step"] == 5
        return lambda trainer, value=None: is_fifth(value) and os.kill(os.getpid(), signal.SIGKILL)

tracking = Tracking(trackers(["tensorboard"]), {}, Path(sys.argv[2]), "trial")
trainer([Measures(), tracking, Kills()], 9).fit()
"""


def test_a_killed_process_loses_no_step_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    here = str(Path(__file__).parent)
    done = forks.run([sys.executable, "-c", KILLED, here, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -9
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3, 4, 5]


def messages_of(file: Path) -> Iterator[bytes]:
    """The messages of a `.wandb` file: a header of 7 bytes, and the log format of LevelDB (blocks of 32 KiB)."""
    data, at, message = file.read_bytes(), 7, b""
    while at < len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # no room for a head: the rest of the block is empty
            at += (1 << 15) - at % (1 << 15)
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield message
            message = b""


def test_wandb_offline_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    records = interrupted_and_resumed(tmp_path, "wandb")
    losses, texts = {}, set()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    for file in files:
        for message in messages_of(file):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(message)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in entry.history.item}
            if "loss" in row:
                losses[entry.history.step.num] = row["loss"]
            if "samples" in row:
                texts.add(entry.history.step.num)
    assert losses == {record["step"]: pytest.approx(record["loss"]) for record in records}
    assert texts == set(losses)
    assert len({file.stem for file in files}) == 1, "both parts are of one run"


def test_trackio_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    # trackio takes its folder from the environment when it is imported
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import json; from pathlib import Path; from test_metrics_trackers import interrupted_and_resumed\n"
        "records = interrupted_and_resumed(Path(sys.argv[2]), 'trackio')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "runs = SQLiteStorage.get_runs('trial')\n"
        "rows = [row for run in runs for row in SQLiteStorage.get_logs('trial', run)]\n"
        "logs = sorted((row['step'], row['loss']) for row in rows if 'loss' in row)\n"
        "texts = sorted(row['step'] for row in rows if 'samples' in row)\n"
        "print(json.dumps([runs, logs, [(row['step'], row['loss']) for row in records], texts]))\n"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path / "run")]
    done = forks.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    runs, logged, taken, texts = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert len(runs) == 1
    assert [step for step, _ in logged] == texts == [1, 2, 3, 4, 5, 6]
    assert logged == [[step, pytest.approx(loss)] for step, loss in taken]


def test_mlflow_has_each_step_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    records = interrupted_and_resumed(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]
    assert points == [(record["step"], pytest.approx(record["loss"])) for record in records]
    assert run.info.status == "FINISHED"
    files = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/config.json")
    assert files == CONFIG
    assert len(client.list_artifacts(run.info.run_id, "samples")) == len(records)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=naming("log.to", f"'{name}'", "not installed")):
        trackers([name])


def test_an_unknown_tracker_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(RUN)
    with pytest.raises(UserError, match=naming("log.to", '"tensorbord"', "'tensorboard'")):
        load_config(tmp_path / "train.toml", ["log.to=['tensorbord']"])


class Kept:
    """A tracker that keeps what it is told, and fails at a step."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.told, self.finished = fails, list[int](), False

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        self.began = config, folder, project, step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails:
            raise ConnectionError("nobody\nthere")
        self.told.append(step)
        self.values = values

    def finish(self) -> None:
        self.finished = True


def test_anything_of_the_protocol_s_shape_is_a_tracker(tmp_path: Path) -> None:
    kept: Tracker = Kept()
    trainer([Measures(), Tracking([kept], CONFIG, tmp_path, "trial")], 3).fit()
    assert isinstance(kept, Kept)
    assert kept.began == (CONFIG, tmp_path, "trial", 0)
    assert kept.told == [1, 2, 3]
    assert kept.finished
    assert "step" not in kept.values


def test_a_tracker_that_fails_is_left_out_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = Kept(fails=2), Kept()
    assert trainer([Measures(), Tracking([bad, good], CONFIG, tmp_path, "trial")], 4).fit()
    assert (bad.told, good.told) == ([1], [1, 2, 3, 4])
    (line,) = capsys.readouterr().out.splitlines()
    assert lacking(line, "Kept", "step 2", "nobody there", "metrics.jsonl") == []
