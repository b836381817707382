"""One of two hosts is lost with its memory, and another comes: while the other torchrun lives, or all start anew."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import forks
from running import TORCHRUN, curve, end, environment, kill, metrics, project, run, start, wait_for_steps, workers_of
from test_lost_launched import weights

LIMIT = 9
"""Seconds that ranks wait for one another: `run.timeout`."""
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "lost-processes.md"
"""It has the command of a store at which torchruns meet, on port 29400."""
COPIES = ("train.memory_every=1", "train.memory_copies=1", f"run.timeout={LIMIT}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = project(tmp_path_factory.mktemp("hosts") / "undisturbed")
    run(folder, "--nproc", "2")
    return folder


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def agent(folder: Path, memory: Path, torchrun: tuple[str, ...], *options: str, **more: str) -> subprocess.Popen[str]:
    """A torchrun of one rank on a host with a memory of its own."""
    memory.mkdir(exist_ok=True)
    python = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *torchrun, "-m", "trueshard")
    variables = {"TRUESHARD_MEMORY": str(memory), "TMPDIR": str(memory.parent)} | more
    variables["OMP_WAIT_POLICY"] = "passive"  # both hosts are this one, and a rank takes all cores of its host
    return start(folder, *(f"--set={option}" for option in (*COPIES, *options)), python=python, **variables)


def lose(process: subprocess.Popen[str], memory: Path) -> None:
    """Kill a torchrun with its ranks, and empty the memory of its host."""
    for each in [psutil.Process(process.pid), *workers_of(process.pid)]:
        kill(each)
    process.communicate()
    shutil.rmtree(memory)


@pytest.mark.rest
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_lost_with_its_memory_is_replaced(lost: int, undisturbed: Path, tmp_path: Path) -> None:
    folder, memories = project(tmp_path / "hosts"), [tmp_path / "one", tmp_path / "two"]

    def agents() -> list[subprocess.Popen[str]]:
        place = ("--master-addr", "localhost", "--master-port", str(free_port()))
        return [agent(folder, memories[i], ("--node-rank", str(i), *place)) for i in range(2)]

    started = agents()
    wait_for_steps(folder, started[0], 25)
    lose(started[lost], memories[lost])
    assert end(started[1 - lost])[0] != 0
    ends = [end(process) for process in agents()]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert any("from memory" in out for _, out, _ in ends)
    assert curve(folder) == curve(undisturbed)
    assert weights(folder) == weights(undisturbed)
    assert [os.listdir(memory) for memory in memories] == [[], []]


@pytest.fixture
def meeting() -> Iterator[int]:
    """The port of a store at which torchruns meet, on none of their hosts."""
    port = free_port()
    code = re.search(r'python -c "(.*29400.*)"', PAGE.read_text())[1].replace("29400", str(port))  # type: ignore[index]
    process = forks.Popen([sys.executable, "-c", code], env=environment(), start_new_session=True)
    yield port
    process.kill()
    process.wait()


#: Addresses of the two hosts and of the one that comes, by whose order torch elastic gives ranks; and which is lost.
PLACES = {
    "the second by one behind it": (("127.0.0.1", "127.0.0.2", "127.0.0.3"), 1),
    "the first by one before it": (("127.0.0.2", "127.0.0.3", "127.0.0.1"), 0),
    "the first by one behind, and the second is rank 0": (("127.0.0.1", "127.0.0.2", "127.0.0.3"), 0),
    "the second by one before the first, which is rank 1": (("127.0.0.2", "127.0.0.3", "127.0.0.1"), 1),
}


@pytest.mark.rest
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", PLACES)
def test_another_host_comes_in_the_place_of_a_lost_one_while_the_other_torchrun_lives(
    place: str, undisturbed: Path, meeting: int, tmp_path: Path
) -> None:
    folder, (addresses, lost) = project(tmp_path / "hosts"), PLACES[place]
    memories = [tmp_path / f"memory-{number}" for number in range(3)]
    patience = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3"  # on one machine, all would be the host

    def joined(number: int) -> subprocess.Popen[str]:
        where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{meeting}", "--rdzv-conf", patience)
        torchrun = (*where, "--rdzv-id", "lost", "--max-restarts", "1", "--local-addr", addresses[number])
        return agent(folder, memories[number], torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    started = [joined(0), joined(1)]
    wait_for_steps(folder, started[1 - lost], 10)
    lose(started[lost], memories[lost])
    ends = [end(process) for process in (started[1 - lost], joined(2))]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sum("Went on from step" in out and "in memory" in out for _, out, _ in ends) == 1, ends
    assert curve(folder) == curve(undisturbed)
    assert weights(folder) == weights(undisturbed)
    (record,) = [record for record in metrics(folder) if "incident" in record]
    assert record["step"] > 9
    assert [os.listdir(memories[number]) for number in (1 - lost, 2)] == [[], []]
