"""Plugin of pytest: a rank of a test, with one system under the library that is tested.

- Each test has a process group of its own. A rank whose test fails closes its end, so that the others fail, too, and
  go on with the next one; a test that takes longer than ``LIMIT`` ends the process, and writes its stacks first.
- Folders that a test makes (``tmp_path``, ``tempfile``) are the same ones on all ranks.
- What came of each test is a line of JSON in ``RESULTS``.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import hashlib
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from benchmarks.suites.systems import put_under

LIMIT = 40.0
"""Seconds of one test."""
GIVES_UP = datetime.timedelta(seconds=12)
"""After which a collective whose peer has failed raises."""


class Rank:
    """This process: which tests are behind it, and the test that it runs."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.suite, self.system = os.environ["SUITE"], os.environ["SYSTEM"]
        self.folder = Path(os.environ["RESULTS"])
        self.shared = Path(os.environ["SHARED"])
        self.lines = (self.folder / f"{self.rank}.jsonl").open("a", encoding="utf-8")
        self.stacks = (self.folder / f"{self.rank}.stacks").open("a", encoding="utf-8")
        self.test: dict[str, Any] = {}
        self.made = 0
        self.store: Any = None
        if self.ranks > 1:
            port = int(os.environ["SUITES_PORT"])
            self.store = dist.TCPStore("127.0.0.1", port, self.ranks, False, datetime.timedelta(seconds=300))

    def say(self, **what: Any) -> None:
        self.lines.write(json.dumps(what) + "\n")
        self.lines.flush()

    def begin(self, name: str) -> None:
        key = hashlib.sha1(name.encode()).hexdigest()[:12]
        self.test, self.made = {"test": name, "key": key, "outcome": "passed", "message": ""}, 0
        self.say(begin=name)
        reset()  # of what collecting the tests has made
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=self.stacks)
        if self.ranks > 1:
            self._meet(key)
            store = dist.PrefixStore(key, self.store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=GIVES_UP)
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(int(key[:7], 16))
        self.test["began"] = time.perf_counter()

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.test["seconds"] = round(time.perf_counter() - self.test.pop("began"), 2)
        self.say(**self.test)
        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
        self.test = {}
        reset()

    def _meet(self, key: str) -> None:
        """Wait for the others, which may run into a timeout in a test that failed here."""
        self.store.set(f"{key}/{self.rank}", b"")
        self.store.wait([f"{key}/{rank}" for rank in range(self.ranks)], datetime.timedelta(seconds=LIMIT + 60))

    def folder_of(self, number: int | str) -> str:
        path = self.shared / self.test["key"] / str(number)
        path.mkdir(parents=True, exist_ok=True)
        return str(path)


def reset() -> None:
    """Forget what accelerate keeps for the process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    gc.collect()


this: Rank
_behind: set[str] = set()


def pytest_configure(config: Any) -> None:
    global this
    this = Rank()
    behind = this.folder / "behind.txt"
    if behind.exists():
        _behind.update(behind.read_text(encoding="utf-8").split("\n"))
    put_under(this.system, this.suite)
    if this.ranks > 1:
        share_folders()
        if this.suite != "lightning":
            see_cpus()
        else:
            leave_threads()
        if this.suite == "accelerate":
            wait_after_saving()


def share_folders() -> None:
    """Let folders that tests make be the same on all ranks; those that libraries make stay a rank's own."""
    make, leave = tempfile.mkdtemp, tempfile.TemporaryDirectory.cleanup

    def mkdtemp(suffix: Any = None, prefix: Any = None, dir: Any = None) -> str:
        if this.test and dir is None and _called_by_test():
            this.made += 1
            return this.folder_of(this.made)
        return make(suffix, prefix, dir)

    def cleanup(self: Any) -> None:
        if not str(self.name).startswith(str(this.shared)):
            leave(self)
        elif self._finalizer.detach():  # another rank may still be in it
            pass

    tempfile.mkdtemp = mkdtemp
    uuid.uuid4 = lambda: uuid.UUID(int=random.getrandbits(128), version=4)  # of which tests make names of folders
    tempfile.TemporaryDirectory.cleanup = cleanup  # type: ignore[method-assign]


def leave_threads() -> None:
    """Hide TrueShard's daemon that watches for stalls from Lightning's own check for threads that a test leaves."""
    every = threading.enumerate
    threading.enumerate = lambda: [thread for thread in every() if thread.name != "trueshard-waiting"]


def see_cpus() -> None:
    """Let accelerate count processes without a device, whatever a test says; scripts do it by ``use_cpu``."""
    from accelerate.state import PartialState

    begin = PartialState.__init__

    @functools.wraps(begin)
    def begin_on_cpu(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        begin(self, True, **kwargs)

    PartialState.__init__ = begin_on_cpu


def wait_after_saving() -> None:
    """Let all ranks read what the first has written, as a script would by ``wait_for_everyone``."""
    import accelerate

    for name in ("save_model", "save_state"):
        setattr(accelerate.Accelerator, name, _then_wait(getattr(accelerate.Accelerator, name)))


def _then_wait(function: Any) -> Any:
    @functools.wraps(function)
    def and_wait(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if dist.is_initialized():
            dist.barrier()
        return result

    return and_wait


def _called_by_test() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(("/tempfile.py", "/contextlib.py")):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return "/tests/" in name or "test_utils" in name or name.endswith("testing_utils.py")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    return Path(this.folder_of("tmp"))


@pytest.fixture
def tmpdir(tmp_path: Path) -> Any:
    import _pytest._py.path

    return _pytest._py.path.local(tmp_path)


@pytest.fixture
def accelerator() -> Any:
    """What the main function of Accelerate's scripts gives to those of its functions that are tests."""
    import accelerate

    return accelerate.Accelerator()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    chosen = os.environ.get("CHOSEN")
    names = set(Path(chosen).read_text(encoding="utf-8").split("\n")) if chosen else None
    kept = [item for item in items if item.nodeid not in _behind and (names is None or item.nodeid in names)]
    items[:] = kept
    this.say(tests=len(kept))


def pytest_sessionfinish() -> None:
    this.say(finished=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Iterator[None]:
    this.begin(item.nodeid)
    try:
        yield
    finally:
        this.end()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    result = yield
    report = result.get_result()
    if report.failed or (report.skipped and report.when != "teardown"):
        if this.test["outcome"] == "passed":
            this.test["outcome"] = "failed" if report.failed else "skipped"
            this.test["message"] = _message(call, report)
        if report.failed:
            this.test.setdefault("trace", str(report.longrepr)[-6000:])
            let_go(call)


def _message(call: Any, report: Any) -> str:
    if report.skipped:
        return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[:300]
    error = call.excinfo.value
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def let_go(call: Any) -> None:
    """Close this rank's end of a failed test's group: frames of the error hold models, and these hold the group."""
    errors, seen = [call.excinfo.value] if call.excinfo else [], set()
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        errors += [error.__context__, error.__cause__]
    with contextlib.suppress(Exception):
        if this.ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()
    gc.collect()
