"""Candidates in words, the reason for each choice, and where nothing fits: by how much, and the cheapest remedy."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from trueshard.model import policies
from trueshard.options import Offload, is_free
from trueshard.planner.hardware import hardware, known
from trueshard.planner.report.compare import collapse
from trueshard.planner.report.summary import host_verdict
from trueshard.planner.search.evaluator import Evaluator
from trueshard.planner.search.space import RECOMPUTE, Candidate, Setting, Space
from trueshard.planner.workload import NothingFits
from trueshard.plans import MixedPrecision, Plan, Unit
from trueshard.text import size

SHORTEST = 128
"""Tokens below which no shorter sequence is proposed."""

DOUBLINGS = 4
"""Number of times that the ranks are doubled, and the sequence halved, to find what fits."""


# Candidates in words


def described(evaluator: Evaluator, candidate: Candidate) -> str:
    """Return a candidate in a few words, as it differs from others of the space."""
    plan, setting = evaluator.plan(candidate), candidate.setting
    words = [f"{setting.replicate} replicas"] if setting.replicate > 1 else []
    words += [f"microbatch {setting.microbatch}"]
    words += [f"accumulation {setting.accumulation}"] if setting.accumulation > 1 else []
    words += [_reshard_text(plan, candidate.split), _recompute_text(plan)]
    words += [_sums_text(plan)] if setting.accumulation > 1 else []
    words += ["offload to cpu"] if setting.offload == "cpu" else []
    return ", ".join(words)


def _sums_text(plan: Plan) -> str:
    words = policies.accumulation_word(plan.units, [unit.accumulate_gradients for unit in plan.units])
    return f"gradients {words}" if isinstance(words, str) else "gradients of some units sharded"


def _reshard_text(plan: Plan, split: bool) -> str:
    """Return ``reshard always``, or which units are kept gathered.

    ``split``: embeddings are units of their own; said where ``shard()`` would not do that by itself.
    """
    word = plan.reshard_after_forward
    if isinstance(word, Mapping):
        values = {unit.reshard_after_forward for unit in plan.units} - {True}  # False, which is 0, comes first
        words = []
        for value in sorted(values):
            units = _listed(unit for unit in plan.units if unit.reshard_after_forward == value)
            words.append(f"reshard {units} to {value} ranks" if value else f"keep {units} gathered")
        text = " and ".join(words)
    else:
        text = f"reshard to {word} ranks" if isinstance(word, int) else f"reshard {word}"
    return text + (" with embeddings apart" if split and plan.unit("").reshard_after_forward is False else "")


def _recompute_text(plan: Plan) -> str:
    """Return ``recompute full``, or which units are recomputed how."""
    if not isinstance(plan.activation_checkpointing, Mapping):
        return f"recompute {plan.activation_checkpointing}"
    words = []
    for word, adverb in zip(RECOMPUTE[1:], ("selectively", "fully"), strict=True):
        if units := [unit for unit in plan.units if unit.activation_checkpointing == word]:
            words.append(f"recompute {_listed(units)} {adverb}")
    return ", ".join(words)


def _listed(units: Iterable[Unit]) -> str:
    return ", ".join(group.name or "the root" for group in collapse(units, lambda unit: unit.name))


# Nothing fits


def check_largest_unit(evaluator: Evaluator) -> None:
    """Raise NothingFits if the budget is less than one unit takes: gathered, and its shard if that is not offloaded."""
    space, replicate = evaluator.space, evaluator.replicas[0]
    budget, cluster = evaluator.budget(replicate), space.cluster(replicate)
    plan = list(evaluator.bases(replicate).values())[-1]
    compute = (plan.mixed_precision or MixedPrecision()).compute

    def sizes(unit: Unit) -> tuple[int, int]:
        """Return the bytes of a unit when it is gathered, and of its shard."""
        parts = max(cluster.along("tensor"), cluster.along("experts") if unit.kind == "experts" else 1)
        gathered = (unit.parameters * getattr(torch, compute).itemsize if compute else unit.bytes) // parts
        return gathered, unit.bytes // (plan.ranks[-1] * cluster.along("tensor"))

    def least(unit: Unit) -> int:
        gathered, shard = sizes(unit)
        return gathered + (0 if "cpu" in space.offloads else shard)

    unit = max(plan.units, key=least)
    if least(unit) <= budget:
        return
    gathered, shard = sizes(unit)
    smallest = frugal(evaluator, space.offloads[0])
    reserved = evaluator.evaluate(smallest).peak_reserved_bytes
    raise NothingFits(
        f"{size(budget)} is less than one unit of {space.workload.name} takes: "
        f"{repr(unit.name) if unit.name else 'the root'} is {size(gathered)} when it is gathered, and its shard "
        f"{size(shard)}; the most frugal plan reserves {size(reserved)}: raise memory, or make smaller units with "
        "units=",
        evaluator.studies[smallest],
    )


def frugal(evaluator: Evaluator, offload: Offload) -> Candidate:
    """Return the candidate of the smallest microbatch with everything resharded and recomputed."""
    setting = Setting(evaluator.replicas[0], *evaluator.space.batches()[-1], offload)
    return evaluator.uniform(setting, "always", "full")


def nothing_fits(evaluator: Evaluator, *, advise: bool = True) -> NothingFits:
    """Return the error after a search that found nothing; ``advise``: with the cheapest change that would fit."""
    space, smallest = evaluator.space, evaluator.smallest
    assert smallest is not None
    study = evaluator.studies[smallest]
    forecast = study.forecast
    least, available = forecast.peak_reserved_bytes, space.cluster(evaluator.replicas[0]).available_bytes
    is_in_device = space.budget is not None and forecast.budget_bytes < least <= available
    families = [*_other_jobs(space), [] if is_in_device else _other_devices(space, evaluator.replicas[0], least)]
    changes: Iterator[str] = (_least_that_fits(family, evaluator) for family in families)
    if forecast.host_lack > 0 and least <= forecast.budget_bytes:
        changes = iter([f'host_memory="{math.ceil(forecast.host_bytes * forecast.ranks_per_node / (1 << 30))}GiB"'])
    change = next(filter(None, changes), "") if advise else ""
    advice = f"{change} would fit" if change else "no single change of batch, sequence, ranks or device would do"
    if is_in_device:
        enough = math.ceil(least / (1 << 30) * 100) / 100
        advice += f'; so would memory="{enough:.2f}GiB", which the device has'
    lack = f"reserves {size(least)}, {size(max(least - forecast.budget_bytes, 0))} too much"
    if forecast.host_lack > 0:
        lack = f"takes {host_verdict(forecast)}"
    return NothingFits(
        f"nothing fits {space.workload.name} into {size(forecast.budget_bytes)} on {space.ranks:,} × "
        f"{space.hardware.name}: the most frugal plan ({described(evaluator, smallest)}) {lack}; {advice}",
        study,
    )


Change = tuple[str, Space]
"""A change in words, and the space with it."""


def _other_jobs(space: Space) -> Iterator[list[Change]]:
    """Yield changes, those of a kind together, each of which frees more memory than the one before.

    First those that cost nothing, then speed, then others of the job.
    """
    most_frugal = {"activation_checkpointing": "full", "reshard_after_forward": "always"}
    fixed = [name for name, word in most_frugal.items() if getattr(space.choices, name) not in ("auto", word)]
    for names in [*([name] for name in fixed), *([fixed] if len(fixed) > 1 else [])]:
        words = " with ".join(f'{name}="auto"' for name in names)
        yield [(words, replace(space, choices=space.choices.replace(**dict.fromkeys(names, "auto"))))]
    microbatch, accumulation = space.batches()[-1]
    smaller = []
    for samples in (number for number in range(microbatch // 2, 0, -1) if microbatch % number == 0):
        times = accumulation * microbatch // samples
        same = replace(space, microbatch=samples, accumulation=times)
        smaller.append((f"microbatch={samples} with accumulation={times}", same))
        if space.global_batch is None:
            smaller.append((f"microbatch={samples}", replace(space, microbatch=samples)))
    yield smaller
    if "cpu" not in space.offloads:
        yield [('offload="cpu"', replace(space, choices=space.choices.replace(offload="cpu")))]
    lengths = [space.workload.sequence >> halving for halving in range(1, DOUBLINGS + 1)]
    workloads = [replace(space.workload, sequence=length) for length in lengths if length >= SHORTEST]
    yield [(f"sequence={workload.sequence}", replace(space, workload=workload)) for workload in workloads]
    several = [space.ranks << doubling for doubling in range(1, DOUBLINGS + 1)]
    yield [(f"ranks={n}", replace(space, ranks=n)) for n in several if (space.global_batch or 0) % n == 0]


def _other_devices(space: Space, replicate: int, least: int) -> list[Change]:
    """Return devices of the catalogue with ``least`` bytes for torch, the smallest first."""
    devices = sorted(map(hardware, known()), key=lambda device: device.memory_bytes)
    spaces = [replace(space, hardware=device, budget=None) for device in devices if device.streams]
    enough = [larger for larger in spaces if larger.cluster(replicate).available_bytes >= least]
    return [(f'hardware="{larger.hardware.name}"', larger) for larger in enough]


def _least_that_fits(family: Sequence[Change], searched: Evaluator) -> str:
    """Return the words of the first of changes with which the most frugal plan fits; "" if it does with none."""
    if not family or not _fits(family[-1][1], searched):  # one simulation where none fits
        return ""
    first = bisect_left(range(len(family) - 1), True, key=lambda i: _fits(family[i][1], searched))
    return family[first][0]


def _fits(space: Space, searched: Evaluator) -> bool:
    """Return whether the most frugal plan of a space fits, which has a change from the one that was searched."""
    assert searched.smallest is not None
    smallest = searched.forecasts[searched.smallest]
    rests = sum(smallest.peak_by_kind[kind] for kind in ("parameters", "optimizer")) * smallest.ranks / space.ranks
    try:
        evaluator = Evaluator(space, simulations=searched.simulations)
        if searched.smallest.setting.offload == space.offloads[-1] and rests > evaluator.budget(evaluator.replicas[0]):
            return False  # its shards and the optimizer's state alone
        return evaluator.evaluate(frugal(evaluator, space.offloads[-1])).fits
    except ValueError:  # shard() refuses such a mesh, or the factory such a batch
        return False


# Reasons


def reasons(evaluator: Evaluator, proposals: Sequence[Candidate]) -> tuple[str, ...]:
    """Return a sentence for each choice that was free: what is faster but lacks memory, and what comes next.

    Figures of plans that were not studied are predicted, and told with "about". ``proposals``: the best candidate of
    each setting and grouping of units.
    """
    space, best = evaluator.space, evaluator.best
    assert best is not None
    offload, words = best.setting.offload, ("default", *space.reshard_words(best.setting.replicate))
    settings = [Setting(replicate, *batch, offload) for replicate in evaluator.replicas for batch in space.batches()]
    candidates = [
        best,
        *(candidate for candidate in evaluator.forecasts if candidate.setting.offload == offload),
        *(evaluator.uniform(best.setting, word, again) for word in words for again in RECOMPUTE),
        *(best.adding_up(sums) for sums in space.gradient_sums(best.setting.accumulation)),
        *(proposal for proposal in proposals if proposal.setting != best.setting),
        *(evaluator.uniform(setting, "always", "full") for setting in settings),
    ]
    texts = {candidate: _choices(evaluator, candidate) for candidate in candidates}
    sentences = [_sentence(evaluator, best, texts, choice) for choice in texts[best]]
    if len(space.offloads) > 1 and offload == "none":
        sentences.append("Offload none: it fits without.")
    elif len(space.offloads) > 1:
        without = [evaluator.expected(other) for other in evaluator.forecasts if other.setting.offload == "none"]
        lacking = size(int(min(expected.excess for expected in without)))
        sentences.append(f"Offload cpu: without it the most frugal plan lacks {lacking}.")
    return tuple(sentences)


def _choices(evaluator: Evaluator, candidate: Candidate) -> dict[str, str]:
    """Return a candidate's choices, of those that were free, in words: where the words are equal the choice is."""
    space, setting, plan = evaluator.space, candidate.setting, evaluator.plan(candidate)
    texts = {}
    if len(evaluator.replicas) > 1:
        shard = space.cluster(setting.replicate).mesh[-1]
        several = f"{setting.replicate:,} replicas of {shard:,} ranks"
        texts["replicate"] = several if setting.replicate > 1 else f"one replica over {shard:,} ranks"
    if len(space.batches()) > 1:
        texts["batch"] = f"microbatch {setting.microbatch} × accumulation {setting.accumulation}"
    if is_free(space.choices.reshard_after_forward):
        texts["reshard"] = _reshard_text(plan, candidate.split)
    if is_free(space.choices.activation_checkpointing):
        texts["recompute"] = _recompute_text(plan)
    if any(len(space.gradient_sums(accumulation)) > 1 for _, accumulation in space.batches()):
        texts["sums"] = _sums_text(plan)
    return texts


def _sentence(evaluator: Evaluator, best: Candidate, texts: Mapping[Candidate, Mapping[str, str]], choice: str) -> str:
    """Compare the best candidate with others in one choice: one that is faster but lacks memory, and the next best."""
    others = [other for other in texts if texts[other][choice] != texts[best][choice]]
    only_here = [other for other in others if sum(texts[other][key] != texts[best][key] for key in texts[best]) == 1]
    chosen, expected = evaluator.expected(best), {other: evaluator.expected(other) for other in only_here or others}

    def name(other: Candidate) -> str:
        """Return its choice; where none differs in this alone, it differs in others, too."""
        return texts[other][choice] if only_here else f"another plan ({texts[other][choice]})"

    def figure(other: Candidate, text: str) -> str:
        return text if expected[other].is_exact else f"about {text}"

    fitting = [other for other in expected if expected[other].excess <= 0]
    lacking = [other for other in expected if expected[other].excess > 0]
    faster = [other for other in lacking if expected[other].cost < chosen.cost]
    clauses = []
    if faster or (lacking and not fitting):
        other = min(faster or lacking, key=lambda other: expected[other].excess)
        lack = f"lacks {figure(other, size(int(expected[other].excess)))}"
        gain = figure(other, f"{chosen.cost / expected[other].cost - 1:.1%}")
        clauses.append(f"{name(other)} {f'would be {gain} faster but ' if faster else ''}{lack}")
    if fitting:
        other = min(fitting, key=lambda other: (expected[other].cost, expected[other].reserved))
        loss, more = 1 - chosen.cost / expected[other].cost, int(expected[other].reserved - chosen.reserved)
        memory = f" and takes {figure(other, size(abs(more)))} {'more' if more > 0 else 'less'}" if more else ""
        slower = f"{figure(other, f'{loss:.1%}')} slower"
        clauses.append(f"{name(other)} is {slower if loss >= 0.0005 else f'hardly slower{memory}'}")
    words = "; ".join(clauses) or "nothing else fits the words that were given"
    text = texts[best][choice]
    return f"{text[0].upper()}{text[1:]}: {words}."
