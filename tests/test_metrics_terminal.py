"""What is said and left at the end of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from messages import lacking
from showing import assert_drawn, record, rewarded
from trueshard.train.metrics.curves import COLOURS, draw_result
from trueshard.train.metrics.terminal import file_list, final_line, final_mean


def test_the_final_mean_is_the_mean_of_the_last_steps() -> None:
    records = [record(step, loss=float(step)) for step in range(1, 41)]
    assert final_mean(records) == (30.5, 20)
    assert final_mean(records[:3]) == (2.0, 3)


def test_a_loss_that_was_not_finite_does_not_count() -> None:
    assert final_mean([record(1, loss=1.0), record(2, loss=math.nan), record(3, loss=3.0)]) == (2.0, 3)


def test_the_final_line_says_loss_evaluation_and_entropy() -> None:
    records = [record(1, loss=2.0, evaluation_loss=1.5, evaluation_perplexity=4.48), record(2, loss=2.0)]
    assert lacking(final_line(records[1:]), "Loss 2.000") == []
    assert lacking(final_line(records, 5.6), "Loss 2.000", "last 2 steps", "1.500", "4.48", "entropy", "5.600") == []


def test_the_final_line_of_a_run_with_a_reward_says_it_first_and_last() -> None:
    records = [rewarded(step) for step in range(1, 61)]
    first, last = (sum(step["reward"] for step in part) / 20 for part in (records[:20], records[-20:]))
    said = final_line(records)
    assert lacking(said, f"Reward {last:.3f}", "last 20 steps", f"{first:.3f} in the first") == []
    assert lacking(said, f"{records[9]['evaluation_reward']:.3f} at step 10", "at step 60") == []
    assert lacking(said, "Loss", "nats", "before", "step 20") == ["Loss", "nats", "before", "step 20"]
    before = final_line([{"step": 0, "evaluation_reward": 0.125}, *records])
    assert lacking(before, "0.125 before training", "at step 10", "at step 60") == []
    assert lacking(final_line(records[:1]), "Reward") == []
    assert "first" not in final_line(records[:1])


def test_the_picture_shows_loss_evaluation_and_entropy(tmp_path: Path) -> None:
    records = [record(step, **({"evaluation_loss": 3.0} if step % 5 == 0 else {})) for step in range(1, 30)]
    (one := tmp_path / "one").mkdir()
    draw_result(records, 5.6, tmp_path)
    draw_result([record(1)], None, one)
    assert [file.name for file in one.iterdir()] == ["loss.png"]
    assert_drawn(tmp_path / "loss.png", 50, *COLOURS[:2], "#808080")


@pytest.mark.rest
def test_the_picture_of_a_run_with_a_reward_shows_it(tmp_path: Path) -> None:
    file = draw_result([rewarded(step) for step in range(1, 41)], 5.6, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file.name] == ["reward.png"]
    assert_drawn(file, 50, *COLOURS[:2])


def test_files_are_listed_with_what_they_are(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "loss.png"):
        (tmp_path / name).touch()
    (tmp_path / "profile").mkdir()
    saved = tmp_path / "checkpoints" / "step-00000003"
    saved.mkdir(parents=True)
    lines = file_list(tmp_path, [saved]).splitlines()
    assert [line.split()[0].removeprefix(f"{tmp_path}/") for line in lines] == [
        "metrics.jsonl",
        "loss.png",
        "profile/",
        "checkpoints/step-00000003/",
    ]
    assert "trace" in lines[2]
