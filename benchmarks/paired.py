"""Times ways of doing the same thing against one another, and says how sure a ratio is.

- The ways take turns, forwards and then backwards (first, second, second, first), so that a drift of the machine falls
  on all alike. One such round is one sample: the ratio of the sums of two ways.
- The median of the samples is reported, with a 95% interval by bootstrap. One is in the interval where no difference
  can be told.
- Two clocks: the wall's, which is what a user waits for, and the processor time of the process, which other programs on
  the machine do not disturb.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


def fours(one: Callable[[int], torch.Tensor], *, warm_up: int, samples: int) -> torch.Tensor:
    """``rounds`` of two ways, which are four runs each."""
    return rounds(one, 2, warm_up=warm_up, samples=samples)


def rounds(one: Callable[[int], torch.Tensor], ways: int, *, warm_up: int, samples: int) -> torch.Tensor:
    """Seconds of all ways, in rounds.

    Args:
        one: runs a way, by its number, once; returns seconds, one number a clock.
        ways: how many there are.
        warm_up: runs of each before the first sample: the first ones allocate, and make state.
        samples: number of rounds.

    Returns:
        float64 ``[samples, ways, clocks…]``: of each round, the seconds of both runs of each way.
    """
    for _ in range(warm_up):
        for way in range(ways):
            one(way)
    gc.collect()
    seconds = []
    for _ in range(samples):
        forwards = [one(way) for way in range(ways)]
        backwards = [one(way) for way in reversed(range(ways))]
        seconds.append(torch.stack(forwards) + torch.stack(backwards[::-1]))
    return torch.stack(seconds)


def few(samples: int, quick: bool) -> int:
    """How many samples to take: as many as said, or one, from which one sees no more than that it runs."""
    return 1 if quick else samples


def clocked(function: Callable[[], object]) -> torch.Tensor:
    """Seconds by the wall's and the processor's clock, float64 ``[2]``; ranks begin together."""
    dist.barrier()
    began = time.perf_counter(), time.process_time()
    function()
    ended = time.perf_counter(), time.process_time()
    return torch.tensor(ended, dtype=torch.float64) - torch.tensor(began, dtype=torch.float64)


@dataclass(frozen=True)
class Ratio:
    """What samples of one way over another say."""

    median: float
    low: float
    high: float
    """The 95% interval of the median."""
    tenth: float
    ninetieth: float
    """Percentiles of the samples themselves."""

    @classmethod
    def of(cls, samples: torch.Tensor) -> Ratio:
        """Of ratios, ``[n]``."""
        samples = samples.double()
        tenth, ninetieth = samples.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
        return cls(median(samples), *interval(samples), tenth, ninetieth)

    def cells(self) -> tuple[str, str, str]:
        """Median, interval, spread."""
        return (
            f"{self.median:.3f}",
            f"{self.low:.3f} to {self.high:.3f}",
            f"{self.tenth:.2f} to {self.ninetieth:.2f}",
        )

    def short(self) -> str:
        """Median and interval in one cell."""
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


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
