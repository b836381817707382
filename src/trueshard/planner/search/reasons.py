"""Candidates in words, the reason for each choice, and where nothing fits: by how much, and the cheapest remedy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from trueshard.choices import is_free
from trueshard.planner.hardware import hardware, known
from trueshard.planner.report.compare import collapse
from trueshard.planner.search.space import RECOMPUTE, Candidate, Evaluator, Setting, Space, batches, cost
from trueshard.planner.workload import NothingFits
from trueshard.plans import Forecast, MixedPrecision, Offload, Plan, Unit
from trueshard.text import size

SHORTEST = 128
"""Tokens below which no shorter sequence is proposed."""

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
    budget = evaluator.budget(replicate)
    plan = list(evaluator.bases(replicate).values())[-1]
    compute = (plan.mixed_precision or MixedPrecision()).compute

    def sizes(unit: Unit) -> tuple[int, int, int]:
        """Return the bytes that a unit takes at least, gathered, and its shard's."""
        gathered = unit.parameters * getattr(torch, compute).itemsize if compute else unit.bytes
        shard = unit.bytes // plan.ranks[-1]
        return gathered + (0 if "cpu" in space.offloads else shard), gathered, shard

    unit = max(plan.units, key=lambda each: sizes(each)[0])
    least, gathered, shard = sizes(unit)
    if least <= budget:
        return
    frugal = _frugal(evaluator, space.offloads[0])
    study = evaluator.studies[frugal]
    name = repr(unit.name) if unit.name else "the root"
    raise NothingFits(
        f"{size(budget)} is less than one unit of {space.workload.name} takes: {name} is "
        f"{size(gathered)} when it is gathered, and its shard {size(shard)}; the most frugal plan reserves "
        f"{size(study.forecast.peak_reserved_bytes)}: raise memory, or make smaller units with units=",
        study,
    )


def _frugal(evaluator: Evaluator, offload: Offload) -> Candidate:
    """Evaluate and return the candidate of the smallest microbatch with everything resharded and recomputed."""
    setting = Setting(evaluator.replicas[0], *batches(evaluator.space)[-1], offload)
    candidate = evaluator.uniform(setting, "always", "full")
    evaluator.evaluate(candidate)
    return candidate


def nothing_fits(evaluator: Evaluator) -> NothingFits:
    """Return the error after a search that found nothing."""
    space, smallest = evaluator.space, evaluator.smallest
    assert smallest is not None
    study = evaluator.studies[smallest]
    forecast = study.forecast
    least, replicate = forecast.peak_reserved_bytes, evaluator.replicas[0]
    is_in_device = space.budget is not None and least <= space.cluster(replicate).available_bytes
    changes = itertools.chain(_other_jobs(space), () if is_in_device else _other_devices(space, replicate, least))
    change = next((words for words, changed in changes if _fits(changed)), "")
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


def _other_jobs(space: Space) -> Iterator[tuple[str, Space]]:
    """Yield changes in words, with their spaces: first those that cost nothing, then speed, then others of the job."""
    fixed: dict[str, Any] = {}
    for key, frugal in (("activation_checkpointing", "full"), ("reshard_after_forward", "always")):
        if getattr(space.choices, key) not in ("auto", frugal):
            fixed[key] = "auto"
            yield f'{key}="auto"', dataclasses.replace(space, choices=space.choices.replace(**{key: "auto"}))
    if len(fixed) > 1:
        words = " with ".join(f'{key}="auto"' for key in fixed)
        yield words, dataclasses.replace(space, choices=space.choices.replace(**fixed))
    microbatch, accumulation = batches(space)[-1]
    for smaller in range(microbatch // 2, 0, -1):
        if microbatch % smaller == 0:
            times = accumulation * microbatch // smaller
            changed = dataclasses.replace(space, microbatch=smaller, accumulation=times)
            yield f"microbatch={smaller} with accumulation={times}", changed
            if space.global_batch is None:
                yield f"microbatch={smaller}", dataclasses.replace(space, microbatch=smaller)
    if "cpu" not in space.offloads:
        yield 'offload="cpu"', dataclasses.replace(space, choices=space.choices.replace(offload="cpu"))
    for halving in range(1, DOUBLINGS + 1):
        if (sequence := space.workload.sequence >> halving) >= SHORTEST:
            workload = dataclasses.replace(space.workload, sequence=sequence)
            yield f"sequence={sequence}", dataclasses.replace(space, workload=workload)
    for doubling in range(1, DOUBLINGS + 1):
        ranks = space.ranks << doubling
        if space.global_batch is None or space.global_batch % ranks == 0:
            yield f"ranks={ranks}", dataclasses.replace(space, ranks=ranks)


def _other_devices(space: Space, replicate: int, least: int) -> Iterator[tuple[str, Space]]:
    """Yield devices of the catalogue with ``least`` bytes for torch, the smallest first."""
    for name in sorted(known(), key=lambda each: hardware(each).memory_bytes):
        larger = dataclasses.replace(space, hardware=hardware(name), budget=None)
        if larger.hardware.streams and larger.cluster(replicate).available_bytes >= least:
            yield f'hardware="{name}"', larger


def _fits(space: Space) -> bool:
    try:
        evaluator = Evaluator(space)
        return evaluator.evaluate(_frugal(evaluator, space.offloads[-1])).fits
    except ValueError:  # shard() refuses such a mesh, or the factory such a batch
        return False


# Reasons

Text = Callable[[Candidate], str]
"""One choice of a candidate, in words; where the words are equal the choice is."""


def reasons(evaluator: Evaluator) -> tuple[str, ...]:
    """Return a sentence for each choice that was free: what is faster but lacks memory, and what comes next."""
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
    found = [_sentence(evaluator, best, text, [other for other in texts if other is not text]) for text in texts]
    if len(space.offloads) > 1 and best.setting.offload == "none":
        found.append("Offload none: it fits without.")
    elif len(space.offloads) > 1:
        without = [evaluator.excess(each) for each in evaluator.forecasts if each.setting.offload == "none"]
        found.append(f"Offload cpu: without it the most frugal plan lacks {size(min(without))}.")
    return tuple(found)


def _mesh_text(space: Space, candidate: Candidate) -> str:
    replicate = candidate.setting.replicate
    shard = space.ranks // replicate
    return f"one replica over {shard:,} ranks" if replicate == 1 else f"{replicate:,} replicas of {shard:,} ranks"


def _sentence(evaluator: Evaluator, best: Candidate, text: Text, rest: list[Text]) -> str:
    rivals = [each for each in evaluator.forecasts if each.setting.offload == best.setting.offload]
    others = [each for each in rivals if text(each) != text(best)]
    alike = [each for each in others if all(other(each) == other(best) for other in rest)]
    # Where no candidate differs in this alone, name one that differs in other choices, too.
    named: Text = text if alike else lambda each: f"another plan ({text(each)})"
    clauses = _clauses(evaluator, best, named, alike or others)
    told = "; ".join(clauses) or "nothing else fits the words that were given"
    return f"{text(best)[0].upper()}{text(best)[1:]}: {told}."


def _clauses(evaluator: Evaluator, best: Candidate, text: Text, others: list[Candidate]) -> list[str]:
    """Compare the best candidate with a faster one that lacks memory, and with the next one that fits, if any."""
    forecasts = evaluator.forecasts
    mine = forecasts[best]
    fitting = [each for each in others if forecasts[each].fits]
    lacking = sorted((each for each in others if not forecasts[each].fits), key=evaluator.excess)
    faster = [each for each in lacking if cost(forecasts[each]) < cost(mine)]
    clauses = []
    if faster:
        gain = cost(mine) / cost(forecasts[faster[0]]) - 1
        clauses.append(f"{text(faster[0])} would be {gain:.1%} faster but lacks {size(evaluator.excess(faster[0]))}")
    if fitting:
        second = min(fitting, key=evaluator.rank)
        clauses.append(f"{text(second)} {_compared(mine, forecasts[second])}")
    elif lacking and cost(forecasts[lacking[0]]) >= cost(mine):
        clauses.append(f"{text(lacking[0])} lacks {size(evaluator.excess(lacking[0]))}")
    return clauses


def _compared(best: Forecast, second: Forecast) -> str:
    loss = 1 - cost(best) / cost(second)
    if loss >= 0.0005:
        return f"is {loss:.1%} slower"
    more = second.peak_reserved_bytes - best.peak_reserved_bytes
    memory = f" and takes {size(abs(more))} {'more' if more > 0 else 'less'}" if more else ""
    return f"is {'as fast' if loss < 1e-9 else 'hardly slower'}{memory}"
