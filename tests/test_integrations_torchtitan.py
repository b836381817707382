"""Models of TorchTitan under our ``parallelize_fn``, with its losses, clipping and optimizers, train as on one process.

Its trainer asks for a GPU where it is made, so ``torchtitan_training.py`` takes its steps.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optimizer_catalogue import APART

PROGRAM = Path(__file__).with_name("torchtitan_training.py")
pytestmark = pytest.mark.rest


def run(ranks: int, **case: Any) -> dict[str, Any]:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    paths = [str(APART), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [*torchrun, str(PROGRAM), json.dumps(case)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert (process.returncode, len(lines)) == (0, 1), process.stdout + process.stderr[-4000:]
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


@functools.cache
def alone(**case: Any) -> dict[str, Any]:
    return run(1, **case)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "3 ranks": (3, {}),
    "2 copies, loss in chunks, recomputed": (2, {"copies": 2, "chunks": 4, "recompute": "full"}),
    "experts, loss in chunks": (2, {"model": "deepseek_v3", "chunks": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(name: str) -> None:
    ranks, case = CASES[name]
    result, expected = run(ranks, **case), alone(model=case.get("model", "llama3"))
    assert result["losses"] == pytest.approx(expected["losses"], rel=2e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=3e-4)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-4)


def test_its_checkpoints_go_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    run(2, steps=(0, 2), save=str(tmp_path / "checkpoint"))
    result = run(3, steps=(2, 4), load=str(tmp_path / "checkpoint"))
    assert result["losses"] == pytest.approx(alone(model="llama3")["losses"][2:], rel=2e-5)


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ({"tensor": 2}, "parallelism.tensor_parallel_degree = 2: "),
        ({"backend": "spmd_types"}, "parallelism.spmd_backend = 'spmd_types' "),
    ],
)
def test_what_would_be_wrong_is_refused_by_its_key(case: dict[str, Any], key: str) -> None:
    assert run(2, **case)["refused"].startswith(key)
