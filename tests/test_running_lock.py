"""One run at a time in a folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trueshard.errors import UserError
from trueshard.train.running import lock

HOLD = """
import sys, time
from pathlib import Path
from trueshard.train.running import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(folder: Path, seconds: float = 60) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_second_run_on_a_folder_is_told_who_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = holder(folder)
    try:
        with pytest.raises(UserError) as caught, lock.held(folder, patience=0.2):
            pass
    finally:
        other.kill()
        other.wait()
    assert str(caught.value).startswith(f"run.dir: {folder} is in use by process {other.pid} on {socket.gethostname()}")
    assert "\n" not in str(caught.value)


def test_lock_dies_with_the_process_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = holder(folder)
    other.kill()
    other.wait()
    assert (folder / lock.NAME).exists()
    with lock.held(folder, patience=0):
        assert str(os.getpid()) in (folder / lock.NAME).read_text()


def test_run_that_ends_in_a_moment_is_waited_for(tmp_path: Path) -> None:
    other = holder(tmp_path, seconds=0.5)
    with lock.held(tmp_path, patience=10):
        assert str(os.getpid()) in (tmp_path / lock.NAME).read_text()
    assert other.wait() == 0


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path) -> None:
    with lock.held(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / lock.NAME).exists()
    assert list(tmp_path.iterdir()) == []


def test_folder_with_files_stays(tmp_path: Path) -> None:
    with lock.held(tmp_path / "run"):
        (tmp_path / "run" / "config.json").write_text("{}")
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["config.json"]
