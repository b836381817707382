"""How the processes of a run come together: who started them, where they meet, and the lock on the run's folder."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import forks
from messages import lacking, naming
from running import end, project, run, start
from trueshard import launching
from trueshard.errors import UserError
from trueshard.machine import cpu_cores
from trueshard.train.run.checks import LOCK, held
from trueshard.train.run.world import agreed_store, check_srun, launcher_of, meet, rank_threads, torch_variables

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
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "srun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),  # the script of a job
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE"),
    ],
)
def test_launcher_is_known_by_the_environment(environment: dict[str, str], name: str | None) -> None:
    found = launcher_of(environment)
    assert found is None if name is None else name in str(found)


@pytest.mark.parametrize(
    ("environment", "is_ours", "threads"),
    [
        ({"OMP_NUM_THREADS": "7"}, False, 7),
        ({"OMP_NUM_THREADS": "7,2"}, False, 7),  # of nested regions
        ({"OMP_NUM_THREADS": "7", "TORCHELASTIC_RUN_ID": "x"}, False, 7),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, True, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, False, None),  # torchrun's own
        ({}, False, None),
    ],
)
def test_threads_of_a_rank_are_those_that_the_environment_says(
    environment: dict[str, str], is_ours: bool, threads: int | None
) -> None:
    assert rank_threads(environment, 1, is_ours) == (threads or cpu_cores())
    assert rank_threads(environment, 1000, is_ours) == (threads or 1)


@pytest.mark.parametrize(
    "job",
    [
        {"SLURM_JOB_NUM_NODES": "2"},
        {"SLURM_NTASKS": "8"},
        {"SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NUM_NODES": "1"},
        {},
    ],
    ids=str,
)
def test_script_of_a_job_of_several_tasks_is_told_of_srun(job: dict[str, str]) -> None:
    """With `SLURM_PROCID`, as in a script, or without it, as in a shell of `salloc`."""
    for more in ({}, {"SLURM_PROCID": "0"}):
        environment = {"SLURM_JOB_ID": "7", **job, **more}
        check_srun(environment | {"SLURM_STEP_ID": "0"})
        if not job:
            check_srun(environment)  # one task
            continue
        with pytest.raises(UserError, match=naming("srun trueshard train", "--nproc")):
            check_srun(environment)


# Where ranks meet: a part of a store in which the dead have left their addresses


def met(shared: dist.Store, world: int) -> list[dist.Store]:
    """What each rank gets."""
    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(lambda rank: agreed_store(shared, rank, world, timeout=10), range(world)))


def test_ranks_of_one_time_share_a_store() -> None:
    stores = met(dist.HashStore(), 3)
    stores[0].set("address", "here")
    assert [store.get("address") for store in stores] == [b"here"] * 3


def test_what_the_dead_have_left_is_not_seen() -> None:
    shared = dist.HashStore()
    met(shared, 2)[0].set("address", "of the dead")
    first, second = met(shared, 2)
    assert not second.check(["address"])
    first.set("address", "of the living")
    assert second.get("address") == b"of the living"


def test_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(dist.DistStoreError, match=naming("0 seconds", "rank 1, 2")):
        agreed_store(dist.HashStore(), 0, 3, timeout=0.1)


# A port that another program has


@contextlib.contextmanager
def occupied(says: bytes | None) -> Iterator[int]:
    """A port of a program that answers each connection so and closes it, or accepts and says nothing (None)."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while says is not None:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(says)

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_port_of_another_program_is_told_with_a_remedy() -> None:
    with occupied(None) as port:
        for rank in range(2):
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with pytest.raises(UserError) as caught:
                meet(address, rank, 0.3, holds=rank == 0)
            assert lacking(caught.value, f"rank {rank}", port, "MASTER_PORT", "a free one") == []
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variables", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "here", "MASTER_PORT": "x"}])
def test_address_that_is_none_is_one_line(variables: dict[str, str]) -> None:
    with pytest.raises(UserError, match=naming("MASTER_ADDR", "MASTER_PORT", "a free one")):
        meet(variables, 0, 1.0, holds=True)


@pytest.mark.rest
@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("says", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_every_rank_of_a_run_tells_the_port_in_time(says: bytes | None, agent: bool, tmp_path: Path) -> None:
    folder = project(tmp_path / "run")
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"} if agent else {}
    with occupied(says) as port:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", **torchrun}
        ranks = [start(folder, "--set=run.timeout=4", RANK=str(rank), LOCAL_RANK=str(rank), **where) for rank in (0, 1)]
        ends = [end(process, limit=40) for process in ranks]
    for rank, (code, _, err) in enumerate(ends):
        told = [line for line in err.splitlines() if line.startswith("trueshard:")]
        assert (code, len(told)) == (2, 1), err
        assert lacking(told[0], f"rank {rank}", port, "MASTER_PORT", "a free one") == []
    assert not (folder / "run").exists()
    run(folder, "--nproc=2", "--set=train.steps=2")


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


IGNORES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    time.sleep(1)
    sys.exit(3)
time.sleep(600)
"""


@pytest.mark.rest
def test_a_rank_that_takes_no_signal_ends_seconds_after_another_failed() -> None:
    began = time.monotonic()
    ended = launching.run_ranks([sys.executable, "-c", IGNORES], 2)
    assert time.monotonic() - began < 2 * launching.LAST_WORDS + 10
    assert ended.codes == {1: 3}
