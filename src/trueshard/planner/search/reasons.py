"""Where nothing fits: by how much, and the cheapest change that would.

Why each choice was made, one sentence each, out of what the other plans cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trueshard.choices import is_free
from trueshard.planner.hardware import hardware, known
from trueshard.planner.search.lattice import Bench, cost
from trueshard.planner.search.space import Point, Setting, Space, batches, recompute_text, reshard_text
from trueshard.planner.workload import NothingFits
from trueshard.plans import MixedPrecision, Plan, Unit
from trueshard.text import size

SHORTEST = 128
"""Tokens below which no shorter sequence is proposed."""

DOUBLINGS = 4
"""How often the ranks are doubled, and the sequence halved, to find what fits."""


def check_largest_unit(bench: Bench) -> None:
    """A unit's shard and the whole of it, gathered, must be there at one time.

    Raises:
        NothingFits: the budget is smaller than that.
    """
    replicate = bench.replicas[0]
    budget = bench.budget(replicate)
    plan = list(bench.groupings.of(replicate).values())[-1].plan
    unit = max(plan.units, key=lambda each: sum(_needs(each, plan)))
    gathered, shard = _needs(unit, plan)
    if gathered + shard <= budget:
        return
    space = bench.space
    setting = Setting(replicate, *batches(space)[-1], space.offloads[0])
    study = bench.study(bench.groupings.uniform(setting, "always", "full"))
    name = repr(unit.name) if unit.name else "the root"
    raise NothingFits(
        f"{size(budget)} is less than one unit of {space.workload.name} takes: {name} is "
        f"{size(gathered)} when it is gathered, and its shard {size(shard)}; the most frugal plan reserves "
        f"{size(study.forecast.peak_reserved_bytes)}: raise memory, or make smaller units with units=",
        study,
    )


def _needs(unit: Unit, plan: Plan) -> tuple[int, int]:
    """Bytes of a unit when it is gathered, and of its shard on the device."""
    compute = (plan.mixed_precision or MixedPrecision()).compute
    item = getattr(torch, compute).itemsize if compute else unit.bytes / max(1, unit.parameters)
    return int(unit.parameters * item), 0 if plan.offload == "cpu" else unit.bytes // plan.ranks[-1]


def nothing_fits(bench: Bench) -> NothingFits:
    """The error, after a search that found nothing."""
    space = bench.space
    frugal = bench.frugal
    assert frugal is not None
    study = bench.study(frugal)
    forecast = study.forecast
    lacks = forecast.peak_reserved_bytes - forecast.budget_bytes
    change = next((words for words, fits in _changes(bench) if fits), "")
    advice = f"{change} would fit" if change else "no single change of batch, sequence, ranks or device would do"
    if space.budget is not None and forecast.peak_reserved_bytes <= space.cluster(bench.replicas[0]).available_bytes:
        enough = math.ceil(forecast.peak_reserved_bytes / (1 << 30) * 100) / 100
        advice += f'; so would memory="{enough:.2f}GiB", which the device has'
    return NothingFits(
        f"nothing fits {space.workload.name} into {size(forecast.budget_bytes)} on {space.ranks:,} × "
        f"{space.hardware.name}: the most frugal plan ({bench.words(frugal)}) reserves "
        f"{size(forecast.peak_reserved_bytes)}, {size(lacks)} too much; {advice}",
        study,
    )


def _changes(bench: Bench) -> Iterator[tuple[str, bool]]:
    """(words, whether it would fit) of changes: first what costs nothing, then speed, then the job, then money."""
    space = bench.space
    assert bench.frugal is not None
    least = bench.forecasts[bench.frugal].peak_reserved_bytes
    for words, changed in _other_spaces(space):
        yield words, _fits(changed)
    if space.budget is not None and least <= space.cluster(bench.replicas[0]).available_bytes:
        return
    for name in sorted(known(), key=lambda each: hardware(each).memory_bytes):
        device = hardware(name)
        larger = dataclasses.replace(space, hardware=device, budget=None)
        if device.streams and larger.cluster(bench.replicas[0]).available_bytes >= least:
            yield f'hardware="{name}"', _fits(larger)


def _other_spaces(space: Space) -> Iterator[tuple[str, Space]]:
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


def _fits(space: Space) -> bool:
    """Whether the most frugal plan of a space fits."""
    try:
        bench = Bench(space)
        microbatch, accumulation = batches(space)[-1]
        setting = Setting(bench.replicas[0], microbatch, accumulation, space.offloads[-1])
        return bench.look(bench.groupings.uniform(setting, "always", "full")).fits
    except ValueError:  # shard() refuses such a mesh, or the factory such a batch
        return False


Text = Callable[[Point], str]
"""One choice of a plan, in words; where the words are equal the choice is."""


def reasons(bench: Bench) -> tuple[str, ...]:
    """A sentence for each choice that was free: what is faster but lacks memory, and what comes next."""
    texts = list(_choices(bench))
    told = [_sentence(bench, text, [other for other in texts if other is not text]) for text in texts]
    return (*told, _offload(bench)) if len(bench.space.offloads) > 1 else tuple(told)


def _choices(bench: Bench) -> Iterator[Text]:
    space = bench.space
    if len(bench.replicas) > 1:
        yield lambda point: _mesh_text(bench, point)
    if len(batches(space)) > 1:
        yield _batch_text
    if is_free(space.choices.reshard_after_forward):
        yield lambda point: reshard_text(bench.groupings.plan(point), point.split)
    if is_free(space.choices.activation_checkpointing):
        yield lambda point: recompute_text(bench.groupings.plan(point))


def _mesh_text(bench: Bench, point: Point) -> str:
    replicate = point.setting.replicate
    shard = bench.space.ranks // replicate
    return f"one replica over {shard:,} ranks" if replicate == 1 else f"{replicate:,} replicas of {shard:,} ranks"


def _batch_text(point: Point) -> str:
    return f"microbatch {point.setting.microbatch} × accumulation {point.setting.accumulation}"


def _sentence(bench: Bench, text: Text, rest: list[Text]) -> str:
    best = bench.best
    assert best is not None
    rivals = [each for each in bench.forecasts if each.setting.offload == best.setting.offload]
    others = [each for each in rivals if text(each) != text(best)]
    alike = [each for each in others if all(other(each) == other(best) for other in rest)]
    told = f"{text(best)[0].upper()}{text(best)[1:]}"
    # Where no plan differs in this alone, some plan that differs in this is told of.
    named: Text = text if alike else lambda point: f"another plan ({text(point)})"
    found = [clause for tell in (_faster, _next, _smaller) if (clause := tell(bench, named, alike or others))]
    return f"{told}: {'; '.join(found[:2])}." if found else f"{told}: nothing else fits the words that were given."


def _offload(bench: Bench) -> str:
    assert bench.best is not None
    if bench.best.setting.offload == "none":
        return "Offload none: it fits without."
    without = [each for each in bench.forecasts if each.setting.offload == "none"]
    lacks = min(_excess(bench, each) for each in without)
    return f"Offload cpu: without it the most frugal plan lacks {size(lacks)}."


def _faster(bench: Bench, text: Text, others: list[Point]) -> str:
    """Of those that would be faster but do not fit, the one that lacks least."""
    assert bench.best is not None
    now = cost(bench.forecasts[bench.best])
    lacking = [each for each in others if not bench.forecasts[each].fits and cost(bench.forecasts[each]) < now]
    if not lacking:
        return ""
    nearest = min(lacking, key=lambda each: _excess(bench, each))
    gain = now / cost(bench.forecasts[nearest]) - 1
    return f"{text(nearest)} would be {gain:.1%} faster but lacks {size(_excess(bench, nearest))}"


def _next(bench: Bench, text: Text, others: list[Point]) -> str:
    """The fastest other that fits."""
    assert bench.best is not None
    fitting = [each for each in others if bench.forecasts[each].fits]
    if not fitting:
        return ""
    second = min(fitting, key=bench.order)
    mine, its = bench.forecasts[bench.best], bench.forecasts[second]
    loss = 1 - cost(mine) / cost(its)
    if loss >= 0.0005:
        return f"{text(second)} is {loss:.1%} slower"
    more = its.peak_reserved_bytes - mine.peak_reserved_bytes
    memory = f" and takes {size(abs(more))} {'more' if more > 0 else 'less'}" if more else ""
    return f"{text(second)} is {'as fast' if loss < 1e-9 else 'hardly slower'}{memory}"


def _smaller(bench: Bench, text: Text, others: list[Point]) -> str:
    """Where nothing else fits: what lacks least."""
    if not others or any(bench.forecasts[each].fits for each in others):
        return ""
    nearest = min(others, key=lambda each: _excess(bench, each))
    now = cost(bench.forecasts[bench.best]) if bench.best is not None else 0.0
    if cost(bench.forecasts[nearest]) < now:
        return ""
    return f"{text(nearest)} lacks {size(_excess(bench, nearest))}"


def _excess(bench: Bench, point: Point) -> int:
    forecast = bench.forecasts[point]
    return forecast.peak_reserved_bytes - forecast.budget_bytes
