"""Cost of lost processes to a plan: how often one is lost, what keeping a step takes, and how often to keep one.

The interval is Young's ("A first order approximation to the optimum checkpoint interval", 1974): √(2·δ·M), with δ
seconds to keep a step and M between two losses, each of which costs half an interval of steps that are trained again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trueshard.checkpoint.snapshot_parts import SLOTS
from trueshard.planner.hardware import Hardware
from trueshard.plans import Plan
from trueshard.text import size

HOURS_OF_A_GPU = 54 * 24 * 16_384 / 419
"""Hours of one GPU between two losses that end a job: 419 unexpected ones in 54 days of 16,384 H100s, "The Llama 3 Herd
of Models" (2024), section 3.3.4."""


@dataclass(frozen=True)
class FailureCost:
    """Costs of a plan's losses. Seconds and bytes; goodput: the share of time in steps that count."""

    between_losses: float
    """Seconds between two losses of the whole job."""
    state_bytes: int
    """Bytes of a rank that a snapshot, or a checkpoint, copies to host memory."""
    snapshots: int
    """Snapshots of a rank's state that are in the memory of a host at once."""
    host_lack: int
    """Bytes that a rank's share of host memory lacks for them; 0 or less if none, or if what it has is not known."""
    stall: float
    """Seconds in which a step stands still for one."""
    every: int
    """Steps between two: those of the run, if it keeps any, else as ``best_every``."""
    goodput: float
    best_every: int
    """Steps between two at which keeping and training again together cost least."""
    best_goodput: float

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return what a reader wants to know, in sentences."""
        hours, best = self.between_losses / 3600, self.best_every
        often = f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours"
        lack = f", {size(self.host_lack)} more than there is (--host-memory)" if self.host_lack > 0 else ""
        better = f" ({best} costs least, {self.best_goodput:.3%})" if self.every != best else ", which costs least"
        return (
            f"At {HOURS_OF_A_GPU:,.0f} hours of a GPU between losses (Llama 3 on 16,384 H100s), every {often}.",
            f"A snapshot copies {size(self.state_bytes)} of each rank in {self.stall:.2g} s, and {self.snapshots} take "
            f"{size(self.snapshots * self.state_bytes)} of host memory{lack}.",
            f"Goodput: with train.memory_every = {self.every}{better}, {self.goodput:.3%} of the time is in steps that "
            f"count, less {100 / self.between_losses:.2g}% for each second of a start after a loss.",
            f"Without snapshots, train.checkpoint_every = {best} costs as much, if a disk takes one in that time.",
        )


def failure_cost(plan: Plan, hardware: Hardware, snapshots: int = 0, every: int | None = None) -> FailureCost:
    """Return what losses cost a plan, of its forecast.

    ``snapshots``: in the forecast's host memory, of a rank; ``every``: steps between them, if that is settled.
    """
    forecast = plan.forecast
    assert forecast is not None
    between, state, step = HOURS_OF_A_GPU * 3600 / forecast.ranks, forecast.snapshot_bytes, forecast.step_seconds
    stall = state / (hardware.host_memory_bandwidth if plan.offload == "cpu" else hardware.host_bandwidth)
    lack = forecast.host_lack + max(0, SLOTS - snapshots) * state if forecast.host_budget_bytes is not None else 0
    best = max(1, round(math.sqrt(2 * stall * between) / step)) if step else 1
    every = every or best
    shares = [1 / (1 + stall / (n * step) + n * step / 2 / between) if step else 1.0 for n in (every, best)]
    return FailureCost(between, state, snapshots or SLOTS, lack, stall, every, shares[0], best, shares[1])
