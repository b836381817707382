"""kill -9 while checkpoints are written: the last one that save() returned from is there, whole, and what was saved.

- A round is a run that is started anew: it resumes from the newest checkpoint and saves in a loop until it is killed.
  All rounds work in one directory, so each has to live with what those before it have left there.
- Ranks are forked from a process that has imported torch and runs no thread: a round takes a fraction of a second.
- Moments are random in one test. In the other they are all there are: a run kills itself at its first, second, third …
  call that changes the directory, until its save comes to an end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forks
import trueshard
from damage import bits, build, fill, tensors_of
from parity import _environment

ROUNDS = [5, pytest.param(10, marks=pytest.mark.rest)]
LIMIT = 20.0
"""seconds for a collective, and until ranks are ready"""
TO_END = 5 * LIMIT + 10.0
"""seconds for a rank to end once another was killed: gloo waits five limits for one that is killed as they connect"""
LONGEST = 0.25
"""seconds of saving before a kill, at most: several saves"""
WIDTH = 64
"""of the model: a rank's share is some kilobytes of each file"""

Say = Callable[[str], None]


# ---- In the ranks.


def save_until_killed(rank: int, world_size: int, order: dict[str, Any], say: Say) -> None:
    """Resume from the newest checkpoint, then save step after step, `order["steps"]` of them."""
    checkpoints = trueshard.Checkpoints(order["folder"], keep_last=2)
    model, optimizer = build(0, world_size, WIDTH)
    first = resume(checkpoints.latest(), model, optimizer)
    say("ready")
    if rank == order.get("victim"):
        die_at(order["call"], order["folder"])
    pending = None
    for step in range(first + 1, first + 1 + order["steps"]):
        fill(model, optimizer, step)
        pending = checkpoints.save(step, model=model, optimizer=optimizer, wait=order["wait"])
        fill(model, optimizer, -step)  # training goes on: what is written must be what was there at the call
        if order["wait"]:
            say(f"saved {step}")
        elif step > first + 1:
            say(f"saved {step - 1}")  # a save waits for the one before
    if pending is not None:
        pending.wait()
        say(f"saved {first + order['steps']}")


def save_to_url(rank: int, world_size: int, order: dict[str, Any], say: Say) -> None:
    """Save once, where nothing can be locked or renamed."""
    model, optimizer = build(1, world_size, WIDTH)
    say("ready")
    die_at(order["call"], order["folder"])
    trueshard.save(f"file://{order['folder']}", model=model, optimizer=optimizer, progress={"step": 1})


def resume(latest: Path | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the checkpoint, loaded; every bit of this rank's part must be of that step."""
    if latest is None:
        return 0
    step = int(trueshard.load(latest, model=model, optimizer=optimizer)["progress"]["step"])
    pieces = _pieces(model, optimizer)
    fill(model, optimizer, step)
    expected = _pieces(model, optimizer)
    wrong = [name for name in expected if pieces[name] != expected[name]]
    assert not wrong, f"{latest} is not what was saved at step {step}: {wrong}"
    return step


def _pieces(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    each = tensors_of(model, optimizer)
    return {name: bits(t.to_local() if hasattr(t, "to_local") else t) for name, t in each}


def die_at(call: int, folder: str) -> None:
    """From now on, this process kills itself at its `call`-th call that changes something in `folder`."""
    left = call

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "shutil.rmtree"):
            writes = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
            paths = [os.fsdecode(each) for each in arguments if isinstance(each, str | bytes | os.PathLike)]
            left -= writes and any(path.startswith(folder) for path in paths)
        elif event in ("os.remove", "os.rmdir", "os.truncate"):  # by names below a directory that is open, and by files
            left -= 1
        if left == 0:
            left = -1
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


# ---- In the process that forks them.


def nursery() -> None:
    """Reads a round a line, forks its ranks, kills whom it is told to, and answers with what became of each."""
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "numpy.random"):
        import_module(name)  # what ranks would each import anew; torch's optimizers want the first
    for name in ("Checkpoints", "save", "load", "shard"):
        getattr(trueshard, name)
    gc.freeze()  # so that a collection in a rank does not copy all that memory
    for line in sys.stdin:
        print(json.dumps(play(json.loads(line))), flush=True)


def play(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each rank: what it said, how it ended (exit code, or minus the signal; None: it hung), and when."""
    ranks = [_fork(rank, order) for rank in range(order["ranks"])]
    pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    said = [""] * len(ranks)
    deadline = time.monotonic() + LIMIT
    while not all("\n" in text for text in said) and time.monotonic() < deadline and pipes:
        _listen(pipes, said, 1.0)
    if order["kill"]:
        time.sleep(order["delay"])
        for rank in order["kill"]:
            os.kill(ranks[rank][0], signal.SIGKILL)
    deadline = time.monotonic() + TO_END
    while pipes and time.monotonic() < deadline:
        _listen(pipes, said, 1.0)
    hung = set(pipes.values())
    ends = []
    for rank, (pid, pipe) in enumerate(ranks):
        if rank in hung:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pipe)
        ends.append(None if rank in hung else os.waitstatus_to_exitcode(status))
    return [{"said": text.splitlines(), "end": end} for text, end in zip(said, ends, strict=True)]


def _listen(pipes: dict[int, int], said: list[str], patience: float) -> None:
    """Add what ranks have said; a pipe that is at its end is taken out."""
    for pipe in select.select(list(pipes), [], [], patience)[0]:
        text = os.read(pipe, 65536).decode()
        said[pipes[pipe]] += text
        if not text:
            del pipes[pipe]


def _fork(rank: int, order: dict[str, Any]) -> tuple[int, int]:
    """(process id, what it says) of a new rank."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        if order["ranks"] > 1:
            store = dist.FileStore(order["meeting"], order["ranks"])
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=order["ranks"], timeout=timedelta(seconds=LIMIT)
            )
        work = save_to_url if order.get("url") else save_until_killed
        work(rank, order["ranks"], order, lambda text: _say(writing, text))
        code = 0
    except BaseException:
        with contextlib.suppress(OSError):
            _say(writing, traceback.format_exc())
    finally:
        os._exit(code)


def _say(pipe: int, text: str) -> None:
    os.write(pipe, f"{text}\n".encode())


# ---- In the test.


class Nursery:
    """Starts rounds in a process of their own."""

    def __init__(self) -> None:
        self.process = forks.Popen(
            [sys.executable, "-c", "import test_checkpoint_kill as kill; kill.nursery()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )

    def play(self, **order: Any) -> list[dict[str, Any]]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def rounds() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.process.stdin.close()
    made.process.wait(30)


def steps_said(ends: list[dict[str, Any]]) -> list[int]:
    return [int(line.split()[1]) for end in ends for line in end["said"] if line.startswith("saved ")]


def hold(folder: Path, at_least: int) -> int:
    """Check everything with a final name, and load the newest; its step, which must not be before `at_least`."""
    for path in folder.iterdir() if folder.exists() else ():
        if not path.name.startswith("."):
            trueshard.check(path)
    model, optimizer = build(-1, 1, WIDTH)
    step = resume(trueshard.latest(folder), model, optimizer)
    assert step >= at_least, f"save() had returned for step {at_least}, and the newest is of step {step}"
    assert step == max(trueshard.Checkpoints(folder).steps(), default=0)
    return step


def hidden(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(".")} if folder.exists() else set()


@pytest.mark.rest
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", ROUNDS)
def test_killed_at_any_moment_the_newest_checkpoint_is_what_was_saved(
    count: int, tmp_path: Path, rounds: Nursery
) -> None:
    chance, folder = random.Random(0), tmp_path / "run"
    saved, before, left = 0, set[str](), 0
    for number in range(5 * count):
        if left and number >= count:  # by chance no kill may have come in the middle of a save yet
            break
        victims = chance.choice([[0], [1], [0, 1], [0, 1]])
        ends = rounds.play(
            ranks=2,
            folder=str(folder),
            meeting=str(tmp_path / f"meeting{number}"),
            steps=1_000_000,
            wait=chance.random() < 0.6,
            kill=victims,
            delay=chance.uniform(0, LONGEST),
        )
        report = f"round {number}, victims {victims}:\n" + json.dumps(ends, indent=1).replace("\\n", "\n")
        expected = [-signal.SIGKILL if rank in victims else 1 for rank in range(2)]
        assert [end["end"] for end in ends] == expected, report
        saved = hold(folder, at_least=max([saved, *steps_said(ends)]))
        now = hidden(folder)
        if steps_said(ends):
            assert not now & before, f"left by an earlier round, and not cleared by a save: {now & before}"
        left += bool(now)
        before = now
    assert left, "no kill came in the middle of a save: the test shows nothing"
    (end,) = rounds.play(ranks=1, folder=str(folder), steps=1, wait=True, kill=[])
    assert end["end"] == 0, end
    assert hidden(folder) == set()


@pytest.mark.rest
def test_killed_at_every_call_that_changes_the_directory(tmp_path: Path, rounds: Nursery) -> None:
    """A save, and the removal of what it makes too old."""
    folder, saved = tmp_path / "run", 0
    order: dict[str, Any] = {"ranks": 1, "folder": str(folder), "wait": True, "kill": []}
    rounds.play(**order, steps=3)
    for call in range(1, 100):
        (end,) = rounds.play(**order, steps=1, victim=0, call=call)
        saved = hold(folder, at_least=max([saved, *steps_said([end])]))
        assert end["end"] in (0, -signal.SIGKILL), f"call {call}: {end}"
        if end["end"] == 0:
            break
    assert 10 < call < 99, call
    assert hidden(folder) == set()


@pytest.mark.rest
def test_a_save_to_a_url_killed_at_every_call(tmp_path: Path, rounds: Nursery) -> None:
    """What is left is no checkpoint to anybody, and the next save to that place clears it."""
    folder = tmp_path / "step-1"
    model, optimizer = build(-1, 1, WIDTH)
    whole = 0
    for call in range(1, 100):
        (end,) = rounds.play(ranks=1, folder=str(folder), url=True, call=call, kill=[])
        assert end["end"] in (0, -signal.SIGKILL), f"call {call}: {end}"
        if (folder / "manifest.json").exists():
            trueshard.check(f"file://{folder}")
            assert resume(folder, model, optimizer) == 1
            shutil.rmtree(folder)
            whole += 1
        else:
            for look in (trueshard.check, trueshard.inspect, trueshard.load):
                with pytest.raises((FileNotFoundError, ValueError)):
                    look(f"file://{folder}")
        if end["end"] == 0:
            break
    assert call > 5, call
    assert 1 <= whole <= 2, "the manifest should be all but the last thing that is written"
