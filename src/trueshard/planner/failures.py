"""Cost of lost processes to a plan: how often one is lost, what keeping a step takes, and how often to keep one.

The interval is Young's ("A first order approximation to the optimum checkpoint interval", 1974): √(2·δ·M), with δ
seconds to keep a step and M between two losses, each of which costs half an interval of steps that are trained again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trueshard.planner.hardware import Hardware
from trueshard.plans import Forecast
from trueshard.text import size

HOURS_OF_A_GPU = 54 * 24 * 16_384 / 419
"""Hours of one GPU between two losses that end a job: 419 unexpected ones in 54 days of 16,384 H100s, "The Llama 3 Herd
of Models" (2024), section 3.3.4."""


@dataclass(frozen=True)
class FailureCost:
    """Costs of a plan's losses. Seconds and bytes."""

    between_losses: float
    """Seconds between two losses of the whole job."""
    state_bytes: int
    """Bytes of a rank that a snapshot, or a checkpoint, copies to host memory."""
    stall: float
    """Seconds in which a step stands still for that."""
    every: int
    """Steps between two that are kept, at which keeping and training again together cost least."""
    share: float
    """Share of time that both take then."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return what a reader wants to know, in sentences."""
        hours = self.between_losses / 3600
        often = f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours"
        return (
            f"At {HOURS_OF_A_GPU:,.0f} hours of a GPU between losses (Llama 3 on 16,384 H100s), every {often}.",
            f"A snapshot copies {size(self.state_bytes)} of each rank in {self.stall:.2g} s, and two take "
            f"{size(2 * self.state_bytes)} of host memory: train.memory_every = {self.every} costs least, "
            f"{self.share:.2g}% of the time with the steps that are trained again.",
            f"Without snapshots, train.checkpoint_every = {self.every} does, if a disk takes one in that time.",
        )


def failure_cost(forecast: Forecast, hardware: Hardware) -> FailureCost:
    """Return what losses cost the plan of a forecast."""
    kinds = forecast.peak_by_kind
    state = kinds.get("parameters", 0) + kinds.get("optimizer", 0)
    # What rests on the host is copied there; what rests on the device comes over its link first.
    stall = state / hardware.host_bandwidth + forecast.host_bytes / hardware.host_memory_bandwidth
    state += forecast.host_bytes
    between = HOURS_OF_A_GPU * 3600 / forecast.ranks
    step = forecast.step_seconds
    every = max(1, round(math.sqrt(2 * stall * between) / step)) if step else 1
    share = 100 * (stall / (every * step) + every * step / 2 / between) if step else 0.0
    return FailureCost(between, state, stall, every, share)
