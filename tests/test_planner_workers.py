"""Forked processes that work side by side: results in any order, errors as they are, and no hang where one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

import forks
from trueshard.planner.workers import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def double(value: int) -> int:
    time.sleep(0.01 * value)
    return 2 * value


def process() -> int:
    time.sleep(0.05)
    return os.getpid()


def fail(text: str) -> None:
    raise ValueError(text)


class UnsendableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("two arguments")


def fail_unsendably() -> None:
    raise UnsendableError(1, 2)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FUNCTIONS: dict[str, Any] = {
    each.__name__: each for each in (double, process, fail, fail_unsendably, die, time.sleep, signal.raise_signal)
}


@pytest.mark.parametrize("count", [0, 2])
def test_tasks_are_done_whatever_the_order_in_which_they_are_waited_for(count: int) -> None:
    with Workers(FUNCTIONS, count) as workers:
        tasks = [workers.start("double", value) for value in (5, 0, 3, 1)]
        assert [workers.result(each) for each in reversed(tasks)] == [2, 6, 0, 10]


def test_two_work_at_a_time_and_none_is_this_process() -> None:
    with Workers(FUNCTIONS, 2) as workers:
        tasks = [workers.start("process") for _ in range(2)]
        assert len({os.getpid(), *(workers.result(each) for each in tasks)}) == 3


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_is_raised_where_the_result_is_asked_for(count: int) -> None:
    with Workers(FUNCTIONS, count) as workers:
        failed, fine = workers.start("fail", "so it is"), workers.start("double", 1)
        assert workers.result(fine) == 2
        with pytest.raises(ValueError, match="so it is"):
            workers.result(failed)


def test_an_error_that_cannot_be_sent_is_told() -> None:
    with Workers(FUNCTIONS, 2) as workers, pytest.raises(RuntimeError, match="UnsendableError: two arguments"):
        workers.result(workers.start("fail_unsendably"))


def test_every_task_is_an_error_once_a_worker_has_died() -> None:
    with Workers(FUNCTIONS, 2) as workers:
        tasks = [workers.start(*each) for each in (("die",), ("sleep", 60), ("double", 1))]
        for task in tasks:
            with pytest.raises(RuntimeError, match=r"was ended by SIGKILL before it was done; .* memory"):
                workers.result(task)
        with pytest.raises(RuntimeError, match="SIGKILL"):
            workers.start("process")


def test_a_ctrl_c_does_not_end_them() -> None:
    with Workers(FUNCTIONS, 2) as workers:
        workers.result(workers.start("raise_signal", signal.SIGINT))
        assert workers.result(workers.start("double", 1)) == 2


def test_the_processes_are_gone_behind_the_context_also_in_the_middle_of_work() -> None:
    with Workers(FUNCTIONS, 2) as workers:
        pids = [workers.result(each) for each in [workers.start("process") for _ in range(2)]]
        workers.start("sleep", 60)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


KILLED = """
import os, signal, time
from trueshard.planner.workers import Workers
with Workers({"pid": os.getpid, "sleep": time.sleep}, 2) as workers:
    print(workers.result(workers.start("pid")), flush=True)
    workers.start("sleep", 60), workers.start("sleep", 60)
    time.sleep(60)
"""


def test_the_processes_are_gone_if_the_one_that_forked_them_is_killed() -> None:
    with forks.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
