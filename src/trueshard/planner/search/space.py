"""The plans to choose from: what is free, what is fixed, and what a candidate of the search consists of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from trueshard.axes import OPTIONS, ranks_along, sizes_of
from trueshard.options import GRADIENT_SUMS, GradientSums, Offload, Options, Recompute, is_free
from trueshard.planner.forecasting import Cluster, study_job
from trueshard.planner.hardware import Hardware
from trueshard.planner.schedules import Pipeline
from trueshard.planner.simulation.simulate import Simulator
from trueshard.planner.workload import Job, Study, Workload
from trueshard.plans import Plan

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Words, from the fastest to the one that takes the least memory."""


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
    """Tokens of the busiest rank's experts over their mean, see ``Job.imbalance``."""
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

    def settled(self, **words: Any) -> Options:
        """Return the options with ``words`` in the place of every ``"auto"``, without offload."""
        values = {name: _without_auto(getattr(self.choices, name), word) for name, word in words.items()}
        return self.choices.replace(offload="none", **values)

    def study(
        self, plan: Plan | None, setting: Setting, budget: int | None, simulator: Simulator | None = None
    ) -> Study:
        """Return the study of a plan; None: of the one that the options mean."""
        return study_job(self.job(plan, setting), self.cluster(setting.replicate), budget, simulator)

    def job(self, plan: Plan | None, setting: Setting) -> Job:
        """Return a plan, or what the options mean, as a job."""
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

    def replicas(self) -> list[int]:
        """Return numbers of replicas, the fewest first: each replica is a whole number of nodes."""
        if self.replicate is not None:
            return [self.replicate]
        nodes = max(1, self.ranks // self.ranks_per_node)
        divisors = [number for number in range(1, nodes + 1) if nodes % number == 0]
        middle = min(divisors, key=lambda number: abs(number * number - nodes))
        return sorted({1, middle, nodes})

    def batches(self) -> list[tuple[int, int]]:
        """Return (microbatch, accumulation), the largest microbatch first.

        Raises:
            ValueError: what is given cannot make the global batch.
        """
        if self.global_batch is None:
            return [(self.microbatch or 1, self.accumulation or 1)]
        readers = self.ranks // math.prod(sizes_of(self.choices).values()) // self.pipe.stages
        samples, left = divmod(self.global_batch, readers)
        pairs = [(size, samples // size) for size in range(samples, 0, -1) if samples % size == 0]
        pairs = [
            (microbatch, accumulation)
            for microbatch, accumulation in pairs
            if self.microbatch in (None, microbatch) and self.accumulation in (None, accumulation)
        ]
        if left or not pairs:
            fixed = {"microbatch": self.microbatch, "accumulation": self.accumulation}
            words = [f"{name}={value}" for name, value in fixed.items() if value is not None]
            both = len(words) > 1
            raise ValueError(
                f"global_batch={self.global_batch} is not microbatch × accumulation × {readers} ranks"
                f"{' with ' + ' and '.join(words) if words else ''}; use {'' if both else 'a multiple of '}"
                f"{readers * (self.microbatch or 1) * (self.accumulation or 1)}"
                f"{', or leave one of them out' if both else ''}"
            )
        return pairs

    def reshard_words(self, replicate: int) -> tuple[str | int, ...]:
        """Return the words for all blocks together, from the fastest to the one that takes the least memory.

        A node's ranks are one of them where a replica spans several nodes. ``"default"`` keeps one block: a mixture.
        """
        cluster = self.cluster(replicate)
        shard, node = cluster.mesh[-1], max(1, self.ranks_per_node // cluster.along("tensor"))
        return ("never", *([node] if shard > node > 1 and shard % node == 0 else []), "always")

    def gradient_sums(self, accumulation: int) -> tuple[GradientSums, ...]:
        """Return the words for gradients of several microbatches, the fastest first; none where that is not free."""
        return GRADIENT_SUMS if accumulation > 1 and is_free(self.choices.accumulate_gradients) else ()


def _without_auto(word: Any, instead: Any) -> Any:
    if isinstance(word, Mapping):
        return {glob: _without_auto(value, instead) for glob, value in word.items()}
    return instead if word == "auto" else word


@dataclass(frozen=True)
class Setting:
    """The parts of a candidate that hold for all units."""

    replicate: int
    microbatch: int
    accumulation: int
    offload: Offload


Values = tuple[bool | int, Recompute, GradientSums]
"""``Unit.reshard_after_forward``, ``Unit.activation_checkpointing`` and ``Unit.accumulate_gradients``."""


@dataclass(frozen=True)
class Candidate:
    """One plan of a space."""

    setting: Setting
    split: bool
    """True if embeddings are units of their own."""
    values: tuple[Values, ...]
    """One for each unit, in order."""

    def adding_up(self, sums: GradientSums) -> Candidate:
        """Return this candidate with the same sums of gradients in all units."""
        return dataclasses.replace(self, values=tuple((freed, again, sums) for freed, again, _ in self.values))

    def followed_by(self, other: Candidate, count: int) -> Candidate:
        """Return this candidate with the values of another in the first ``count`` units where the two differ."""
        changed = self.differing(other)[:count]
        values = [other.values[i] if i in changed else value for i, value in enumerate(self.values)]
        return dataclasses.replace(self, values=tuple(values))

    def differing(self, other: Candidate) -> list[int]:
        """Return the positions of units whose values differ in another candidate of the same units."""
        return [i for i, pair in enumerate(zip(self.values, other.values, strict=True)) if pair[0] != pair[1]]
