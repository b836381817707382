"""Random numbers that follow from a few whole numbers alone: not from the rank, nor from what was drawn before."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from trueshard import _torch

DRAWS = "draws"
"""Key of the groups of an optimizer that draws, with exact sums: [seed, steps]. Checkpoints have it as any other."""


def seed_of(*numbers: int) -> int:
    """Return a seed for generators: 63 bits of a hash of ``numbers``."""
    told = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "big") >> 1


@contextlib.contextmanager
def drawn_from(*numbers: int) -> Iterator[None]:
    """Inside, torch's generators on the CPU and on this rank's accelerator follow from ``numbers``; then as before."""
    device = torch.accelerator.current_accelerator(check_available=True)
    kind, devices = ("cuda", []) if device is None else (device.type, [torch.accelerator.current_device_index()])
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed_of(*numbers))
        yield


class SameDraws(_torch.DispatchMode):
    """Inside, each operator that draws begins from one seed, so that the order of draws is of no account."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(self._seed)
        return func(*args, **(kwargs or {}))
