"""Where nothing fits: by how much, and the cheapest change that would."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from trueshard.planner.choice.bench import Bench
from trueshard.planner.choice.space import Setting, Space, batches
from trueshard.planner.speed.hardware import hardware, known
from trueshard.planner.study import Study
from trueshard.plans import MixedPrecision, Plan, Unit
from trueshard.tables import size

SHORTEST = 128
"""Tokens below which no shorter sequence is proposed."""

DOUBLINGS = 4
"""How often the ranks are doubled, and the sequence halved, to find what fits."""


class NothingFits(ValueError):
    """No plan fits the budget; the message says by how much and what would."""

    def __init__(self, message: str, study: Study) -> None:
        super().__init__(message)
        self.study = study
        """Of the plan that takes the least memory."""


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
        if space.words.get(key, _USUAL[key]) not in ("auto", frugal):
            fixed[key] = "auto"
            yield f'{key}="auto"', dataclasses.replace(space, words={**space.words, key: "auto"})
    if len(fixed) > 1:
        words = " with ".join(f'{key}="auto"' for key in fixed)
        yield words, dataclasses.replace(space, words={**space.words, **fixed})
    microbatch, accumulation = batches(space)[-1]
    for smaller in range(microbatch // 2, 0, -1):
        if microbatch % smaller == 0:
            times = accumulation * microbatch // smaller
            changed = dataclasses.replace(space, microbatch=smaller, accumulation=times)
            yield f"microbatch={smaller} with accumulation={times}", changed
            if space.global_batch is None:
                yield f"microbatch={smaller}", dataclasses.replace(space, microbatch=smaller)
    if "cpu" not in space.offloads:
        yield 'offload="cpu"', dataclasses.replace(space, words={**space.words, "offload": "cpu"})
    for halving in range(1, DOUBLINGS + 1):
        if (sequence := space.workload.sequence >> halving) >= SHORTEST:
            workload = dataclasses.replace(space.workload, sequence=sequence)
            yield f"sequence={sequence}", dataclasses.replace(space, workload=workload)
    for doubling in range(1, DOUBLINGS + 1):
        ranks = space.ranks << doubling
        if space.global_batch is None or space.global_batch % ranks == 0:
            yield f"ranks={ranks}", dataclasses.replace(space, ranks=ranks)


_USUAL = {"activation_checkpointing": "none", "reshard_after_forward": "default"}


def _fits(space: Space) -> bool:
    """Whether the most frugal plan of a space fits."""
    try:
        bench = Bench(space)
        microbatch, accumulation = batches(space)[-1]
        setting = Setting(bench.replicas[0], microbatch, accumulation, space.offloads[-1])
        return bench.look(bench.groupings.uniform(setting, "always", "full")).fits
    except ValueError:  # shard() refuses such a mesh, or the factory such a batch
        return False
