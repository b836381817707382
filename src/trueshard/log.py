"""The logger ``trueshard``. At INFO it logs the durations of shard, save, load and plan."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

logger = logging.getLogger("trueshard")


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Log at INFO how long the block took; nothing if it raises. Also a decorator."""
    began = time.perf_counter()
    yield
    logger.info("%s took %.2f s", what, time.perf_counter() - began)
