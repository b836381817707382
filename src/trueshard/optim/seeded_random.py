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
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def torch_states(device: torch.device | None) -> dict[str, bytes]:
    """Return the states of torch's generators, of the CPU and of an accelerator, by name. Draws no number."""
    states = {"torch": bytes(torch.get_rng_state().numpy())}
    if device is not None and device.type != "cpu" and hasattr(torch.get_device_module(device), "get_rng_state"):
        states[device.type] = bytes(torch.get_device_module(device).get_rng_state().cpu().numpy())
    return states


@contextlib.contextmanager
def drawn_from(*numbers: int) -> Iterator[None]:
    """Inside, torch's generators on the CPU and on this rank's accelerator follow from ``numbers``; then as before."""
    device = torch.accelerator.current_accelerator(check_available=True)
    kind, devices = ("cuda", []) if device is None else (device.type, [torch.accelerator.current_device_index()])
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed_of(*numbers))
        yield


@contextlib.contextmanager
def sample_rng(seed: int, step: int, microbatch: int) -> Iterator[None]:
    """Make what is drawn inside (dropout, noise) follow from these three numbers alone::

        for number in mine:  # this rank's microbatches, by their numbers among those of all ranks
            with trueshard.sample_rng(seed, step, number), trueshard.accumulate(model, last=number == mine[-1]):
                mean(loss_sum(model, microbatches[number])).backward()

    Forward and backward belong inside. Recomputed activations draw the same numbers again. torch's generators on the
    CPU and on this rank's accelerator are as they were afterwards; Python's and numpy's are left alone.

    Args:
        seed: of the run.
        step: of the optimizer.
        microbatch: its number in the step, over all ranks.
    """
    with drawn_from(seed, step, microbatch):
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
