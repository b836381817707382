"""The report of a verification: a point for each line of the contract, as text, as JSON, and as one HTML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trueshard.files import replace_text
from trueshard.planner.report.frame import framed
from trueshard.verification.compare import Comparison
from trueshard.verification.modules import Located

if TYPE_CHECKING:
    from trueshard.verification.runs import Reference

Status = Literal["held", "broken", "not reached"]

VALUES = {kind: kind for kind in ("losses", "gradients", "gradient norm", "parameters", "buffers")}
VALUES |= {"state": "optimizer state"}
"""Kind of values → name of its point; likewise ``ASPECTS``, of the structure."""
ASPECTS = {aspect: aspect for aspect in ("names", "dtypes", "trainability", "ties")}
ASPECTS |= {"membership": "optimizer membership"}
ROUND_TRIP, CONTINUED, NO_SIDE_EFFECT = "checkpoint round trip", "training from it", "save without side effect"
COPIES = "what ranks hold in common"
BITS = "hash of each step"
PLAIN, EXACT = "mixed precision, compiling", "exact sums beside plain ones"
NEAR_LOSSES, NEAR_MOVED = 0.05, 0.8
"""Allowed distance of losses and updates from plain training. Single updates of Adam turn with the sign of a small
gradient; one that is left out, or twice as large, is 1 away."""
CLOSEST = 20


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
    first: Located | None = None
    """Place at which training first differs, if it does in a step."""

    @property
    def held(self) -> bool:
        """True if every point of the contract holds."""
        return all(point.status == "held" for point in self.points)

    @property
    def head(self) -> str:
        """Name of what was compared, and a line of its settings."""
        return headline(self.setting)

    @property
    def verdict(self) -> str:
        """Result in a sentence."""
        if self.held:
            return "Sharding changes where the tensors live, and nothing else."
        broken = [point.name for point in self.points if point.status == "broken"]
        return f"The contract is broken: {', '.join(broken)}."

    def __str__(self) -> str:
        width = max(len(point.name) for point in self.points)
        words = {"held": "held  ", "broken": "BROKEN", "not reached": "      "}
        lines = [self.head, ""]
        lines += [f"{words[point.status]}  {point.name:<{width}}  {point.detail}".rstrip() for point in self.points]
        if self.first is not None:
            lines += ["", str(self.first)]
        if self.trace:
            lines += ["", self.trace.rstrip()]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join([*lines, "", self.verdict])

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values: ``held``, and the fields by name.

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


def contract(
    reference: Reference, sharded: Any, restored: Any, setting: Mapping[str, Any], notes: Sequence[str]
) -> Verified:
    """Return the report of the results of the three runs, or of the ``Failure`` of one; None: it was not begun."""
    if isinstance(sharded, Failure):
        rest = [*VALUES.values(), COPIES, *ASPECTS.values(), ROUND_TRIP, CONTINUED, NO_SIDE_EFFECT]
        points = [_failed("runs", sharded), *(ContractPoint(name, "not reached", "") for name in rest)]
        return Verified(tuple(points), setting, tuple(notes), trace=sharded.trace)
    steps: Sequence[Comparison] = sharded["steps"]
    copies, unequal = sharded["in common"]
    watched = f", nor in {sharded['checks']} checks between steps" if sharded["checks"] else ""
    points = [_point("runs", [], f"forward, backward and step on {_ranks(setting['ranks'])}")]
    for kind, name in VALUES.items():
        alone = reference.tolerances.rounding_alone(kind, setting["steps"])
        points.append(point_of(name, [step for step in steps if step.kind == kind], "there are none", alone))
    points += [
        _point(COPIES, unequal, f"{copies} parameters, no bit differs at the end{watched}"),
        *_plain(reference),
        *_bits(reference, sharded, restored, setting),
        *_aspects(reference, sharded),
        *_checkpoint(sharded, restored, setting),
        _point(NO_SIDE_EFFECT, sharded["disturbed"], "before the first step and between steps, no bit differs"),
    ]
    failed = isinstance(restored, Failure)
    ascending = sorted([*steps, *([] if failed else restored["steps"])], key=lambda comparison: comparison.excess)
    worst = {(comparison.kind, comparison.name): comparison for comparison in ascending}
    closest = sorted(worst.values(), key=lambda comparison: comparison.excess, reverse=True)[:CLOSEST]
    trace, notes = restored.trace if failed else "", (*notes, *sharded["plan"].trials)
    return Verified(tuple(points), setting, notes, tuple(closest), str(sharded["plan"]), trace)


def point_of(
    name: str, comparisons: Sequence[Comparison], nothing: str, rounding_alone: int = 0, where: str = ""
) -> ContractPoint:
    """Return the point for some comparisons; ``nothing``: its detail without any; ``rounding_alone``: of how many."""
    wrong = [comparison for comparison in comparisons if not comparison.held]
    if not wrong:
        detail = _agreement(comparisons, rounding_alone) if comparisons else nothing
        return ContractPoint(name, "held", where + detail)
    step = min(comparison.step for comparison in wrong)
    of_step = [comparison for comparison in wrong if comparison.step == step]
    first = max(of_step, key=lambda comparison: (bool(comparison.words), comparison.excess))
    more = len({comparison.name for comparison in wrong}) - 1
    others = f"; {more} more are wrong in that step or later" if more else ""
    when = f"after step {step}" if step else "before training"
    if first.words:
        detail = f"{first.name!r} {first.words}, {when}{others}".removeprefix("'' ")
    else:
        allowed = f"{first.relative:.2g} of its size, allowed {first.tolerance:.1g}"
        what = f"{first.name!r} is " if first.name else ""
        detail = f"{what}{first.largest:.3g} apart {when} ({allowed if first.tolerance else 'not a bit may'}){others}"
    return ContractPoint(name, "broken", where + detail, first.name or None, step, first.largest)


def _agreement(comparisons: Sequence[Comparison], rounding_alone: int) -> str:
    count, steps = (len({getattr(comparison, key) for comparison in comparisons}) for key in ("name", "step"))
    what = f"{count} compared" if count > 1 else "compared"
    when = f" at {steps} steps" if steps > 1 else ""
    worst = max(comparisons, key=lambda comparison: comparison.excess)
    message = "no bit differs"
    if worst.relative:
        sizes = [comparison.relative for comparison in comparisons if comparison.tolerance < 1]
        most = max(sizes, default=worst.relative)
        message = f"at most {most:.1g} of their size apart, as by rounding"
    alone = f"; {rounding_alone} are nothing but rounding" if rounding_alone else ""
    return f"{what}{when}, {message}{alone}"


def _point(name: str, wrong: Sequence[str], held: str, step: int | None = None) -> ContractPoint:
    if not wrong:
        return ContractPoint(name, "held", held)
    more = f"; {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return ContractPoint(name, "broken", f"{wrong[0]}{more}", step=step)


def _failed(name: str, failure: Failure, where: str = "") -> ContractPoint:
    word = failure.stage.removeprefix("step ").partition(":")[0]
    detail = f"{where}rank {failure.rank}, {failure.stage}: {failure.words}"
    return ContractPoint(name, "broken", detail, step=int(word) if word.isdecimal() else None)


def _plain(reference: Reference) -> list[ContractPoint]:
    """Return the point that says whether mixed precision or compiling trains what plain training does."""
    if reference.plain is None:
        return []
    losses, moved = reference.plain
    detail = f"losses {losses:.1g} and updates {moved:.1g} of their size from training without it"
    is_near = losses <= NEAR_LOSSES and moved <= NEAR_MOVED
    return [ContractPoint(EXACT if reference.hashes else PLAIN, "held" if is_near else "broken", detail)]


def _bits(reference: Reference, sharded: Any, restored: Any, setting: Mapping[str, Any]) -> list[ContractPoint]:
    """Return the point that compares the hashes of each step, for an exact run."""
    if not reference.hashes:
        return []
    runs = {_ranks(1): reference.hashes, _ranks(setting["ranks"]): sharded["hashes"]}
    if not isinstance(restored, Failure):
        runs[f"{_ranks(setting['other_ranks'])} from the checkpoint"] = restored["hashes"]
    wrong, details = [], []
    for step in reference.hashes:
        by_hash: dict[str, list[str]] = {}
        for ranks, hashes in runs.items():
            if step in hashes:
                by_hash.setdefault(hashes[step], []).append(ranks)
        wrong += [step] if len(by_hash) > 1 else []
        details.append(f"step {step}: " + "; ".join(f"{value} on {', '.join(on)}" for value, on in by_hash.items()))
    first = wrong[0] if wrong else None
    return [ContractPoint(BITS, "broken" if wrong else "held", ". ".join(details), step=first)]


def _aspects(reference: Reference, sharded: Mapping[str, Any]) -> Iterator[ContractPoint]:
    structure = reference.structure
    dtypes = {dtype.partition(" ")[0].removeprefix("torch.") for dtype in structure["dtypes"].values()}
    trained, ties = structure["trainability"].values(), structure["ties"]
    groups = sum(key.endswith(": 'params'") for key in structure["membership"])
    held = {
        "names": f"{len(structure['names'])}, in order, after shard() and after the last step",
        "dtypes": ", ".join(sorted(dtypes)),
        "trainability": f"{sum(trained)} of {len(trained)} trainable",
        "ties": f"{len(ties)}" + "".join(f": {tie}" for tie in list(ties)[:1]),
        "membership": f"{groups} group{'s' if groups != 1 else ''}",
    }
    for aspect, name in ASPECTS.items():
        first, last = (sharded[key].get(aspect) for key in ("structure", "structure at the end"))
        wrong = list(sharded["computed in"]) if aspect == "dtypes" else []
        wrong += [f"after shard(): {first}"] if first else []
        wrong += [f"after the last step: {last}"] if last else []
        yield _point(name, wrong, held[aspect], step=0 if first else None)


def _checkpoint(sharded: Mapping[str, Any], restored: Any, setting: Mapping[str, Any]) -> list[ContractPoint]:
    same, other = f"on the same {setting['ranks']}", f"on {setting['other_ranks']}: "
    trip = _loaded(sharded["loaded"], sharded["structure loaded"], sharded["disk"], f"{same}: ")
    if isinstance(restored, Failure):
        if "step" in restored.stage:
            return [trip, _failed(CONTINUED, restored)]
        return [_failed(ROUND_TRIP, restored, other), ContractPoint(CONTINUED, "not reached", "")]
    if trip.status == "held":
        trip = _loaded(restored["loaded"], restored["structure"], [], other)
        if trip.status == "held":
            trip = replace(trip, detail=f"{same} and {trip.detail}")
    return [trip, point_of(CONTINUED, restored["steps"], "there is nothing to compare")]


def _loaded(
    comparisons: Sequence[Comparison], structure: Mapping[str, str], disk: Sequence[str], where: str
) -> ContractPoint:
    point = point_of(ROUND_TRIP, comparisons, "there is nothing to load", where=where)
    wrong = [*disk, *(where + words for words in structure.values())]
    return ContractPoint(ROUND_TRIP, "broken", wrong[0]) if point.status == "held" and wrong else point


def write_page(report: Verified, path: Path) -> None:
    """Write the page; an existing file is replaced when the new one is complete."""
    name, _, settings = report.head.partition("\n")
    title = f"{name}: {report.verdict}"
    data = report.as_dict() | {"headline": name, "settings": settings, "verdict": report.verdict}
    data["where"] = "" if report.first is None else str(report.first)
    replace_text(path, framed(title, str(report), data, __package__, "page.html", "page.css", "page.js"))
