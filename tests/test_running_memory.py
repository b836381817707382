"""Memory that really runs out: what is said of it, and what is done."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from running import end, metrics, project, run, start
from trueshard.train.running import memory

WIDE = ("train.batch_size=256", "train.sequence_length=256", "train.steps=2", "model.fields.hidden_size=64")
"""Some 260 MiB of activations on each of two ranks; with train.accumulate = 2 half of it."""
LIMIT = 640 << 20
"""Bytes of data that a process may have: of which some 360 MiB are libraries."""
OPTIONS = ("--nproc", "2", *(f"--set={each}" for each in WIDE))
PREFIX = ("prlimit", f"--data={LIMIT}")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A project whose run has run out of memory, and what was said."""
    folder = project(tmp_path_factory.mktemp("memory") / "stopped")
    code, out, err = end(start(folder, *OPTIONS, prefix=PREFIX))
    assert code == 1, out + err
    return folder, err


@pytest.mark.timeout(180)
def test_one_line_says_what_was_planned_and_used_and_what_fits(stopped: tuple[Path, str]) -> None:
    _, err = stopped
    assert len(err.splitlines()) == 1, err
    assert re.search(
        r"trueshard: rank [01] ran out of memory: [\d.]+ MiB of [\d.]+ MiB were used when [\d.]+ MiB more was asked "
        r"for; the plan needs [\d.]+ MiB a rank; train.accumulate = [24] \(planned: [\d.]+ MiB a rank\) would fit: "
        r'set it, or train.on_oom = "tighten" to have it done',
        err,
    ), err


@pytest.mark.timeout(180)
def test_tighten_goes_on_and_the_result_stays(stopped: tuple[Path, str], tmp_path: Path) -> None:
    folder = stopped[0]
    code, out, err = end(start(folder, *OPTIONS, "--set", "train.on_oom=tighten", prefix=PREFIX))
    assert code == 0, out + err
    assert "going on with train.accumulate = " in err
    kept = json.loads((folder / "run" / "config.json").read_text())
    words = kept["tightened"]["words"]
    assert kept["tightened"]["ranks"] == 2
    assert kept["config"]["train"]["accumulate"] == words["train.accumulate"] > 1
    assert not memory.is_left(folder / "run")

    free = project(tmp_path / "free")
    run(free, *OPTIONS)
    for found, expected in zip(metrics(folder), metrics(free), strict=True):
        assert found["tokens"] == expected["tokens"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_first_record_counts_and_is_taken_once(tmp_path: Path) -> None:
    first, second = (memory.Shortage(rank, 1, 2, 3) for rank in (1, 0))
    assert memory.leave(tmp_path, first)
    assert not memory.leave(tmp_path, second)
    assert memory.take(tmp_path) == first
    assert memory.take(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


ALLOCATE = """
import resource, torch
from trueshard.train.running import memory
meter = memory.Meter(torch.device("cpu"), 1)
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
try:
    torch.zeros(1 << 30)
except Exception as error:
    print(memory.is_out_of_memory(error), meter.shortage(0, error).asked)
"""


def test_allocator_that_has_no_more_is_recognised() -> None:
    done = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(4 << 30)]


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has …"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_only_allocators_run_out_of_memory(error: Exception, known: bool) -> None:
    assert memory.is_out_of_memory(error) is known


def test_limit_of_a_process_counts_on_the_cpu() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, before[1]))
    try:
        assert memory.limit_of(torch.device("cpu"), 1) <= 8 << 30
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
