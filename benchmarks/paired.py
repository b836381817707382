"""Times two ways of doing the same thing against one another, and says how sure the ratio is.

- The ways alternate first, second, second, first, so that a drift of the machine falls on both alike. One such four is
  one sample: the ratio of the two sums.
- The median of the samples is reported, with a 95% interval by bootstrap. One is in the interval where no difference
  can be told.
- Two clocks: the wall's, which is what a user waits for, and the processor time of the process, which other programs on
  the machine do not disturb.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def fours(one: Callable[[int], torch.Tensor], *, warm_up: int, samples: int) -> torch.Tensor:
    """Seconds of both ways, in fours.

    Args:
        one: runs way 0 or 1 once; returns seconds, one number a clock.
        warm_up: runs of each before the first sample: the first ones allocate, and make state.
        samples: number of fours.

    Returns:
        float64 ``[samples, 2, clocks]``: of each four, the seconds of both runs of each way.
    """
    for _ in range(warm_up):
        one(0), one(1)
    gc.collect()
    found = []
    for _ in range(samples):
        first, second, third, fourth = one(0), one(1), one(1), one(0)
        found.append(torch.stack([first + fourth, second + third]))
    return torch.stack(found)


def clocked(function: Callable[[], object]) -> torch.Tensor:
    """Seconds by the wall's and the processor's clock, float64 ``[2]``; ranks begin together."""
    dist.barrier()
    began = time.perf_counter(), time.process_time()
    function()
    ended = time.perf_counter(), time.process_time()
    return torch.tensor(ended, dtype=torch.float64) - torch.tensor(began, dtype=torch.float64)


def median(samples: torch.Tensor) -> float:
    """The median of ``samples``, ``[n]``."""
    return samples.quantile(0.5).item()


def interval(samples: torch.Tensor, draws: int = 2000) -> tuple[float, float]:
    """95% interval of the median of ``samples``, float64 ``[n]``, by bootstrap."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, len(samples), (draws, len(samples)), generator=generator)
    medians = samples[chosen].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
