"""Processes of a launcher are lost, and it goes on from memory: a row each, to the bytes of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import trueshard
from messages import lacking
from running import TORCHRUN, curve, end, kill, metrics, project, run, start, wait_for_steps, wait_until, workers_of

MEMORY = ("--set", "train.memory_every=1", "--set", "run.restarts=1")
TWICE = ("--nproc", "2")
KILL, STOP, TERM, SEGV = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV
SOURCES = Path(trueshard.__file__).parents[1]
NOTICE = 30
"""Seconds from the signal to the end of a machine that is taken away: the shortest that clouds give."""
LIMIT = 9
"""Seconds that ranks wait for one another: `run.timeout`."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = project(tmp_path_factory.mktemp("launched") / "undisturbed")
    run(folder, *TWICE)
    return folder


def with_path(folder: Path) -> str:
    """What Python finds here, an emulated device too, and a folder's modules."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(SOURCES), str(folder))))


def weights(folder: Path) -> bytes:
    return (folder / "run" / "checkpoints" / "step-00000040" / "model.safetensors").read_bytes()


def hold(folder: Path, undisturbed: Path, memory: Path) -> None:
    """The run is complete, and the same; nothing of it is in memory."""
    assert curve(folder) == curve(undisturbed)
    assert weights(folder) == weights(undisturbed)
    assert os.listdir(memory) == []
    assert not (folder / "run" / "memory").exists()


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    place = tmp_path / "memory"
    place.mkdir()
    return place


def sent(number: signal.Signals, *ranks: int) -> Callable[[list[psutil.Process]], None]:
    def act(processes: list[psutil.Process]) -> None:
        for rank in ranks:
            processes[rank].send_signal(number)

    return act


@dataclass(frozen=True)
class Loss:
    act: Callable[[list[psutil.Process]], None]
    said: tuple[str, ...]
    more: tuple[str, ...] = ()


LOSSES = {
    "a rank is killed": Loss(sent(KILL, 1), ("rank 1", "SIGKILL", "in memory (1 of 1)")),
    "all ranks are killed": Loss(sent(KILL, 0, 1), ("rank 0", "rank 1", "in memory (1 of 1)")),
    "a rank crashes": Loss(sent(SEGV, 0), ("rank 0", "SIGSEGV", "in memory (1 of 1)")),
    "a rank is stopped": Loss(
        sent(STOP, 1), ("does not answer", "in memory (1 of 1)"), ("--set", f"run.timeout={LIMIT}")
    ),
}


def lose(loss: Loss, undisturbed: Path, memory: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "lost")
    process = start(folder, *TWICE, *MEMORY, *loss.more, TRUESHARD_MEMORY=str(memory))
    wait_for_steps(folder, process, 25)
    loss.act(workers_of(process.pid))
    code, out, err = end(process)
    assert code == 0, out + err
    assert lacking(out + err, *loss.said) == [], out + err
    assert "Traceback" not in err, err
    hold(folder, undisturbed, memory)
    (record,) = [record for record in metrics(folder) if "incident" in record]
    assert record["step"] > 24
    assert record["incident_seconds"] == pytest.approx(sum(record["incident_parts"].values()), abs=0.05)
    assert lacking(out, "1 incident, ", "goodput ") == []
    assert f"Went on from step {record['step'] - 1} in memory in {record['incident_seconds']:.1f} s" in out


@pytest.mark.rest
@pytest.mark.parametrize("name", LOSSES)
def test_a_run_goes_on_from_memory_and_says_what_it_cost(
    name: str, undisturbed: Path, memory: Path, tmp_path: Path
) -> None:
    lose(LOSSES[name], undisturbed, memory, tmp_path)


@pytest.fixture
def starved() -> Iterator[Callable[[list[psutil.Process]], None]]:
    """Puts rank 1 where the kernel has no more memory for it."""
    root = Path("/sys/fs/cgroup")
    is_unified = (root / "cgroup.controllers").exists()
    place = (root if is_unified else root / "memory") / f"trueshard-{os.getpid()}"
    try:
        place.mkdir()
        (place / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text("4096")
    except OSError as error:
        pytest.skip(f"control groups are not permitted here ({error})")
    yield lambda processes: (place / "cgroup.procs").write_text(str(processes[1].pid)) and None
    place.rmdir()


@pytest.mark.rest
def test_a_rank_for_which_the_host_has_no_memory_is_said_to_be_that(
    starved: Callable[[list[psutil.Process]], None], undisturbed: Path, memory: Path, tmp_path: Path
) -> None:
    said = "rank 1 was ended by SIGKILL (the machine may have run out of memory)", "in memory (1 of 1)"
    lose(Loss(starved, said), undisturbed, memory, tmp_path)


RAISING = """
import os, torch
class Raising(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)
    def step(self):
        super().step()
        if self.last_epoch == 9 and os.environ.get("RANK") == "1" and not os.path.exists("raised"):
            open("raised", "w").close()
            raise ArithmeticError("only once")
"""


@pytest.mark.rest
def test_an_error_of_one_rank_is_shown_and_past_at_the_next_start(
    undisturbed: Path, memory: Path, tmp_path: Path
) -> None:
    folder = project(tmp_path / "raising")
    (folder / "raising.py").write_text(RAISING)
    text = (folder / "train.toml").read_text().replace('decay = "constant"', 'class = "raising.Raising"')
    (folder / "train.toml").write_text(text)
    paths = {"TRUESHARD_MEMORY": str(memory), "PYTHONPATH": with_path(folder)}
    code, out, err = end(start(folder, *TWICE, *MEMORY, **paths))
    assert code == 0, out + err
    assert lacking(err, "rank 1 failed", "ArithmeticError: only once", "from step 8 in memory (1 of 1)") == []
    assert err.count("Traceback") == 1, err
    hold(folder, undisturbed, memory)


@pytest.mark.rest
def test_preemption_leaves_a_checkpoint_on_disk_and_nothing_in_memory_within_its_notice(
    undisturbed: Path, memory: Path, tmp_path: Path
) -> None:
    folder = project(tmp_path / "preempted")
    process = start(folder, *TWICE, *MEMORY, TRUESHARD_MEMORY=str(memory))
    wait_for_steps(folder, process, 25)
    process.send_signal(TERM)
    code, out, err = end(process, NOTICE)
    assert (code, err) == (130, ""), out + err
    assert os.listdir(memory) == []
    assert "from run/checkpoints/step-000000" in run(folder, *TWICE, *MEMORY, TRUESHARD_MEMORY=str(memory))
    hold(folder, undisturbed, memory)


@pytest.mark.rest
def test_forks_of_the_spare_take_over_twice_and_leave_nothing(undisturbed: Path, memory: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "spares")
    process = start(folder, *TWICE, *MEMORY, TRUESHARD_MEMORY=str(memory), TMPDIR=str(tmp_path / "lost"))
    (tmp_path / "lost").mkdir()
    wait_until(process, lambda: len(workers_of(process.pid)) == 3)  # the third is the spare
    everything, before = [], 0
    for _ in range(2):  # each with a step in between
        wait_for_steps(folder, process, before + 5)
        before = len(metrics(folder))
        everything += workers_of(process.pid)
        kill(next(each for each in workers_of(process.pid)[::-1] if each.pid != everything[2].pid))
        wait_for_steps(folder, process, before + 1)
    everything += workers_of(process.pid)
    code, out, err = end(process)
    assert code == 0, out + err
    hold(folder, undisturbed, memory)
    assert not [each for each in everything if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert [each.name for each in (tmp_path / "lost").iterdir() if "inductor" not in each.name] == []


@pytest.mark.rest
def test_a_killed_launcher_leaves_its_snapshot_to_the_next_start(
    undisturbed: Path, memory: Path, tmp_path: Path
) -> None:
    folder = project(tmp_path / "killed")
    process = start(folder, *TWICE, *MEMORY, TRUESHARD_MEMORY=str(memory))
    wait_for_steps(folder, process, 25)
    for each in [psutil.Process(process.pid), *workers_of(process.pid)]:
        kill(each)
    process.communicate()
    assert len(os.listdir(memory)) == 1
    out = run(folder, *TWICE, *MEMORY, TRUESHARD_MEMORY=str(memory))
    taken = int(out.partition("Resumed after step ")[2].split()[0])
    assert taken >= 24
    assert "from memory" in out
    hold(folder, undisturbed, memory)


@pytest.mark.rest
def test_a_run_that_begins_anew_knows_nothing_of_the_one_before(memory: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "anew")
    process = start(folder, *TWICE, *MEMORY, TRUESHARD_MEMORY=str(memory))
    wait_for_steps(folder, process, 5)
    for each in [psutil.Process(process.pid), *workers_of(process.pid)]:
        kill(each)
    process.communicate()
    shutil.rmtree(folder / "run")
    out = run(folder, *TWICE, *MEMORY, "--set", "train.seed=12", TRUESHARD_MEMORY=str(memory))
    assert "Resumed" not in out
    assert [record["step"] for record in metrics(folder)] == list(range(1, 41))
    assert os.listdir(memory) == []


@pytest.mark.rest
def test_what_comes_back_at_the_same_step_ends_the_run_with_the_first_cause_and_keeps_the_step(
    undisturbed: Path, memory: Path, tmp_path: Path
) -> None:
    folder = project(tmp_path / "again")
    (folder / "fails.py").write_text(
        "import os, signal, torch\n"
        "class Fails(torch.optim.lr_scheduler.LambdaLR):\n"
        "    def __init__(self, optimizer):\n"
        "        super().__init__(optimizer, lambda step: 1.0)\n"
        "    def step(self):\n"
        "        super().step()\n"
        "        if self.last_epoch == 9 and os.environ.get('RANK') == '1' and not os.path.exists('well'):\n"
        "            first = not os.path.exists('once')\n"
        "            open('once', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGSEGV if first else signal.SIGFPE)\n"
    )
    text = (folder / "train.toml").read_text().replace('decay = "constant"', 'class = "fails.Fails"')
    (folder / "train.toml").write_text(text)
    words = ("--set", "train.memory_every=1", "--set", "run.restarts=2")
    paths = {"TRUESHARD_MEMORY": str(memory), "PYTHONPATH": with_path(folder)}
    code, out, err = end(start(folder, *TWICE, *words, **paths))
    assert code == 1, out + err
    assert err.count("starting again from step 8 in memory") == 2, err
    last = "rank 1 was ended by SIGFPE (2 times since step 8; first: rank 1 was ended by SIGSEGV); its newest step was"
    assert lacking(err, "(2 of 2)", last, "from step 8, which is now in") == []
    assert os.listdir(memory) == []
    (folder / "well").touch()
    out = run(folder, *TWICE, *words, **paths)
    assert "Resumed after step 8 from memory" in out
    hold(folder, undisturbed, memory)


@pytest.mark.rest
def test_torchrun_goes_on_from_memory(undisturbed: Path, memory: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "torchrun")
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "trueshard")
    variables = {"TMPDIR": tempfile.mkdtemp(dir=tmp_path), "TRUESHARD_MEMORY": str(memory)}
    process = start(folder, "--set", "train.memory_every=1", python=torchrun, **variables)
    wait_for_steps(folder, process, 25)
    kill(workers_of(process.pid)[1])
    code, out, err = end(process)
    assert code == 0, out + err
    assert "from memory" in out
    hold(folder, undisturbed, memory)
    (record,) = [record for record in metrics(folder) if "incident" in record]
    assert record["incident_parts"]["start of processes"] > 0.1  # from the loss on, which a rank has noticed
    assert not (folder / "run" / "lost").exists()


@pytest.mark.rest
def test_a_torchrun_that_gives_up_leaves_the_step_on_disk_and_nothing_in_memory(
    undisturbed: Path, memory: Path, tmp_path: Path
) -> None:
    folder = project(tmp_path / "torchrun")
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "trueshard")
    variables = {"TMPDIR": tempfile.mkdtemp(dir=tmp_path), "TRUESHARD_MEMORY": str(memory)}
    process = start(folder, "--set", "train.memory_every=1", python=torchrun, **variables)
    wait_for_steps(folder, process, 25)
    kill(next(each for each in workers_of(process.pid) if each.name() != "sh"))
    assert end(process)[0] != 0
    deadline = time.monotonic() + 60
    while os.listdir(memory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert os.listdir(memory) == []
    out = run(folder, *TWICE, *MEMORY, TRUESHARD_MEMORY=str(memory))
    assert int(out.partition("Resumed after step ")[2].split()[0]) >= 24, out
    hold(folder, undisturbed, memory)


@pytest.mark.rest
def test_a_memory_without_room_is_said_once_and_the_disk_serves(undisturbed: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        folder = project(tmp_path / "full")
        process = start(folder, *TWICE, *MEMORY, TRUESHARD_MEMORY=str(small))
        wait_for_steps(folder, process, 25)
        kill(workers_of(process.pid)[1])
        code, out, err = end(process)
        assert code == 0, out + err
        assert 1 <= err.count("no room for") <= 4, err  # once a rank and start
        assert "in memory (1 of 1)" in err
        hold(folder, undisturbed, small)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_words_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    folder = project(tmp_path / "refused")
    for word, told in (("run.spares=1", "run.restarts is 0"), ("train.memory_copies=1", "set train.memory_every")):
        code, _, err = end(start(folder, *TWICE, "--set", word))
        assert (code, len(err.splitlines())) == (2, 1), err
        assert told in err
