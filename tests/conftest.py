"""What every test file shares: the workers of the parity helper, made once a session, and when to skip."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from parity import Pool, Ranks


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


@pytest.fixture(scope="session")
def alone(pool: Pool) -> Ranks:
    """One process: what the sharded runs are held against."""
    return Ranks(1, pool)


@pytest.fixture(scope="session")
def ranks2(pool: Pool) -> Ranks:
    return Ranks(2, pool)


@pytest.fixture(scope="session")
def ranks3(pool: Pool) -> Ranks:
    return Ranks(3, pool)


@pytest.fixture(scope="session")
def ranks4(pool: Pool) -> Ranks:
    return Ranks(4, pool)
