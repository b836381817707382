"""Faults of a run's processes, a row each: what is done to it, what is said, and that nothing is lost.

After each fault the same command goes on, to the bits of a run that nothing happened to. Torchrun says more on the
terminal: of a row, what is said is looked for, and what is unsaid must not be there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import trueshard
from messages import lacking
from running import TORCHRUN, curve, end, metrics, project, run, start, wait_for_steps, wait_until, workers_of

Started = list[subprocess.Popen[str]]
"""The programs that a user started: a launcher, or each rank under srun."""
Ranks = list[psutil.Process]
Act = Callable[[Started, Ranks], None]

LIMIT = 9
"""Seconds that ranks wait for one another: `run.timeout`."""
SOON = 30
"""Seconds from the fault to the end, with time for a slow machine."""


def by_trueshard(folder: Path) -> Started:
    return [start(folder, "--nproc", "2", "--set", f"run.timeout={LIMIT}")]


def by_torchrun(folder: Path, *more: str) -> Started:
    python = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", *more, "-m", "trueshard")
    options = ("--set", f"run.timeout={LIMIT}")
    return [start(folder, *options, python=python, TMPDIR=tempfile.mkdtemp(dir=folder.parent))]


def by_patient_torchrun(folder: Path) -> Started:
    return by_torchrun(folder, "--max-restarts", "2")


def by_srun(folder: Path) -> Started:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "MASTER_PORT": port}
    return [
        start(folder, "--set", f"run.timeout={LIMIT}", **task, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"
    ]


def sent(number: signal.Signals, *ranks: int) -> Act:
    """A signal to these ranks."""

    def act(_: Started, processes: Ranks) -> None:
        for rank in ranks:
            processes[rank].send_signal(number)

    return act


def sent_to_launcher(number: signal.Signals) -> Act:
    return lambda started, _: started[0].send_signal(number)


def sent_to_all(number: signal.Signals) -> Act:
    """As Slurm signals a job: the launcher and its ranks, to which the launcher passes it on."""

    def act(started: Started, processes: Ranks) -> None:
        for process in (started[0], *processes):
            process.send_signal(number)

    return act


def after(first: Act, second: Act, seconds: float) -> Act:
    def act(started: Started, processes: Ranks) -> None:
        first(started, processes)
        time.sleep(seconds)
        second(started, processes)

    return act


@dataclass(frozen=True)
class Fault:
    """What is done to a run, and what it says."""

    act: Act
    code: int
    said: tuple[str, ...]
    """`{0}`, `{1}`: the process of this rank."""
    unsaid: tuple[str, ...] = ("Traceback", "out of memory")
    by: Callable[[Path], Started] = by_trueshard
    steps: int = 21
    """Steps that the run has taken by then; a checkpoint is made after 20."""


STOP, CONT, KILL, TERM, INT = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL, signal.SIGTERM, signal.SIGINT
SAVED = ("Stopped after step", "The same command resumes")
OWN = ("ChildFailedError", "another exception", "out of memory")
"""What torchrun need not say, although its own end is a traceback."""


def silent(rank: int) -> tuple[str, ...]:
    """What is said of a rank that is stopped, and of the other, which waits."""
    told = f"rank {rank} does not answer (process {{{rank}}} on", "and was last", f"rank {1 - rank} in "
    return "ranks have waited", *told, "run.timeout"


def killed(rank: int) -> tuple[str, ...]:
    return f"rank {rank}", "SIGKILL", "the same command goes on from", "step-00000020"


FAULTS = {
    "rank 1 is stopped": Fault(sent(STOP, 1), 1, silent(1), ("Traceback", "SIGKILL", "out of memory", "main.py")),
    "rank 0 is stopped": Fault(sent(STOP, 0), 1, silent(0), ("Traceback", "SIGKILL", "out of memory", "main.py")),
    "a rank is stopped under torchrun": Fault(sent(STOP, 1), 1, silent(1), ("out of memory",), by_torchrun),
    "a rank is stopped for a while": Fault(
        after(sent(STOP, 1), sent(CONT, 1), 5), 0, ("rank 1 does not answer", "Files made"), ("Traceback", "trueshard:")
    ),
    "a run with a stopped rank is asked to stop": Fault(after(sent(STOP, 1), sent_to_launcher(TERM), 1), 130, SAVED),
    "rank 1 is killed": Fault(sent(KILL, 1), 1, killed(1)),
    "rank 0 is killed": Fault(sent(KILL, 0), 1, killed(0)),
    "a rank is killed before a checkpoint": Fault(
        sent(KILL, 1), 1, ("rank 1", "SIGKILL", "there is no checkpoint"), steps=2
    ),
    "both ranks are killed": Fault(sent(KILL, 0, 1), 1, ("SIGKILL", "step-00000020")),
    "a rank crashes": Fault(sent(signal.SIGSEGV, 1), 1, ("rank 1", "SIGSEGV", "step-00000020")),
    "a rank is asked to stop": Fault(sent(TERM, 1), 130, SAVED),
    "the run is asked to stop": Fault(sent_to_launcher(TERM), 130, SAVED),
    "Slurm asks all processes to stop": Fault(sent_to_all(TERM), 130, SAVED),
    "torchrun is asked to stop": Fault(sent_to_launcher(TERM), 1, SAVED, OWN, by_torchrun),
    "torchrun is interrupted": Fault(sent_to_launcher(INT), 1, SAVED, OWN, by_torchrun),
    "torchrun that restarts is asked to stop": Fault(sent_to_launcher(TERM), 1, SAVED, OWN, by_patient_torchrun),
    "Slurm asks all processes of torchrun to stop": Fault(sent_to_all(TERM), 1, SAVED, OWN, by_torchrun),
    "a rank is asked to stop under torchrun": Fault(sent(TERM, 1), 0, SAVED, by=by_torchrun),
    "a rank is asked to stop under torchrun that restarts": Fault(sent(TERM, 1), 0, SAVED, by=by_patient_torchrun),
    "the rank that has the store is stopped": Fault(sent(STOP, 0), 1, ("rank 0", "does not answer"), by=by_srun),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = project(tmp_path_factory.mktemp("faults") / "undisturbed")
    run(folder, "--nproc", "2")
    return folder


@pytest.mark.rest
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_told_and_nothing_is_lost(name: str, undisturbed: Path, tmp_path: Path) -> None:
    fault = FAULTS[name]
    folder = project(tmp_path / "faulty")
    started = fault.by(folder)
    wait_for_steps(folder, started[0], fault.steps)
    if fault.steps > 20:  # its checkpoint is written beside the next steps
        wait_until(started[0], lambda: trueshard.latest(folder / "run" / "checkpoints") is not None)
    ranks = workers_of(started[0].pid) if len(started) == 1 else [psutil.Process(each.pid) for each in started]
    begun = time.monotonic()
    fault.act(started, ranks)
    ended = [end(process, 3 * SOON) for process in reversed(started) if not _is_stopped(process)]
    took = time.monotonic() - begun
    for process in started:
        if process.poll() is None:  # as srun does
            os.kill(process.pid, KILL)
            process.communicate()
    code, out, err = ended[0]
    words = [part.format(*(each.pid for each in ranks)) for part in fault.said]
    assert lacking(out + err, *words) == [], out + err
    assert [part for part in fault.unsaid if part in err] == [], err
    assert code == fault.code, out + err
    assert took < SOON + 30 * (fault.by is by_torchrun), err  # torchrun gives a stopped process half a minute
    assert not [each for each in ranks if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    taken = len(metrics(folder))
    run(folder, "--nproc", "2")
    assert curve(folder) == curve(undisturbed), taken


def _is_stopped(process: subprocess.Popen[str]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


@pytest.mark.rest
@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_JOB_NUM_NODES"])
def test_script_of_a_slurm_job_is_told_of_srun_at_once(name: str, tmp_path: Path) -> None:
    folder = project(tmp_path / "job")
    code, _, err = end(start(folder, SLURM_JOB_ID="7", SLURM_PROCID="0", **{name: "2"}), SOON)
    assert code == 2
    assert lacking(err, "srun trueshard train", "--nproc N") == []
    assert len(err.splitlines()) == 1
    assert not (folder / "run").exists()
