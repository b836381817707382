"""Memory that really runs out: what is said of it, and what is done."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import forks
from messages import lacking
from running import end, metrics, project, run, start
from trueshard.machine import memory_of_process
from trueshard.train.config import Config
from trueshard.train.parse import load_config
from trueshard.train.run import out_of_memory
from trueshard.train.run.checks import check_settings
from trueshard.train.run.resuming import tightened, with_settings

WIDE = ("train.batch_size=256", "train.sequence_length=256", "train.steps=2", "model.fields.hidden_size=64")
"""Some 260 MiB of activations on each of two ranks; with train.accumulate = 2 half of it."""
ROOM = 300 << 20
"""Bytes of data that a process may have beside those of the libraries; a rank needs some 50 MiB before its model."""
OPTIONS = ("--nproc", "2", *(f"--set={each}" for each in WIDE))
LIMITED = f"""
import ctypes, resource, runpy
import psutil
assert ctypes.CDLL(None).mallopt(-3, {1 << 20})
limit = psutil.Process().memory_info().data + {ROOM}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
runpy.run_module("trueshard", run_name="__main__", alter_sys=True)
"""
"""A run whose processes may have little more data than the libraries. What they free is given back at once
(M_MMAP_THRESHOLD), so that what a rank takes is what it was planned to take."""


@pytest.mark.timeout(180)
@pytest.mark.rest
def test_tighten_goes_on_and_the_result_stays(tmp_path: Path) -> None:
    folder = project(tmp_path / "tight")
    process = start(folder, *OPTIONS, "--set", "train.on_oom=tighten", python=("-c", LIMITED), CUDA_VISIBLE_DEVICES="")
    code, out, err = end(process)
    assert code == 0, out + err
    for line in err.splitlines():
        assert re.search(r"^trueshard: rank [01] .*train\.accumulate = [24]\b", line), err
        assert len(re.findall(r"[\d.]+ MiB", line)) == 5, err  # used, of, asked for, planned before and now
    kept = json.loads((folder / "run" / "config.json").read_text())
    words = kept["tightened"]["words"]
    assert kept["tightened"]["ranks"] == 2
    assert kept["config"]["train"]["accumulate"] == words["train.accumulate"] > 1
    assert out_of_memory.read(folder / "run") is None

    free = project(tmp_path / "free")
    run(free, *OPTIONS)
    for found, expected in zip(metrics(folder), metrics(free), strict=True):
        assert found["tokens"] == expected["tokens"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """That of a run whose rank 1 has left a record: 230 of 250 MiB were used."""
    folder = project(tmp_path / "project")
    monkeypatch.chdir(folder)
    (folder / "run").mkdir()
    out_of_memory.leave(folder / "run", out_of_memory.Shortage(1, 230 << 20, 8 << 20, 250 << 20))
    return load_config(Path("train.toml"), WIDE)


def remedy_for(config: Config) -> out_of_memory.Remedy:
    found = out_of_memory.find_remedy(config, check_settings(config, 2), 2, 2, torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.rest
def test_one_line_says_what_was_planned_and_used_and_what_fits(config: Config) -> None:
    remedy = remedy_for(config)
    assert remedy.settings is None
    parts = ("rank 1", "230.0 MiB", "250.0 MiB", "8.0 MiB", "train.accumulate = 2", 'train.on_oom = "tighten"')
    assert lacking(remedy.message, *parts) == []
    before, now = (float(each) for each in re.findall(r"([\d.]+) MiB", remedy.message)[3:])
    assert 200 < before < 300
    assert 100 < now < 200
    assert out_of_memory.find_remedy(config, None, 2, 2, torch.device("cpu")) is None


@pytest.mark.rest
def test_nothing_that_fits_is_said(config: Config) -> None:
    out_of_memory.clear(Path("run"))
    out_of_memory.leave(Path("run"), out_of_memory.Shortage(0, 1 << 20, 0, 1 << 20))
    small = {"train.batch_size": 4, "model.fields": {**config.model.fields, "num_hidden_layers": 1}}
    remedy = remedy_for(with_settings(config, {"train.on_oom": "tighten", **small}))
    assert remedy.settings is None
    assert lacking(remedy.message, "1.0 MiB of 1.0 MiB", "more ranks") == []
    assert "train.accumulate" not in remedy.message


def test_what_cannot_be_planned_is_tightened_blindly_for_the_same_number_of_ranks(config: Config) -> None:
    config = with_settings(config, {"train.on_oom": "tighten", "shard.units": "NoSuchBlock"})
    remedy = remedy_for(config)
    assert remedy.settings == {"train.accumulate": 2}
    assert lacking(remedy.message, "planned", "NoSuchBlock", "train.accumulate = 2") == []
    assert tightened(config, 2).train.accumulate == 2
    assert tightened(config, 4).train.accumulate == 1
    assert tightened(with_settings(config, {"train.on_oom": "stop"}), 2).train.accumulate == 1


def test_first_record_counts_until_it_is_taken_away(tmp_path: Path) -> None:
    first, second = (out_of_memory.Shortage(rank, 1, 2, 3) for rank in (1, 0))
    assert out_of_memory.leave(tmp_path, first)
    assert not out_of_memory.leave(tmp_path, second)
    assert out_of_memory.read(tmp_path) == first
    out_of_memory.clear(tmp_path)
    assert out_of_memory.read(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


ALLOCATE = """
import resource, torch
from trueshard.train.run import out_of_memory
meter = out_of_memory.MemoryMeter(torch.device("cpu"), 1)
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
try:
    torch.zeros(1 << 30)
except Exception as error:
    print(out_of_memory.is_out_of_memory(error), meter.shortage(0, error).requested)
"""


def test_allocator_that_has_no_more_is_recognised() -> None:
    done = forks.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(4 << 30)]


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has …"), True),
        (MemoryError(), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            dist.DistBackendError("NCCL error: unhandled cuda error. Last error: Failed to CUDA calloc 6291456 bytes"),
            True,
        ),
        (dist.DistBackendError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_only_allocators_run_out_of_memory(error: Exception, known: bool) -> None:
    assert out_of_memory.is_out_of_memory(error) is known


def test_limit_of_a_process_counts_on_the_cpu() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, before[1]))
    try:
        assert memory_of_process(1) <= 8 << 30
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
