"""The parameters of a test of which `make test` runs some, and `make test-rest` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_but(kept: Collection[Any], values: Iterable[Any], unpack: bool = False) -> list[Any]:
    """Every value; those that are not kept are of the rest. `unpack`: a value is a tuple of several parameters'."""
    every = list(values)
    assert all(each in every for each in kept), [each for each in kept if each not in every]
    return [
        each if each in kept else pytest.param(*(each if unpack else (each,)), marks=pytest.mark.rest) for each in every
    ]
