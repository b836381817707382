"""States of the random number generator, which activation checkpointing keeps to recompute with the same dropout.

They are real tensors in host memory, whatever the device: on a CPU they count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def watching_random_states(seen: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Inside, ``seen(state)`` is called with each result of ``torch.get_rng_state``."""
    original = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = original()
        seen(state)
        return state

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = original
