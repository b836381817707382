"""The report of a verification: a point for each line of the contract, as text, as JSON, and as one HTML file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trueshard.files import replace_text
from trueshard.planner.report.frame import framed
from trueshard.verification.compare import Comparison

if TYPE_CHECKING:
    from trueshard.verification.runs import Reference

Status = Literal["held", "broken", "not reached"]

VALUES = {kind: kind for kind in ("losses", "gradients", "gradient norm", "parameters", "buffers")}  # → its point
VALUES["state"] = "optimizer state"
ASPECTS = {aspect: aspect for aspect in ("names", "dtypes", "trainability", "ties")}  # of the structure → its point
ASPECTS["membership"] = "optimizer membership"
ROUND_TRIP, CONTINUED, NO_SIDE_EFFECT = "checkpoint round trip", "training from it", "save without side effect"
COPIES = "what ranks hold in common"
BITS = "hash of each step"
PLAIN, EXACT = "mixed precision, compiling", "exact sums beside plain ones"
NEAR_LOSSES, NEAR_MOVED = 0.05, 0.8
"""Allowed distance of losses and updates from plain training. Single updates of Adam turn with the sign of a small
gradient; one that is left out, or twice as large, is 1 away."""
CLOSEST = 20
PACKAGE = "trueshard.verification"


@dataclass(frozen=True)
class ContractPoint:
    """One point of the contract."""

    name: str
    status: Status
    detail: str
    """The comparison and its result; for a broken point, the first thing that is wrong."""
    parameter: str | None = None
    """Name of the tensor that is wrong first, for a broken point; None if it is no tensor."""
    step: int | None = None
    """First step at which a broken point is wrong; 0: before training."""
    difference: float | None = None
    """Largest difference of an element there."""


@dataclass(frozen=True)
class Failure:
    """The reason for which a process ended before its work was done."""

    rank: int
    stage: str
    kind: str  # ``"refused"`` by ``shard()``, a wrong ``"input"``, or ``"failed"``
    words: str
    trace: str
    at: float  # seconds since the epoch: the first failure is the cause


@dataclass(frozen=True)
class Verified:
    """The report of ``trueshard.verify``; ``print`` shows it."""

    points: tuple[ContractPoint, ...]
    setting: Mapping[str, Any]
    """Model, ranks, steps and the like, as plain values."""
    notes: tuple[str, ...]
    """Assumptions, and parts that were made smaller, in sentences."""
    closest: tuple[Comparison, ...] = ()
    """The comparisons that came closest to what is allowed, or went beyond."""
    plan: str = ""
    """The plan that was applied, as a table."""
    trace: str = ""
    """Traceback of a run that failed."""

    @property
    def held(self) -> bool:
        """True if every point of the contract holds."""
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
        """Return JSON values: ``held``, ``points``, ``setting``, ``notes``, ``closest``, ``plan``, ``trace``.

        Infinite differences (a tensor that is missing, or NaN on one side) are None.
        """
        from pydantic_core import to_jsonable_python

        return dict(to_jsonable_python({"held": self.held, **vars(self)}, inf_nan_mode="null"))

    def to_json(self) -> str:
        """Return ``as_dict`` as text."""
        return json.dumps(self.as_dict(), indent=2)


def headline(setting: Mapping[str, Any]) -> str:
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
    if report.held:
        return "Sharding changes where the tensors live, and nothing else."
    broken = [point.name for point in report.points if point.status == "broken"]
    return f"The contract is broken: {', '.join(broken)}."


def point_of(name: str, found: Sequence[Comparison], nothing: str, rounding_alone: int = 0) -> ContractPoint:
    """Return the point for some comparisons; ``nothing``: its detail without any; ``rounding_alone``: of how many."""
    if not found:
        return ContractPoint(name, "held", nothing)
    wrong = [each for each in found if not each.held]
    if not wrong:
        return ContractPoint(name, "held", _held(found, rounding_alone))
    step = min(each.step for each in wrong)
    first = max((each for each in wrong if each.step == step), key=lambda each: (bool(each.words), each.excess))
    more = len({each.name for each in wrong}) - 1
    others = f"; {more} more are wrong in that step or later" if more else ""
    when = f"after step {step}" if step else "before training"
    if first.words:
        detail = f"{first.name!r} {first.words}, {when}{others}".removeprefix("'' ")
    else:
        allowed = (
            f"{first.relative:.2g} of its size, allowed {first.tolerance:.1g}" if first.tolerance else "not a bit may"
        )
        what = f"{first.name!r} is " if first.name else ""
        detail = f"{what}{first.largest:.3g} apart {when} ({allowed}){others}"
    return ContractPoint(name, "broken", detail, first.name or None, step, first.largest)


def _held(found: Sequence[Comparison], rounding_alone: int) -> str:
    count = len({each.name for each in found})
    steps = len({each.step for each in found})
    what = f"{count} compared" if count > 1 else "compared"
    when = f" at {steps} steps" if steps > 1 else ""
    worst = max(found, key=lambda each: each.excess)
    if not worst.relative:
        said = "no bit differs"
    else:
        most = max((each.relative for each in found if each.tolerance < 1), default=worst.relative)
        said = f"at most {most:.1g} of their size apart, as by rounding"
    alone = f"; {rounding_alone} are nothing but rounding" if rounding_alone else ""
    return f"{what}{when}, {said}{alone}"


def contract(
    known: Reference, sharded: Any, restored: Any, setting: Mapping[str, Any], notes: Sequence[str]
) -> Verified:
    """Return the report of the results of the three runs, or of the ``Failure`` of one; None: it was not begun."""
    ranks = setting["ranks"]
    if isinstance(sharded, Failure):
        broken = ContractPoint("runs", "broken", _told(sharded), step=_step(sharded))
        rest = [*VALUES.values(), COPIES, *ASPECTS.values(), ROUND_TRIP, CONTINUED, NO_SIDE_EFFECT]
        points = (broken, *(ContractPoint(name, "not reached", "") for name in rest))
        return Verified(points, setting, tuple(notes), trace=sharded.trace)
    plain = []
    if known.plain is not None:  # whether mixed precision or compiling still trains what plain training does
        losses, moved = known.plain
        detail = f"losses {losses:.1g} and updates {moved:.1g} of their size from training without it"
        is_near = losses <= NEAR_LOSSES and moved <= NEAR_MOVED
        plain = [ContractPoint(EXACT if known.hashes else PLAIN, "held" if is_near else "broken", detail)]
    steps: Sequence[Comparison] = sharded["steps"]
    points = (
        ContractPoint("runs", "held", f"forward, backward and step on {ranks} rank{'s' if ranks > 1 else ''}"),
        *(
            point_of(
                name,
                [step for step in steps if step.kind == kind],
                "there are none",
                rounding_alone=known.tolerances.rounding_alone(kind, setting["steps"]),
            )
            for kind, name in VALUES.items()
        ),
        _point(COPIES, sharded["in common"][1], f"{sharded['in common'][0]} parameters, no bit differs at the end"),
        *plain,
        *_bits(known, sharded, restored, setting),
        *_aspects(known, sharded),
        *_checkpoint(sharded, restored, setting),
        _point(NO_SIDE_EFFECT, sharded["disturbed"], "before the first step and between steps, no bit differs"),
    )
    failed = isinstance(restored, Failure)
    told = sorted([*steps, *([] if failed else restored["steps"])], key=lambda each: each.excess)
    worst = {(each.kind, each.name): each for each in told}
    closest = sorted(worst.values(), key=lambda each: each.excess, reverse=True)[:CLOSEST]
    trace = restored.trace if failed else ""
    return Verified(points, setting, tuple(notes), tuple(closest), str(sharded["plan"]), trace)


def _bits(known: Reference, sharded: Any, restored: Any, setting: Mapping[str, Any]) -> list[ContractPoint]:
    """Return the point that holds the hashes of each step against each other, for an exact run."""
    if not known.hashes:
        return []
    runs = [(_ranks(1), known.hashes), (_ranks(setting["ranks"]), sharded["hashes"])]
    if not isinstance(restored, Failure):
        runs.append((f"{_ranks(setting['other_ranks'])} from the checkpoint", restored["hashes"]))
    wrong, held = None, []
    for step in known.hashes:
        by_hash: dict[str, list[str]] = {}
        for ranks, hashes in runs:
            if step in hashes:
                by_hash.setdefault(hashes[step], []).append(ranks)
        if len(by_hash) > 1 and wrong is None:
            wrong = step
        held.append(f"step {step}: " + "; ".join(f"{value} on {', '.join(on)}" for value, on in by_hash.items()))
    return [ContractPoint(BITS, "held" if wrong is None else "broken", ". ".join(held), step=wrong)]


def _aspects(known: Reference, sharded: Mapping[str, Any]) -> list[ContractPoint]:
    structure, result = known.structure, []
    dtypes = {dtype.partition(" ")[0].removeprefix("torch.") for dtype in structure.dtypes.values()}
    counts = {
        "names": f"{len(structure.names)}, in order, after shard() and after the last step",
        "dtypes": ", ".join(sorted(dtypes)),
        "trainability": f"{sum(structure.trainability.values())} of {len(structure.trainability)} trainable",
        "ties": f"{len(structure.ties)}" + (f": {' = '.join(structure.ties[0])}" if structure.ties else ""),
        "membership": f"{len(structure.membership)} group{'s' if len(structure.membership) != 1 else ''}",
    }
    for aspect, name in ASPECTS.items():
        first, last = (sharded[each].get(aspect) for each in ("structure", "structure at the end"))
        wrong = list(sharded["computed in"]) if aspect == "dtypes" else []
        wrong += [f"after shard(): {first}"] if first else []
        wrong += [f"after the last step: {last}"] if last else []
        result.append(_point(name, wrong, counts[aspect], step=0 if first else None))
    return result


def _point(name: str, wrong: Sequence[str], held: str, step: int | None = None) -> ContractPoint:
    if not wrong:
        return ContractPoint(name, "held", held)
    more = f"; {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return ContractPoint(name, "broken", f"{wrong[0]}{more}", step=step)


def _checkpoint(sharded: Mapping[str, Any], restored: Any, setting: Mapping[str, Any]) -> list[ContractPoint]:
    where = [f"on the same {setting['ranks']}", f"on {setting['other_ranks']}"]
    point = _loaded(sharded["loaded"], sharded["structure loaded"], sharded["disk"], where[0])
    if isinstance(restored, Failure):
        told = _told(restored)
        if "step" not in restored.stage:
            return [
                ContractPoint(ROUND_TRIP, "broken", f"{where[1]}: {told}"),
                ContractPoint(CONTINUED, "not reached", ""),
            ]
        return [point, ContractPoint(CONTINUED, "broken", told, step=_step(restored))]
    other = _loaded(restored["loaded"], restored["structure"], [], where[1])
    if point.status == other.status == "held":
        point = ContractPoint(ROUND_TRIP, "held", f"{where[0]} and {other.detail}")
    elif point.status == "held":
        point = other
    return [point, point_of(CONTINUED, restored["steps"], "there is nothing to compare")]


def _loaded(
    found: Sequence[Comparison], structure: Mapping[str, str], disk: Sequence[str], where: str
) -> ContractPoint:
    point = point_of(ROUND_TRIP, found, "there is nothing to load")
    if point.status == "held" and (wrong := [*disk, *(f"{where}: {words}" for words in structure.values())]):
        return ContractPoint(ROUND_TRIP, "broken", wrong[0])
    return replace(point, detail=f"{where}: {point.detail}")


def _told(failure: Failure) -> str:
    return f"rank {failure.rank}, {failure.stage}: {failure.words}"


def _step(failure: Failure) -> int | None:
    word = failure.stage.removeprefix("step ").partition(":")[0]
    return int(word) if word.isdecimal() else None


def write_page(report: Verified, path: Path) -> None:
    """Write the page; an existing file is replaced when the new one is complete."""
    name, _, settings = headline(report.setting).partition("\n")
    page = framed(
        title=f"{report.setting['name']}: {verdict(report)}",
        text=str(report),
        data=report.as_dict() | {"headline": name, "settings": settings, "verdict": verdict(report)},
        main=(PACKAGE, "page.html"),
        styles=[(PACKAGE, "page.css")],
        scripts=[(PACKAGE, "page.js")],
    )
    replace_text(path, page)
