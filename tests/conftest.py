"""What every test file shares: the workers of the parity helper, made once a session, and when to skip."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forks
from chromium import Page
from emulated_cuda import REPORTS
from emulated_cuda.reports import counted_faults, read
from parity import Pool, Ranks
from trueshard.planner import process


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "file for the seconds that each test took, the slowest first"
    parser.addoption("--durations-file", type=Path, help=help)
    parser.addoption("--share", metavar="K/N", help="run the tests of the Kth of N equal shares alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave those of one share; which share a test is in follows from its name."""
    share = config.getoption("share")
    if share is None:
        return
    number, count = map(int, share.split("/"))
    shares: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        shares[zlib.crc32(item.nodeid.encode()) % count == number - 1].append(item)
    config.hook.pytest_deselected(items=shares[False])
    items[:] = shares[True]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    file = config.getoption("durations_file")
    if file is None:
        return
    took: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[report.nodeid] = took.get(report.nodeid, 0.0) + report.duration
    file.parent.mkdir(exist_ok=True)
    slowest = sorted(took.items(), key=lambda each: -each[1])
    file.write_text("".join(f"{seconds:8.2f} {name}\n" for name, seconds in slowest))


def pytest_configure(config: pytest.Config) -> None:
    forks.adopt(process)
    # What the processor can is not tried out by compiling: on a busy machine the trial ends too late, and kernels that
    # another process had compiled with vectors are refused. No test turns vectors off: kernels are kept on disk by
    # configuration, while what a process takes for its vectors it keeps from its first compilation.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    if config.getoption("numprocesses", None):
        forks.start_server()  # here, so that all workers of pytest-xdist share it


def pytest_unconfigure() -> None:
    forks.stop_server()


@pytest.fixture(autouse=True, scope="module")
def _frozen_objects() -> None:
    """Exempt what is there from garbage collection: each simulation of the planner would walk all modules and tests."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    compiler = os.environ.get("CXX", "g++")
    if item.get_closest_marker("compiles") and not shutil.which(compiler):
        pytest.skip(f"torch.compile needs a C++ compiler, and {compiler} is not on the path")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes shared by all sizes; none is started before a test asks for it."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=REPORTS in os.environ)
def _no_fault_of_the_device() -> Iterator[None]:
    """Fail a test in which the emulated CUDA device saw a race, memory read too early, or a broken rule of NCCL."""
    folder = Path(os.environ[REPORTS])
    before = Counter(read(folder))
    yield
    faults = counted_faults(list((Counter(read(folder)) - before).elements()))
    assert not faults, "\n".join(faults[:20])


@pytest.fixture
def differs(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say what is refused or differs on this release of torch; `make versions` puts it into docs/versions.md."""
    return functools.partial(record_property, "differs")


@pytest.fixture(scope="session")
def started_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def browser(started_browser: Page) -> Page:
    """A page in Chromium as it is at first; the process is one for the session."""
    started_browser.requests.clear()
    started_browser.errors.clear()
    started_browser.scheme("light")
    started_browser.resize(1400, 1000)
    return started_browser


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.rest)])
def sizes(request: pytest.FixtureRequest, pool: Pool) -> list[Ranks]:
    """Two ranks, and in the rest three."""
    return [Ranks(request.param, pool)]


def ranks_of(count: int) -> Any:
    """The fixture ``ranks2`` and its kin: so many processes of the pool."""
    return pytest.fixture(scope="session", name=f"ranks{count}")(lambda pool: Ranks(count, pool))


ranks1, ranks2, ranks3, ranks4 = map(ranks_of, (1, 2, 3, 4))


@pytest.fixture(scope="session")
def alone(ranks1: Ranks) -> Ranks:
    """One process: what the sharded runs are held against."""
    return ranks1


@pytest.fixture
def fresh2() -> Iterator[Ranks]:
    """Two processes in which no other test ran, whose models could still be there."""
    workers = Pool()
    yield Ranks(2, workers)
    workers.close()
