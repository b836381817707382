"""Environment variables, by which some peers are told what to do; they would also tell the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Inside, these are set; afterwards, all is as before."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
