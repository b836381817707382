"""`metrics.jsonl` and what is measured: gapless after a resume, plain JSON, the fullest rank's memory, rates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from messages import naming
from parity import Ranks
from showing import Lost, record, trainer, write_run
from trueshard.errors import UserError
from trueshard.train.callbacks import Callback
from trueshard.train.metrics.step_metrics import Measures, MetricsWriter, read_metrics
from trueshard.train.trainer import Trainer


class Changed(Callback):
    """Puts values into the record of one step."""

    def __init__(self, step: int, **values: Any) -> None:
        self.step, self.values = step, values

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if record["step"] == self.step:
            record.update(self.values)


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl")]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):  # steps 3 and 4 have their lines, and no checkpoint
        trainer([MetricsWriter(tmp_path), Lost(4)], 6, tmp_path).fit()
    assert steps(tmp_path) == [1, 2, 3, 4]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    resumed = trainer([MetricsWriter(tmp_path)], 6, tmp_path)
    assert resumed.fit()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [line["batches"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["metrics.jsonl"]


def test_each_line_can_be_read_before_the_next_step(tmp_path: Path) -> None:
    seen = []

    class Reader(Callback):
        def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
            seen.append(steps(tmp_path))

    trainer([MetricsWriter(tmp_path), Reader()], 3).fit()
    assert seen == [[1], [1, 2], [1, 2, 3]]


def test_what_is_not_finite_is_null_and_comes_back_as_nan(tmp_path: Path) -> None:
    trainer([Changed(2, loss=math.inf, grad_norm=math.nan), MetricsWriter(tmp_path)], 2).fit()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1], parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[1]["grad_norm"])


def test_an_evaluation_before_training_is_step_0(tmp_path: Path) -> None:
    class First(Callback):
        def on_start(self, trainer: Trainer) -> None:
            if not trainer.step:
                trainer.evaluate()

    def fit(steps: int) -> None:
        held_out = [(torch.randn(4, 8), torch.randn(4, 1))]
        trainer([MetricsWriter(tmp_path), First()], steps, tmp_path, evaluation=held_out).fit()

    fit(2)
    fit(4)
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    assert read_metrics(tmp_path / "metrics.jsonl")[0].keys() == {"step", "evaluation_loss", "evaluation_count"}


@pytest.mark.parametrize("damage", ['{"step": 2, "lo', "[1, 2]", '{"loss": 1.0}', "\x00\x00"])
def test_a_damaged_line_is_passed_over_only_where_it_is_the_last(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(record(1)) + "\n" + damage)
    assert [line["step"] for line in read_metrics(file)] == [1]
    file.write_text(json.dumps(record(1)) + "\n" + damage + "\n" + json.dumps(record(3)) + "\n")
    with pytest.raises(UserError, match=naming("metrics.jsonl", "line 2", "delete")):
        read_metrics(file)


def test_a_damaged_file_is_left_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record(1)])
    damaged = "no JSON\n" + (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(damaged)
    with pytest.raises(UserError, match="line 1"):
        trainer([MetricsWriter(folder)], 1).fit()
    assert (folder / "metrics.jsonl").read_text() == damaged


def test_rates_are_those_of_the_step(tmp_path: Path) -> None:
    measures = Measures(flops_per_token=6e6, peak_flops=1e12, memory_planned=5 << 30)
    trainer([Changed(2, seconds=0.5, step_tokens=1000), measures, MetricsWriter(tmp_path)], 2).fit()
    step = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert step["tokens_per_second"] == step["tokens_per_second_per_rank"] == 2000
    assert step["mfu"] == pytest.approx(2000 * 6e6 / 1e12)
    assert step["memory_planned"] == 5 << 30


def test_what_is_not_known_is_absent(tmp_path: Path) -> None:
    trainer([Measures(flops_per_token=6e6), MetricsWriter(tmp_path)], 1).fit()
    step = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert not {"mfu", "memory_planned", "memory_reserved"} & step.keys()
    assert step["tokens_per_second"] == pytest.approx(step["step_tokens"] / step["seconds"])


def test_memory_on_a_cpu_is_what_the_process_has_resident(tmp_path: Path) -> None:
    trainer([Measures(), MetricsWriter(tmp_path)], 1).fit()
    memory = read_metrics(tmp_path / "metrics.jsonl")[0]["memory_allocated"]
    assert memory == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def measured(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """One step on each rank, of which the last has a gigabyte and waits longest; its record."""
    kept = torch.ones((1 << 28) if rank == ranks - 1 else 1)
    waited = Changed(1, data_wait=1.0 + rank)
    records: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
            records.append(dict(record))

    trainer([waited, Measures(), Keep(), MetricsWriter(folder / str(rank))], 1).fit()
    return records[0] | {"kept": kept.numel(), "own": psutil.Process().memory_info().rss}


@pytest.mark.rest
def test_memory_and_waiting_are_those_of_the_rank_that_has_most(ranks2: Ranks, tmp_path: Path) -> None:
    first, second = ranks2.run(measured, tmp_path)
    assert first["memory_allocated"] == second["memory_allocated"] > first["own"] + (1 << 29)
    assert first["data_wait"] == second["data_wait"] == 2.0
    assert first["tokens_per_second_per_rank"] == pytest.approx(first["tokens_per_second"] / 2)
    assert [folder.name for folder in tmp_path.iterdir()] == ["0"]
