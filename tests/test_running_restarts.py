"""Ranks that are lost, runs that are stopped: what is started again, and what is left."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from messages import lacking
from running import (
    TORCHRUN,
    curve,
    end,
    kill,
    metrics,
    processes_below,
    project,
    run,
    start,
    wait_for_steps,
    wait_until,
    workers_of,
)

TWICE = ("--nproc", "2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = project(tmp_path_factory.mktemp("restarts") / "undisturbed")
    run(folder, *TWICE)
    return folder


@pytest.mark.rest
def test_killed_rank_starts_the_group_again_and_the_curve_is_the_same(undisturbed: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "killed")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = start(folder, *TWICE, "--set", "run.restarts=1", TMPDIR=str(temporary))
    wait_for_steps(folder, process, 25)
    everything = processes_below(process.pid)
    kill(workers_of(process.pid)[1])
    wait_for_steps(folder, process, 26)
    everything += processes_below(process.pid)
    code, out, err = end(process)
    assert code == 0, out + err
    (line,) = err.splitlines()
    assert lacking(line, "trueshard: ", "rank 1", "SIGKILL", "(1 of 1)") == []
    assert "Resumed after step 20" in out
    assert curve(folder) == curve(undisturbed)
    assert not [each for each in everything if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert [each.name for each in temporary.iterdir() if "inductor" not in each.name] == []  # torch's cache of kernels
    assert not (folder / "run" / ".lock").exists()


@pytest.mark.rest
def test_killed_launcher_leaves_no_process_and_the_same_command_goes_on(undisturbed: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "killed")
    process = start(folder, *TWICE)
    wait_for_steps(folder, process, 5)
    workers = workers_of(process.pid)
    kill(psutil.Process(process.pid))
    process.communicate()
    run(folder, *TWICE)
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    assert curve(folder) == curve(undisturbed)


def test_wrong_input_is_not_tried_again(tmp_path: Path) -> None:
    folder = project(tmp_path / "refused")
    code, _, err = end(start(folder, *TWICE, "--set", "run.restarts=3", "--set", "shard.units=NoSuchBlock"))
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    assert "NoSuchBlock" in err


def test_signal_before_the_first_step_ends_the_run_at_once(tmp_path: Path) -> None:
    folder = project(tmp_path / "early")
    process = start(folder, *TWICE)
    wait_until(process, lambda: len(workers_of(process.pid)) == 2)
    process.send_signal(signal.SIGTERM)
    code, out, _ = end(process, limit=20)
    assert code == 130
    assert lacking(out, "Stopped", "before the first checkpoint") == []


@pytest.mark.rest
def test_second_run_is_refused_while_the_first_goes_on_and_a_stop_is_not_tried_again(tmp_path: Path) -> None:
    folder = project(tmp_path / "twice")
    process = start(folder, *TWICE, "--set", "train.steps=100000", "--set", "run.restarts=3")
    wait_for_steps(folder, process, 1)
    rank0 = workers_of(process.pid)[0].pid
    code, _, err = end(start(folder, *TWICE, "--set", "train.steps=100000"))
    assert code == 2
    assert lacking(err, "in use", rank0) == []
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process)
    assert (code, err) == (130, "")
    assert f"Stopped after step {len(metrics(folder))};" in out


@pytest.mark.rest
def test_torchrun_starts_a_lost_rank_again(undisturbed: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "torchrun")
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "trueshard")
    process = start(folder, python=torchrun, TMPDIR=tempfile.mkdtemp(dir=tmp_path))
    wait_for_steps(folder, process, 25)
    kill(workers_of(process.pid)[1])
    code, out, err = end(process)
    assert code == 0, out + err
    assert curve(folder) == curve(undisturbed)


@pytest.mark.rest
def test_torchrun_does_not_try_a_wrong_input_again(tmp_path: Path) -> None:
    folder = project(tmp_path / "refused")
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "-m", "trueshard")
    process = start(folder, "--set", "shard.units=NoSuchBlock", python=torchrun, TMPDIR=tempfile.mkdtemp(dir=tmp_path))
    code, _, err = end(process)
    assert code != 0
    assert err.count("NoSuchBlock") == 1, err
    assert {*os.listdir(folder / "run")} <= {"data", ".lock", "log.txt"}, os.listdir(
        folder / "run"
    )  # no checkpoint, no settings
