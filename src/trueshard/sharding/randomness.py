"""Random numbers of a microbatch that do not depend on which rank computes it, or on what it computed before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trueshard.optim.seeded_random import drawn_from


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
    with drawn_from(seed, step, microbatch):
        yield
