"""How the processes of a run come together: who started them, where they meet, and the lock on the run's folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import forks
from messages import lacking, naming
from trueshard.errors import UserError
from trueshard.train.run.checks import LOCK, held
from trueshard.train.run.world import agreed_store, launcher_of, torch_variables

# Who has started a process

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "gpu[03-04,7],cpu1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}


def test_slurm_variables_become_those_of_torch() -> None:
    assert torch_variables(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20000 + 123456 % 20000),
    }


def test_nodes_may_have_different_numbers_of_tasks() -> None:
    task = {key: value for key, value in TASK.items() if key != "SLURM_STEP_NUM_TASKS"}
    found = torch_variables(task | {"SLURM_NTASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x2),3"})
    assert (found["RANK"], found["WORLD_SIZE"]) == ("5", "7")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "3")


def test_address_that_is_given_wins_over_slurms() -> None:
    found = torch_variables(TASK | {"MASTER_ADDR": "head", "MASTER_PORT": "4242"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("head", "4242")


def test_node_list_that_cannot_be_read_is_one_line() -> None:
    with pytest.raises(UserError, match=naming("SLURM_JOB_NODELIST", "'[1-2]'", "MASTER_ADDR")):
        torch_variables(TASK | {"SLURM_STEP_NODELIST": "[1-2]"})


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "srun"),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE"),
    ],
)
def test_launcher_is_known_by_the_environment(environment: dict[str, str], name: str | None) -> None:
    found = launcher_of(environment)
    assert found is None if name is None else name in str(found)


# Where ranks meet: a part of a store in which the dead have left their addresses


def meet(shared: dist.Store, world: int) -> list[dist.Store]:
    """What each rank gets."""
    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(lambda rank: agreed_store(shared, rank, world, timeout=10), range(world)))


def test_ranks_of_one_time_share_a_store() -> None:
    stores = meet(dist.HashStore(), 3)
    stores[0].set("address", "here")
    assert [store.get("address") for store in stores] == [b"here"] * 3


def test_what_the_dead_have_left_is_not_seen() -> None:
    shared = dist.HashStore()
    meet(shared, 2)[0].set("address", "of the dead")
    first, second = meet(shared, 2)
    assert not second.check(["address"])
    first.set("address", "of the living")
    assert second.get("address") == b"of the living"


def test_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(dist.DistStoreError, match=naming("0 seconds", "rank 1, 2")):
        agreed_store(dist.HashStore(), 0, 3, timeout=0.1)


# One run at a time in a folder

HOLD = """
import sys
from pathlib import Path
from trueshard.train.run.checks import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until its input is closed."""
    process = forks.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_second_run_on_a_folder_is_told_who_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = holder(folder)
    try:
        with pytest.raises(UserError) as caught, held(folder, patience=0.2):
            pass
    finally:
        other.kill()
        other.wait()
    assert lacking(caught.value, "run.dir", folder, other.pid, socket.gethostname()) == []
    assert "\n" not in str(caught.value)


def test_lock_dies_with_the_process_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = holder(folder)
    other.kill()
    other.wait()
    assert (folder / LOCK).exists()
    with held(folder, patience=0):
        assert str(os.getpid()) in (folder / LOCK).read_text()


def test_run_that_ends_in_a_moment_is_waited_for(tmp_path: Path) -> None:
    other = holder(tmp_path)
    ender = threading.Timer(0.3, other.communicate)  # closes its input, while the second run waits
    ender.start()
    with held(tmp_path, patience=60):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    ender.join()
    assert other.returncode == 0


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path) -> None:
    with held(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


def test_folder_with_files_stays(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        (tmp_path / "run" / "config.json").write_text("{}")
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["config.json"]
