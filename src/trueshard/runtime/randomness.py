"""Random numbers of a microbatch that do not depend on which rank computes it, or on what it computed before."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def seed_of(seed: int, step: int, microbatch: int) -> int:
    """Return the seed of the generators for one microbatch: 63 bits of a hash."""
    told = f"{seed} {step} {microbatch}".encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "big") >> 1


@contextlib.contextmanager
def sample_rng(seed: int, step: int, microbatch: int) -> Iterator[None]:
    """Make what is drawn inside (dropout, noise) follow from these three numbers alone::

        for number in own:  # this rank's microbatches, by their numbers among those of all ranks
            with trueshard.sample_rng(seed, step, number), trueshard.accumulate(model, last=number == own[-1]):
                mean(loss_sum(model, microbatches[number])).backward()

    Forward and backward belong inside. Recomputed activations draw the same numbers again. torch's generators on the
    CPU and on this rank's accelerator are as they were afterwards; Python's and numpy's are left alone.

    Args:
        seed: of the run.
        step: of the optimizer.
        microbatch: its number in the step, over all ranks.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    kind, devices = ("cuda", []) if device is None else (device.type, [torch.accelerator.current_device_index()])
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed_of(seed, step, microbatch))
        yield
