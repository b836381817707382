"""The plans to choose from: what is free, what is fixed, and how a candidate reads as a plan."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from trueshard.axes import OPTIONS, ranks_along, sizes_of
from trueshard.model import policies
from trueshard.options import Offload, Options, Recompute
from trueshard.planner.forecasting import Cluster, study_job
from trueshard.planner.hardware import Hardware
from trueshard.planner.schedules import Pipeline
from trueshard.planner.simulation.simulate import Simulator
from trueshard.planner.workload import Job, Study, Workload
from trueshard.plans import Plan

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""From the fastest to the one that takes the least memory."""


@dataclass(frozen=True)
class Space:
    """A request: the workload, the devices, and the options that are fixed or free."""

    workload: Workload
    hardware: Hardware
    ranks: int
    ranks_per_node: int
    budget: int | None
    """Bytes that torch's allocator may reserve on each rank; None: all that the device has."""
    choices: Options
    """``shard()``'s options. ``reshard_after_forward`` and ``activation_checkpointing`` may be or contain ``"auto"``,
    ``offload`` may be it: chosen. All else is taken as it is; ``memory`` is ``budget``."""
    replicate: int | None
    """Replicas; None: chosen among those of whole nodes."""
    microbatch: int | None
    accumulation: int | None
    global_batch: int | None
    """Samples of all ranks in a step; where microbatch or accumulation is None, it is chosen to make this number.
    None: microbatch and accumulation are 1 where they are not given."""
    optimizer: str
    imbalance: float = 1.0
    """As ``Job.imbalance``."""
    pipe: Pipeline = field(default_factory=Pipeline)

    def cluster(self, replicate: int) -> Cluster:
        """Return the ranks as a cluster of ``replicate`` replicas."""
        sizes = {name: ranks_along(self.choices, name) for name in OPTIONS}
        sizes |= {"replicate": replicate, "pipeline": self.pipe.stages}
        return Cluster(self.hardware, self.ranks, self.ranks_per_node, sizes)

    @property
    def offloads(self) -> tuple[Offload, ...]:
        """Ways to offload, in the order in which they are tried until something fits."""
        word = self.choices.offload
        return ("none", "cpu") if word == "auto" else (cast(Offload, word),)

    def given(self, **instead: Any) -> Options:
        """Return the choices with ``instead`` in the place of every ``"auto"``, without offload."""
        settled = {key: _without_auto(getattr(self.choices, key), value) for key, value in instead.items()}
        return self.choices.replace(offload="none", **settled)

    def study(
        self, plan: Plan | None, setting: Setting, budget: int | None, simulator: Simulator | None = None
    ) -> Study:
        """Return the study of a plan; None: of the one that the choices mean."""
        cluster = self.cluster(setting.replicate)
        return study_job(self.job(plan, setting), cluster, budget, simulator)

    def job(self, plan: Plan | None, setting: Setting) -> Job:
        """Return a plan, or what the choices mean, as a job."""
        return Job(
            self.workload,
            self.cluster(setting.replicate).mesh,
            microbatch=setting.microbatch,
            accumulation=setting.accumulation,
            plan=plan,
            optimizer=self.optimizer,
            choices=self.choices,
            imbalance=self.imbalance,
        )


@dataclass(frozen=True, order=True)
class Setting:
    """The parts of a candidate that hold for all units."""

    replicate: int
    microbatch: int
    accumulation: int
    offload: Offload


Values = tuple[bool | int, Recompute]
"""Resharding after forward and activation checkpointing of a unit."""


@dataclass(frozen=True)
class Candidate:
    """One plan of a space."""

    setting: Setting
    split: bool
    """Whether embeddings are units of their own."""
    values: tuple[Values, ...]
    """Of each unit, in order."""


def _without_auto(word: Any, instead: Any) -> Any:
    if isinstance(word, Mapping):
        return {key: _without_auto(value, instead) for key, value in word.items()}
    return instead if word == "auto" else word


def reshard_word(plan: Plan, values: list[bool | int]) -> Any:
    """Return the shortest word that means these values of the units."""
    ranks = plan.ranks[-1]
    numbers = [value for value in values if not isinstance(value, bool)]
    for word in (*policies.RESHARD_WORDS, *numbers[:1]):
        meant = policies.reshard_values(plan, word, ranks)
        if meant == values and list(map(type, meant)) == list(map(type, values)):  # True is not 1 rank
            return word
    words = ["always" if value is True else "never" if value is False else value for value in values]
    most = max(words, key=words.count)
    exceptions = {glob.escape(unit.name): word for unit, word in zip(plan.units, words, strict=True) if word != most}
    return {"*": most, **exceptions}


def recompute_word(plan: Plan, values: list[Recompute]) -> Any:
    """Return the shortest word that means these values of the units."""
    for word in RECOMPUTE:
        if policies.recompute_values(plan.units, word) == values:
            return word
    return {glob.escape(unit.name): word for unit, word in zip(plan.units, values, strict=True) if word != "none"}


# What there is to choose from


def meshes(space: Space) -> list[int]:
    """Return numbers of replicas, the fewest first: each replica is a whole number of nodes."""
    if space.replicate is not None:
        return [space.replicate]
    nodes = max(1, space.ranks // space.ranks_per_node)
    divisors = [each for each in range(1, nodes + 1) if nodes % each == 0]
    middle = min(divisors, key=lambda each: abs(each * each - nodes))
    return sorted({1, middle, nodes})


def batches(space: Space) -> list[tuple[int, int]]:
    """Return (microbatch, accumulation), the largest microbatch first.

    Raises:
        ValueError: what is given cannot make the global batch.
    """
    if space.global_batch is None:
        return [(space.microbatch or 1, space.accumulation or 1)]
    readers = space.ranks // math.prod(sizes_of(space.choices).values()) // space.pipe.stages
    each, rest = divmod(space.global_batch, readers)
    sizes = range(each, 0, -1) if space.microbatch is None else [space.microbatch]
    found = [(size, each // size) for size in sizes if each % size == 0 and space.accumulation in (None, each // size)]
    if rest or not found:
        said = [
            f"{key}={value}" for key in ("microbatch", "accumulation") if (value := getattr(space, key)) is not None
        ]
        raise ValueError(
            f"global_batch={space.global_batch} is not microbatch × accumulation × {readers} ranks"
            f"{' with ' + ' and '.join(said) if said else ''}; use {'' if len(said) > 1 else 'a multiple of '}"
            f"{readers * (space.microbatch or 1) * (space.accumulation or 1)}"
            f"{', or leave one of them out' if len(said) > 1 else ''}"
        )
    return found


def reshard_words(space: Space, replicate: int) -> tuple[str | int, ...]:
    """Return the words for all units together, from the fastest to the one that takes the least memory.

    A node's ranks are one of them where a replica spans several nodes.
    """
    cluster = space.cluster(replicate)
    shard, node = cluster.mesh[-1], max(1, space.ranks_per_node // cluster.along("tensor"))
    return ("never", "default", *([node] if shard > node > 1 and shard % node == 0 else []), "always")
