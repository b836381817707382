"""Evaluation on several sets: the same metrics, best step and early stop at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trueshard
from parity import Ranks
from test_trainer import Batches, build
from trueshard.train.evaluation import Evaluation, is_greater_better


def single_rows(rank: int, world_size: int, begin: int, end: int) -> list[Any]:
    """A rank's part of some rows of a batch, a microbatch each: of few rows some ranks have none."""
    batch = next(iter(Batches(0, 1)))
    rows = range(begin, end)
    own = rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
    return [{key: value[row : row + 1] for key, value in batch.items()} for row in own]


def trained_on_sets(rank: int, world_size: int, folder: str, best: str) -> dict[str, Any]:
    trainer: Any = None
    sets = {
        "few": single_rows(rank, world_size, 4, 5),
        "many": single_rows(rank, world_size, 3, 12),
        "own": lambda: {"steps_apart": float(-abs(trainer.step - 3))},
    }
    settings = {"steps": 9, "evaluation": sets, "evaluate_every": 1, "best": best, "patience": 2}
    greatest = is_greater_better(best)
    checkpoints = trueshard.Checkpoints(
        folder, keep_last=1, keep_best=1, metric=f"evaluation_{best}", mode="max" if greatest else "min"
    )
    trainer, recorder = build(rank, world_size, checkpoints=checkpoints, checkpoint_every=100, **settings)
    trainer.fit()
    records = [event for event in recorder.events if isinstance(event, dict)]
    found = [{key: record[key] for key in record if key.startswith("evaluation_")} for record in records]
    kept = checkpoints.best()
    return {"found": found, "best": kept and kept.name, "stopped": trainer.stopped, "step": trainer.step}


@pytest.mark.rest
@pytest.mark.parametrize(("best", "expected"), [("steps_apart", 3), ("few_loss", None)])
def test_sets_give_the_same_metrics_best_step_and_stop_at_any_number_of_ranks(
    alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path, best: str, expected: int | None
) -> None:
    (single,) = alone.run(trained_on_sets, str(tmp_path / "1"), best)
    assert {*single["found"][0]} == {
        *("evaluation_few_loss", "evaluation_few_count", "evaluation_few_perplexity", "evaluation_steps_apart"),
        *("evaluation_many_loss", "evaluation_many_count", "evaluation_many_perplexity"),
    }
    assert single["found"][0]["evaluation_few_count"] == 2
    if expected is not None:
        assert single["best"] == f"step-{expected:08d}"
        assert single["step"] == expected + 2
        assert "evaluation" in single["stopped"]
    for ranks, count in ((ranks2, 2), (ranks3, 3)):
        for several in ranks.run(trained_on_sets, str(tmp_path / str(count)), best):
            for one, other in zip(several["found"], single["found"], strict=True):
                assert one == pytest.approx(other, rel=1e-5)
            assert {**several, "found": 0} == {**single, "found": 0}


def resumed(rank: int, world_size: int, folder: str) -> list[Any]:
    value = [3.0]
    settings: dict[str, Any] = {"evaluate_every": 2, "checkpoint_every": 2, "best": "score"}
    made = []
    for steps, now, best in ((2, 3.0, "score"), (4, 1.0, "score"), (6, 1.0, "other")):
        value[0] = now
        checkpoints = trueshard.Checkpoints(folder, keep_last=2, keep_best=1, metric=f"evaluation_{best}", mode="max")
        own = {"own": lambda: {"score": value[0], "other": 0.5}}
        words = settings | {"steps": steps, "evaluation": own, "best": best, "checkpoints": checkpoints}
        trainer, _ = build(rank, world_size, **words)
        trainer.fit()
        kept = checkpoints.best()
        made.append((trainer.best, trainer.worse, kept and kept.name))
    return made


def test_a_resumed_run_knows_its_best_and_begins_anew_with_another_metric(ranks2: Ranks, tmp_path: Path) -> None:
    for found in ranks2.run(resumed, str(tmp_path)):
        assert found == [(-3.0, 0, "step-00000002"), (-3.0, 1, "step-00000002"), (-0.5, 0, "step-00000006")]


def test_what_is_better_follows_from_the_metric() -> None:
    assert Evaluation({"maths": [], "own": dict}, best="maths_f1").score({"maths_f1": 0.25}) == -0.25
    assert Evaluation({"maths": []}).score({"maths_loss": 0.25}) == 0.25
    assert Evaluation({"own": dict}, best="errors", greater=False).score({"errors": 4.0}) == 4.0
    assert Evaluation(lambda: {"reward": 1.0}).score({"reward": 1.0}) == -1.0
    with pytest.raises(ValueError, match=r"maths_f1.*maths_loss"):
        Evaluation({"maths": []}, best="maths_f1").score({"maths_loss": 0.5})
