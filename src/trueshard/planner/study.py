"""All that is known of one plan: what is printed, drawn, and written as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from trueshard.forecast import Forecast
from trueshard.planner.events import Trace
from trueshard.planner.speed.timeline import Timeline
from trueshard.plans import Plan


@dataclass(frozen=True)
class Alternative:
    """Another plan that was looked at."""

    words: str
    """In a few words what is different, for example ``"reshard never, recompute full, microbatch 2"``."""
    forecast: Forecast


@dataclass(frozen=True)
class Study:
    """A plan, its forecast, and what the forecast was made from."""

    plan: Plan
    forecast: Forecast
    trace: Trace
    """The steady step of the rank that was simulated."""
    timeline: Timeline
    reasons: tuple[str, ...] = ()
    """Why each choice was made, one sentence each."""
    assumptions: tuple[str, ...] = ()
    alternatives: list[Alternative] = field(default_factory=list)
    """Every other plan that was worked out, this one not among them."""
