"""What a verification found: a line for each point of the contract."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trueshard.verification.compare import Apart

Status = Literal["held", "broken", "not reached"]


@dataclass(frozen=True)
class Point:
    """One point of the contract."""

    name: str
    status: Status
    detail: str
    """What was compared and how far apart it was; of a broken point, the first thing that is wrong."""
    parameter: str | None = None
    """Of a broken point: what is wrong first; None where it is no tensor."""
    step: int | None = None
    """Of a broken point: the first step at which it is; 0: before training."""
    difference: float | None = None
    """Of a broken point: the largest difference of an element there."""


@dataclass(frozen=True)
class Verified:
    """What ``trueshard.verify`` returns; ``print`` shows it."""

    points: tuple[Point, ...]
    setting: Mapping[str, Any]
    """What was run: plain values."""
    notes: tuple[str, ...]
    """What was taken for granted or made smaller."""
    closest: tuple[Apart, ...] = ()
    """The comparisons that came closest to what is allowed, or went beyond."""
    plan: str = ""
    """The plan that was applied, as a table."""
    trace: str = ""
    """Of a run that failed: where."""

    @property
    def held(self) -> bool:
        """Whether every point of the contract holds."""
        return all(point.status == "held" for point in self.points)

    def __str__(self) -> str:
        width = max(len(point.name) for point in self.points)
        words = {"held": "held  ", "broken": "BROKEN", "not reached": "      "}
        lines = [headline(self.setting), ""]
        lines += [f"{words[each.status]}  {each.name:<{width}}  {each.detail}".rstrip() for each in self.points]
        if self.trace:
            lines += ["", self.trace.rstrip()]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join([*lines, "", verdict(self)])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: ``held``, ``points``, ``setting``, ``notes``, ``closest``, ``plan``, ``trace``.

        What is infinite (a tensor that is missing, or NaN on one side) is None.
        """
        data = {"held": self.held, **dataclasses.asdict(self)}
        plain: dict[str, Any] = json.loads(json.dumps(_finite(data)))
        return plain

    def to_json(self) -> str:
        """``as_dict`` as text."""
        return json.dumps(self.as_dict(), indent=2)


def headline(setting: Mapping[str, Any]) -> str:
    """What was run, in a line or two."""
    trainable = setting["trainable"]
    trained = "" if trainable == setting["parameters"] else f" ({trainable:,} trained)"
    return (
        f"{setting['name']}: {setting['parameters']:,} parameters{trained}, {', '.join(setting['optimizers'])}\n"
        f"{_ranks(setting['ranks'], setting['device'])} against one process, {setting['steps']} steps; the checkpoint "
        f"of step {setting['save_after']} on {_ranks(setting['other_ranks'])} ({setting['seconds']:.0f} s)"
    )


def _ranks(count: int, device: str = "") -> str:
    return " ".join(word for word in (str(count), device, "ranks" if count > 1 else "rank") if word)


def verdict(report: Verified) -> str:
    """The outcome in a line."""
    if report.held:
        return "Sharding changes where the tensors live, and nothing else."
    broken = [point.name for point in report.points if point.status == "broken"]
    return f"The contract is broken: {', '.join(broken)}."


def point_of(name: str, aparts: Sequence[Apart], nothing: str, rounding_alone: int = 0) -> Point:
    """The point for a set of comparisons.

    Args:
        name: of the point.
        aparts: all of its comparisons.
        nothing: what to say where there are none.
        rounding_alone: how many of its tensors are nothing but rounding, and so say nothing.
    """
    if not aparts:
        return Point(name, "held", nothing)
    wrong = [each for each in aparts if not each.held]
    if not wrong:
        return Point(name, "held", _held(aparts, rounding_alone))
    step = min(each.step for each in wrong)
    first = max((each for each in wrong if each.step == step), key=lambda each: (bool(each.words), excess(each)))
    more = len({each.name for each in wrong}) - 1
    others = f"; {more} more are wrong in that step or later" if more else ""
    when = f"after step {step}" if step else "before training"
    if first.words:
        detail = f"{first.name!r} {first.words}, {when}{others}"
    else:
        allowed = (
            f"{first.relative:.2g} of its size, allowed {first.tolerance:.1g}" if first.tolerance else "not a bit may"
        )
        what = f"{first.name!r} is " if first.name else ""
        detail = f"{what}{first.largest:.3g} apart {when} ({allowed}){others}"
    return Point(name, "broken", detail, first.name or None, step, first.largest)


def excess(apart: Apart) -> float:
    """How near a comparison came to what is allowed: 1 is the limit."""
    if apart.relative == 0:
        return 0.0
    return apart.relative / apart.tolerance if apart.tolerance else math.inf


def _held(aparts: Sequence[Apart], rounding_alone: int) -> str:
    count = len({each.name for each in aparts})
    steps = len({each.step for each in aparts})
    what = f"{count} compared" if count > 1 else "compared"
    when = f" at {steps} steps" if steps > 1 else ""
    worst = max(aparts, key=excess)
    if not worst.relative:
        said = "no bit differs"
    else:
        most = max((each.relative for each in aparts if each.tolerance < 1), default=worst.relative)
        said = f"at most {most:.1g} of their size apart, as by rounding"
    alone = f"; {rounding_alone} are nothing but rounding" if rounding_alone else ""
    return f"{what}{when}, {said}{alone}"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
