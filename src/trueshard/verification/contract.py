"""From what the three runs found to the points of the contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trueshard.verification.beside_plain import BesidePlain
from trueshard.verification.compare import Apart, Tolerances
from trueshard.verification.job import Failure
from trueshard.verification.reference import Reference
from trueshard.verification.report import Point, Verified, excess, point_of

VALUES = {
    "losses": "losses",
    "gradients": "gradients",
    "gradient norm": "gradient norm",
    "parameters": "parameters",
    "buffers": "buffers",
    "state": "optimizer state",
}
"""Kinds of values, and what their points are called."""
ASPECTS = {
    "names": "names",
    "dtypes": "dtypes",
    "trainability": "trainability",
    "ties": "ties",
    "membership": "optimizer membership",
}
ROUND_TRIP, GOING_ON, UNDISTURBED = "checkpoint round trip", "training from it", "save without side effect"
PLAIN = "mixed precision, compiling"
NEAR_LOSSES, NEAR_MOVED = 0.05, 0.8
"""How far those may take losses and updates. Single updates of Adam turn with the sign of a small gradient; one that is
left out, or twice as large, is 1 away."""
SHOWN = 20
"""Comparisons that a report keeps."""


def contract(
    known: Reference, sharded: Any, restored: Any, setting: Mapping[str, Any], notes: Sequence[str]
) -> Verified:
    """The report.

    Args:
        known: what the reference left.
        sharded, restored: what those runs left, or the ``Failure`` of one; ``restored`` is None if it was not begun.
        setting: what was run.
        notes: sentences.
    """
    ranks = setting["ranks"]
    if isinstance(sharded, Failure):
        broken = Point("runs", "broken", _told(sharded), step=_step(sharded))
        rest = [*VALUES.values(), *ASPECTS.values(), ROUND_TRIP, GOING_ON, UNDISTURBED]
        points = (broken, *(Point(name, "not reached", "") for name in rest))
        return Verified(points, setting, tuple(notes), trace=sharded.trace)
    runs = Point("runs", "held", f"forward, backward and step on {ranks} rank{'s' if ranks > 1 else ''}")
    points = (
        runs,
        *_values(known, sharded["apart"], setting["steps"]),
        *([] if known.plain is None else [_plain(known.plain)]),
        *_aspects(known, sharded),
        *_checkpoint(sharded, restored, setting),
        _undisturbed(sharded["disturbed"]),
    )
    told = [*sharded["apart"], *([] if isinstance(restored, Failure) else restored["apart"])]
    trace = restored.trace if isinstance(restored, Failure) else ""
    return Verified(points, setting, tuple(notes), tuple(_closest(told)), str(sharded["plan"]), trace)


def _values(known: Reference, aparts: Sequence[Apart], steps: int) -> list[Point]:
    tolerances = Tolerances(known.noise, known.floor)
    found = []
    for kind, name in VALUES.items():
        mine = [each for each in aparts if each.kind == kind]
        alone = len(tolerances.rounding_alone(kind, steps))
        found.append(point_of(name, mine, "there are none", alone))
    return found


def _plain(found: BesidePlain) -> Point:
    """Whether what both sides of the other points compute is the training that was asked for, but for rounding."""
    detail = f"losses {found.losses:.1g} and updates {found.moved:.1g} of their size from training without it"
    is_near = found.losses <= NEAR_LOSSES and found.moved <= NEAR_MOVED
    return Point(PLAIN, "held" if is_near else "broken", detail)


def _aspects(known: Reference, sharded: Mapping[str, Any]) -> list[Point]:
    structure, found = known.structure, []
    counts = {
        "names": f"{len(structure.names)}, in order, after shard() and after the last step",
        "dtypes": ", ".join(
            sorted({each.partition(" ")[0].removeprefix("torch.") for each in structure.dtypes.values()})
        ),
        "trainability": f"{sum(structure.trainable.values())} of {len(structure.trainable)} trainable",
        "ties": f"{len(structure.ties)}" + (f": {' = '.join(structure.ties[0])}" if structure.ties else ""),
        "membership": f"{len(structure.membership)} group{'s' if len(structure.membership) != 1 else ''}",
    }
    for aspect, name in ASPECTS.items():
        words = sharded["structure"].get(aspect), sharded["structure at the end"].get(aspect)
        if aspect == "dtypes" and sharded["computed in"]:
            found.append(Point(name, "broken", sharded["computed in"]))
        elif words[0]:
            found.append(Point(name, "broken", f"after shard(): {words[0]}", step=0))
        elif words[1]:
            found.append(Point(name, "broken", f"after the last step: {words[1]}"))
        else:
            found.append(Point(name, "held", counts[aspect]))
    return found


def _checkpoint(sharded: Mapping[str, Any], restored: Any, setting: Mapping[str, Any]) -> list[Point]:
    where = [f"on the same {setting['ranks']}", f"on {setting['other_ranks']}"]
    point = _loaded(sharded["loaded"], sharded["structure loaded"], sharded["disk"], where[0])
    if isinstance(restored, Failure):
        told = _told(restored)
        if "step" not in restored.stage:
            return [Point(ROUND_TRIP, "broken", f"{where[1]}: {told}"), Point(GOING_ON, "not reached", "")]
        return [point, Point(GOING_ON, "broken", told, step=_step(restored))]
    other = _loaded(restored["loaded"], restored["structure"], [], where[1])
    if point.status == other.status == "held":
        point = Point(ROUND_TRIP, "held", f"{where[0]} and {other.detail}")
    elif point.status == "held":
        point = other
    return [point, point_of(GOING_ON, restored["apart"], "there is nothing to compare")]


def _loaded(aparts: Sequence[Apart], structure: Mapping[str, str], disk: Sequence[str], where: str) -> Point:
    """The point for one load of the checkpoint."""
    point = point_of(ROUND_TRIP, aparts, "there is nothing to load")
    if point.status == "held" and (wrong := [*disk, *(f"{where}: {words}" for words in structure.values())]):
        return Point(ROUND_TRIP, "broken", wrong[0])
    return replace(point, detail=f"{where}: {point.detail}")


def _undisturbed(told: Sequence[str]) -> Point:
    if not told:
        return Point(UNDISTURBED, "held", "before the first step and between steps, no bit differs")
    more = f"; {len(told) - 1} more" if len(told) > 1 else ""
    return Point(UNDISTURBED, "broken", f"{told[0]}{more}")


def _closest(aparts: Iterable[Apart]) -> list[Apart]:
    worst: dict[tuple[str, str], Apart] = {}
    for each in aparts:
        key = each.kind, each.name
        if key not in worst or excess(each) > excess(worst[key]):
            worst[key] = each
    return sorted(worst.values(), key=excess, reverse=True)[:SHOWN]


def _told(failure: Failure) -> str:
    return f"rank {failure.rank}, {failure.stage}: {failure.words}"


def _step(failure: Failure) -> int | None:
    word = failure.stage.removeprefix("step ").partition(":")[0]
    return int(word) if word.isdecimal() else None
