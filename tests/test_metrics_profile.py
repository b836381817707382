"""`--profile`: a trace of the steps that were asked for, from every rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from messages import lacking
from parity import Ranks
from showing import trainer
from trueshard.train.metrics.step_metrics import Profile


def recorded(file: Path) -> list[str]:
    """The steps in a trace."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sorted({event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")})


def profiled(rank: int, ranks: int, folder: Path) -> None:
    """Five steps, of which two are recorded."""
    trainer([Profile(folder, 2, 3)], 5).fit()


def test_every_rank_leaves_a_trace_of_these_steps(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(profiled, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    for file in tmp_path.iterdir():
        assert recorded(file) == ["ProfilerStep#1", "ProfilerStep#2"]  # the profiler counts from 0
        assert "aten::addmm" in gzip.decompress(file.read_bytes()).decode()


def test_where_it_is_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer([Profile(tmp_path / "profile", 2, 2)], 3).fit()
    # The profiler itself speaks on stderr, if it was begun before in this process.
    said = capfd.readouterr().out
    assert lacking(said, "step 2", f"{tmp_path}/profile/rank-*.json.gz") == []
    assert said.count("\n") == 1


def test_a_run_that_ends_before_leaves_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer([Profile(tmp_path, 2, 9)], 3).fit()
    assert "steps 2 to 3" in capsys.readouterr().out
    assert recorded(tmp_path / "rank-0.json.gz")


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_ends_before_the_first_says_so(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer([Profile(tmp_path, 4, 5)], steps).fit()
    assert lacking(capsys.readouterr().out, "No profile", "step 4") == []
    assert not list(tmp_path.iterdir())
