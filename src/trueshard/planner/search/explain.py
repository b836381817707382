"""Candidates in words, the reason for each choice, and where nothing fits: by how much, and the cheapest remedy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trueshard.options import Offload, is_free
from trueshard.planner.hardware import hardware, known
from trueshard.planner.report.compare import collapse
from trueshard.planner.search.evaluator import MARGIN, Evaluator, Expected
from trueshard.planner.search.frontier import proposal
from trueshard.planner.search.space import RECOMPUTE, Candidate, Setting, Space, batches
from trueshard.planner.workload import NothingFits
from trueshard.plans import MixedPrecision, Plan, Unit
from trueshard.text import size

SHORTEST = 128
"""Tokens below which no shorter sequence is proposed."""

ROUGHLY = 1.1
"""Memory over the budget up to which a change that is expected not to fit is studied."""

DOUBLINGS = 4
"""How often the ranks are doubled, and the sequence halved, to find what fits."""


# Candidates in words


def described(plan: Plan, candidate: Candidate) -> str:
    """Return a candidate in a few words, as it differs from others of the space."""
    setting = candidate.setting
    words = [f"{setting.replicate} replicas"] if setting.replicate > 1 else []
    words += [f"microbatch {setting.microbatch}"]
    words += [f"accumulation {setting.accumulation}"] if setting.accumulation > 1 else []
    words += [_reshard_text(plan, candidate.split), _recompute_text(plan)]
    words += ["offload to cpu"] if setting.offload == "cpu" else []
    return ", ".join(words)


def _reshard_text(plan: Plan, split: bool) -> str:
    """Return ``reshard always``, or which units are kept gathered.

    ``split``: embeddings are units of their own; said where ``shard()`` would not do that by itself.
    """
    word = plan.reshard_after_forward
    root_stays = plan.unit("").reshard_after_forward is False
    apart = " with embeddings apart" if split and root_stays and word != "last_layer" else ""
    if not isinstance(word, Mapping):
        return (f"reshard to {word} ranks" if isinstance(word, int) else f"reshard {word}") + apart
    kept = _listed(unit for unit in plan.units if unit.reshard_after_forward is False)
    words = [f"keep {kept} gathered"] if kept else []
    sizes = {each for unit in plan.units if not isinstance(each := unit.reshard_after_forward, bool)}
    words += [
        f"reshard {_listed(unit for unit in plan.units if unit.reshard_after_forward == ranks)} to {ranks} ranks"
        for ranks in sorted(sizes)
    ]
    return " and ".join(words) + apart


def _recompute_text(plan: Plan) -> str:
    """Return ``recompute full``, or which units are recomputed how."""
    word = plan.activation_checkpointing
    if not isinstance(word, Mapping):
        return f"recompute {word}"
    adverbs = {"selective": "selectively", "full": "fully"}
    parts = [
        f"recompute {_listed(unit for unit in plan.units if unit.activation_checkpointing == each)} {adverbs[each]}"
        for each in RECOMPUTE[1:]
        if each in word.values()
    ]
    return ", ".join(parts)


def _listed(units: Iterable[Unit]) -> str:
    return ", ".join(group.name or "the root" for group in collapse(units, lambda unit: unit.name))


# Nothing fits


def check_largest_unit(evaluator: Evaluator) -> None:
    """Raise if the budget is less than one unit takes: gathered, and its shard unless that may lie on the host.

    Raises:
        NothingFits: naming the unit and both sizes.
    """
    space, replicate = evaluator.space, evaluator.replicas[0]
    budget, cluster = evaluator.budget(replicate), space.cluster(replicate)
    tensor = cluster.along("tensor")
    plan = list(evaluator.bases(replicate).values())[-1]
    compute = (plan.mixed_precision or MixedPrecision()).compute

    def sizes(unit: Unit) -> tuple[int, int, int]:
        """Return the bytes that a unit takes at least, gathered, and its shard's."""
        parts = max(tensor, cluster.along("experts") if unit.kind == "experts" else 1)
        gathered = (unit.parameters * getattr(torch, compute).itemsize if compute else unit.bytes) // parts
        shard = unit.bytes // (plan.ranks[-1] * tensor)
        return gathered + (0 if "cpu" in space.offloads else shard), gathered, shard

    unit = max(plan.units, key=lambda each: sizes(each)[0])
    least, gathered, shard = sizes(unit)
    if least <= budget:
        return
    smallest = frugal(evaluator, space.offloads[0])
    evaluator.evaluate(smallest)
    study = evaluator.studies[smallest]
    name = repr(unit.name) if unit.name else "the root"
    raise NothingFits(
        f"{size(budget)} is less than one unit of {space.workload.name} takes: {name} is "
        f"{size(gathered)} when it is gathered, and its shard {size(shard)}; the most frugal plan reserves "
        f"{size(study.forecast.peak_reserved_bytes)}: raise memory, or make smaller units with units=",
        study,
    )


def frugal(evaluator: Evaluator, offload: Offload) -> Candidate:
    """Return the candidate of the smallest microbatch with everything resharded and recomputed."""
    setting = Setting(evaluator.replicas[0], *batches(evaluator.space)[-1], offload)
    return evaluator.uniform(setting, "always", "full")


def nothing_fits(evaluator: Evaluator) -> NothingFits:
    """Return the error after a search that found nothing."""
    space, smallest = evaluator.space, evaluator.smallest
    assert smallest is not None
    study = evaluator.studies[smallest]
    forecast = study.forecast
    least, replicate = forecast.peak_reserved_bytes, evaluator.replicas[0]
    is_in_device = space.budget is not None and least <= space.cluster(replicate).available_bytes
    families = itertools.chain(_other_jobs(space), () if is_in_device else [_other_devices(space, replicate, least)])
    above = least - evaluator.predicted(smallest)[1]

    def may_fit(change: Change) -> bool:
        """True if it is expected to fit with the most frugal plan, where that can be told at all."""
        if change.tokens == change.ranks == 1.0:
            return True
        live = evaluator.live_bytes(smallest, tokens=change.tokens, ranks=change.ranks)
        return live + above <= forecast.budget_bytes * ROUGHLY + MARGIN

    change = next((words for family in families if (words := _first_that_fits(family, may_fit, evaluator))), "")
    advice = f"{change} would fit" if change else "no single change of batch, sequence, ranks or device would do"
    if is_in_device:
        enough = math.ceil(least / (1 << 30) * 100) / 100
        advice += f'; so would memory="{enough:.2f}GiB", which the device has'
    return NothingFits(
        f"nothing fits {space.workload.name} into {size(forecast.budget_bytes)} on {space.ranks:,} × "
        f"{space.hardware.name}: the most frugal plan ({described(evaluator.plan(smallest), smallest)}) reserves "
        f"{size(least)}, {size(least - forecast.budget_bytes)} too much; {advice}",
        study,
    )


@dataclass(frozen=True)
class Change:
    """A change in words, and what it makes of the space."""

    words: str
    space: Space
    tokens: float = 1.0
    """Times the tokens of a microbatch, and the ranks."""
    ranks: float = 1.0
    rather: Change | None = None
    """What would be better, if it fits, too."""


def _other_jobs(space: Space) -> Iterator[list[Change]]:
    """Yield changes, those of a kind together, each of which frees more memory than the one before.

    First those that cost nothing, then speed, then others of the job.
    """

    def changed(words: str, tokens: float = 1.0, **instead: Any) -> Change:
        return Change(words, dataclasses.replace(space, **instead), tokens)

    fixed: dict[str, Any] = {}
    for key, word in (("activation_checkpointing", "full"), ("reshard_after_forward", "always")):
        if getattr(space.choices, key) not in ("auto", word):
            fixed[key] = "auto"
            yield [changed(f'{key}="auto"', choices=space.choices.replace(**{key: "auto"}))]
    if len(fixed) > 1:
        words = " with ".join(f'{key}="auto"' for key in fixed)
        yield [changed(words, choices=space.choices.replace(**fixed))]
    microbatch, accumulation = batches(space)[-1]
    smaller = []
    for samples in (each for each in range(microbatch // 2, 0, -1) if microbatch % each == 0):
        times = accumulation * microbatch // samples
        words, part = f"microbatch={samples}", samples / microbatch
        same = changed(f"{words} with accumulation={times}", part, microbatch=samples, accumulation=times)
        fewer = changed(words, part, microbatch=samples)
        smaller.append(same if space.global_batch is not None else dataclasses.replace(fewer, rather=same))
    yield smaller
    if "cpu" not in space.offloads:
        yield [changed('offload="cpu"', choices=space.choices.replace(offload="cpu"))]
    whole = space.workload.sequence
    lengths = [whole >> halving for halving in range(1, DOUBLINGS + 1) if whole >> halving >= SHORTEST]
    workloads = [dataclasses.replace(space.workload, sequence=each) for each in lengths]
    yield [changed(f"sequence={each.sequence}", each.sequence / whole, workload=each) for each in workloads]
    yield [
        Change(f"ranks={ranks}", dataclasses.replace(space, ranks=ranks), ranks=ranks / space.ranks)
        for ranks in (space.ranks << doubling for doubling in range(1, DOUBLINGS + 1))
        if (space.global_batch or 0) % ranks == 0
    ]


def _other_devices(space: Space, replicate: int, least: int) -> list[Change]:
    """Return devices of the catalogue with ``least`` bytes for torch, the smallest first."""
    found = []
    for name in sorted(known(), key=lambda each: hardware(each).memory_bytes):
        larger = dataclasses.replace(space, hardware=hardware(name), budget=None)
        if larger.hardware.streams and larger.cluster(replicate).available_bytes >= least:
            found.append(Change(f'hardware="{name}"', larger))
    return found


def _first_that_fits(family: list[Change], may_fit: Callable[[Change], bool], evaluator: Evaluator) -> str:
    """Return the words of the least of changes with which the most frugal plan fits; "" if it does with none.

    Those that are not expected to fit are left out, but the last.
    """
    workers = evaluator.workers.count
    for change in [each for each in family[:-1] if may_fit(each)] + family[-1:]:
        if _fits(change.space, workers):
            return change.rather.words if change.rather and _fits(change.rather.space, workers) else change.words
    return ""


def _fits(space: Space, workers: int) -> bool:
    try:
        evaluator = Evaluator(space, workers=workers)
        with evaluator.workers:
            return evaluator.evaluate(frugal(evaluator, space.offloads[-1])).fits
    except ValueError:  # shard() refuses such a mesh, or the factory such a batch
        return False


# Reasons

Text = Callable[[Candidate], str]
"""One choice of a candidate, in words; where the words are equal the choice is."""


def reasons(evaluator: Evaluator) -> tuple[str, ...]:
    """Return a sentence for each choice that was free: what is faster but lacks memory, and what comes next.

    Figures of plans that were not studied are predicted, and told with "about".
    """
    space, best = evaluator.space, evaluator.best
    assert best is not None
    texts: list[Text] = []
    if len(evaluator.replicas) > 1:
        texts.append(lambda each: _mesh_text(space, each))
    if len(batches(space)) > 1:
        texts.append(lambda each: f"microbatch {each.setting.microbatch} × accumulation {each.setting.accumulation}")
    if is_free(space.choices.reshard_after_forward):
        texts.append(lambda each: _reshard_text(evaluator.plan(each), each.split))
    if is_free(space.choices.activation_checkpointing):
        texts.append(lambda each: _recompute_text(evaluator.plan(each)))
    rivals = _rivals(evaluator, best)
    told = {each: [text(each) for text in texts] for each in (best, *rivals)}
    found = [_sentence(evaluator, best, rivals, told, number) for number in range(len(texts))]
    if len(space.offloads) > 1 and best.setting.offload == "none":
        found.append("Offload none: it fits without.")
    elif len(space.offloads) > 1:
        without = [evaluator.expected(each) for each in evaluator.forecasts if each.setting.offload == "none"]
        found.append(f"Offload cpu: without it the most frugal plan lacks {size(min(int(e.excess) for e in without))}.")
    return tuple(found)


def _rivals(evaluator: Evaluator, best: Candidate) -> list[Candidate]:
    """Return what the best candidate is compared with: what was studied, and what differs from it in few choices."""
    found = [each for each in evaluator.forecasts if each.setting.offload == best.setting.offload]
    found += evaluator.uniforms(best.setting)
    for replicate in evaluator.replicas:
        for microbatch, accumulation in batches(evaluator.space):
            setting = Setting(replicate, microbatch, accumulation, best.setting.offload)
            if setting != best.setting and microbatch in (best.setting.microbatch, batches(evaluator.space)[0][0]):
                proposed = (proposal(evaluator, setting, split) for split in evaluator.bases(replicate))
                found += [each for each in proposed if each is not None]
                found += evaluator.uniforms(setting)[-1:]
    return [each for each in dict.fromkeys(found) if each != best]


def _mesh_text(space: Space, candidate: Candidate) -> str:
    replicate = candidate.setting.replicate
    shard = space.cluster(replicate).mesh[-1]
    return f"one replica over {shard:,} ranks" if replicate == 1 else f"{replicate:,} replicas of {shard:,} ranks"


def _sentence(
    evaluator: Evaluator, best: Candidate, rivals: list[Candidate], told: Mapping[Candidate, list[str]], number: int
) -> str:
    """Compare the best candidate with others in one choice, the text of which is ``told[candidate][number]``."""
    mine = told[best]
    others = [each for each in rivals if told[each][number] != mine[number]]
    alike = [
        each
        for each in others
        if all(a == b or i == number for i, (a, b) in enumerate(zip(told[each], mine, strict=True)))
    ]
    # Where no candidate differs in this alone, name one that differs in other choices, too.
    text: Text = (lambda each: told[each][number]) if alike else (lambda each: f"another plan ({told[each][number]})")
    clauses = _clauses(evaluator, best, text, alike or others)
    words = "; ".join(clauses) or "nothing else fits the words that were given"
    return f"{mine[number][0].upper()}{mine[number][1:]}: {words}."


def _clauses(evaluator: Evaluator, best: Candidate, text: Text, others: list[Candidate]) -> list[str]:
    """Compare the best candidate with a faster one that lacks memory, and with the next one that fits, if any."""
    expected = {each: evaluator.expected(each) for each in (best, *others)}
    mine = expected[best]
    fitting = [each for each in others if expected[each].excess <= 0]
    lacking = sorted((each for each in others if expected[each].excess > 0), key=lambda each: expected[each].excess)
    faster = [each for each in lacking if expected[each].cost < mine.cost]
    clauses = []
    if faster:
        found = expected[faster[0]]
        gain, lack = mine.cost / found.cost - 1, size(int(found.excess))
        about = "" if found.is_exact else "about "
        clauses.append(f"{text(faster[0])} would be {about}{gain:.1%} faster but lacks {about}{lack}")
    if fitting:
        second = min(fitting, key=lambda each: (expected[each].cost, expected[each].reserved))
        clauses.append(f"{text(second)} {_compared(mine, expected[second])}")
    elif lacking and expected[lacking[0]].cost >= mine.cost:
        about = "" if expected[lacking[0]].is_exact else "about "
        clauses.append(f"{text(lacking[0])} lacks {about}{size(int(expected[lacking[0]].excess))}")
    return clauses


def _compared(best: Expected, second: Expected) -> str:
    about = "" if second.is_exact else "about "
    loss = 1 - best.cost / second.cost
    if loss >= 0.0005:
        return f"is {about}{loss:.1%} slower"
    more = int(second.reserved - best.reserved)
    memory = f" and takes {about}{size(abs(more))} {'more' if more > 0 else 'less'}" if more else ""
    return f"is {'as fast' if loss < 1e-9 and not about else 'hardly slower'}{memory}"
