"""Under Ray Train a sharded loop resumes at another number of workers, and goes on after one is lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from added_environment import python_of
from running import environment

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("ray_training.py")
pytestmark = [pytest.mark.rest, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one session of Ray gave: for each run, step → [loss, norm, workers], and the last checkpoint's name."""
    folder = tmp_path_factory.mktemp("ray")
    paths = f"{ROOT}/src:{ROOT}/examples"
    variables = environment(PYTHONPATH=paths, OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    process = subprocess.run(
        [python_of("ray"), str(PROGRAM), str(folder)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert (process.returncode, len(lines)) == (0, 1), process.stdout[-4000:] + process.stderr[-4000:]
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


def assert_same(steps: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert sorted(map(int, steps)) == list(range(12))
    for step, (loss, norm, _) in steps.items():
        assert [loss, norm] == pytest.approx(expected[step][:2], rel=1e-4)


def test_a_run_resumes_at_another_number_of_workers(said: dict[str, Any]) -> None:
    steps = said["resumed"]["steps"]
    assert_same(steps, said["undisturbed"]["steps"])
    assert [steps[str(step)][2] for step in range(12)] == [2] * 5 + [3] * 7
    assert said["resumed"]["checkpoint"] == "step-00000010"


def test_a_run_goes_on_when_a_worker_was_killed(said: dict[str, Any]) -> None:
    assert_same(said["killed"]["steps"], said["undisturbed"]["steps"])
    assert said["killed"]["starts"] == [0, 5]
