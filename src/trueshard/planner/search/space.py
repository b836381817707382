"""The plans to choose from: what is free, what is fixed, how a candidate reads as a plan, and what it costs."""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from trueshard import _torch, choices
from trueshard.choices import Choices
from trueshard.planner.forecasting import Cluster, study
from trueshard.planner.hardware import Hardware
from trueshard.planner.reserve import LARGE_SEGMENT
from trueshard.planner.workload import Job, Study, Workload
from trueshard.plans import Forecast, Offload, Plan, Recompute, Unit
from trueshard.runtime import engine

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
    choices: Choices
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

    def cluster(self, replicate: int) -> Cluster:
        """Return the ranks as a cluster of ``replicate`` replicas."""
        return Cluster(self.hardware, self.ranks, self.ranks_per_node, replicate)

    @property
    def offloads(self) -> tuple[Offload, ...]:
        """Ways to offload, in the order in which they are tried until something fits."""
        word = self.choices.offload
        return ("none", "cpu") if word == "auto" else (cast(Offload, word),)

    def given(self, **instead: Any) -> Choices:
        """Return the choices with ``instead`` in the place of every ``"auto"``, without offload."""
        settled = {key: _without_auto(getattr(self.choices, key), value) for key, value in instead.items()}
        return self.choices.replace(offload="none", **settled)

    def study(self, plan: Plan | None, setting: Setting, budget: int | None) -> Study:
        """Return the study of a plan; None: of the one that the choices mean."""
        cluster = self.cluster(setting.replicate)
        job = Job(
            self.workload,
            cluster.mesh,
            microbatch=setting.microbatch,
            accumulation=setting.accumulation,
            plan=plan,
            optimizer=self.optimizer,
            choices=self.choices,
        )
        return study(job, cluster, budget)


@dataclass(frozen=True, order=True)
class Setting:
    """The parts of a candidate that hold for all units."""

    replicate: int
    microbatch: int
    accumulation: int
    offload: Offload


@dataclass(frozen=True)
class Candidate:
    """One plan of a space."""

    setting: Setting
    split: bool
    """Whether embeddings are units of their own."""
    reshard: tuple[bool | int, ...]
    """For each unit of that grouping, in order."""
    recompute: tuple[Recompute, ...]


@dataclass(frozen=True)
class Grouping:
    """The units of a model, and which of their values are free."""

    plan: Plan
    """Free values are ``default`` and ``none``."""
    free_reshard: tuple[bool, ...]
    free_recompute: tuple[bool, ...]


class Evaluator:
    """Forecasts candidates, each once, and keeps the best.

    Attributes:
        replicas: numbers of replicas that the options allow.
        forecasts: of every candidate so far.
        best: the fastest that fits.
        smallest: the one that takes the least memory.
        studies: of these two; others are not kept.

    Raises:
        ValueError: ``shard()`` refuses every mesh, or the budget is more than any device has.
    """

    def __init__(self, space: Space, progress: Callable[[str], object] = lambda line: None) -> None:
        self.space, self._progress = space, progress
        self.forecasts: dict[Candidate, Forecast] = {}
        self.best: Candidate | None = None
        self.smallest: Candidate | None = None
        self.studies: dict[Candidate, Study] = {}
        self.groupings = functools.cache(self._groupings)
        self.replicas: list[int] = []
        refused: list[ValueError] = []
        for replicate in meshes(space):
            try:
                self.groupings(replicate)
                self.replicas.append(replicate)
            except ValueError as error:
                refused.append(error)
        if not self.replicas:
            raise refused[0]

    def _groupings(self, replicate: int) -> dict[bool, Grouping]:
        """Return the groupings that differ, by whether embeddings are split off.

        Where all resharding is free, ``shard()`` knows two, see ``engine.resolve``.
        """
        mesh = self.space.cluster(replicate).mesh
        joined = self._grouping(mesh, "default")
        if self.space.choices.reshard_after_forward != "auto":
            return {False: joined}
        split = self._grouping(mesh, "always")
        names = [[unit.name for unit in each.plan.units] for each in (joined, split)]
        return {False: joined} if names[0] == names[1] else {False: joined, True: split}

    def _grouping(self, mesh: tuple[int, ...], word: str) -> Grouping:
        given = self.space.given
        with _torch.fake_tensors():
            chosen = given(reshard_after_forward=word, activation_checkpointing="none")
            plan = engine.resolve(self.space.workload.model(), chosen, mesh)
        never, always = (
            choices.reshard_values(plan, given(reshard_after_forward=each).reshard_after_forward, mesh[-1])
            for each in ("never", "always")
        )
        none, full = (
            choices.recompute_values(plan.units, given(activation_checkpointing=each).activation_checkpointing)
            for each in ("none", "full")
        )
        return Grouping(plan, tuple(map(operator.ne, never, always)), tuple(map(operator.ne, none, full)))

    def candidate(
        self, setting: Setting, split: bool, reshard: Iterable[bool | int], recompute: Iterable[Recompute]
    ) -> Candidate:
        """Return the candidate with these values where its units' are free, in order."""
        grouping, freed, again = self.groupings(setting.replicate)[split], iter(reshard), iter(recompute)
        units = list(zip(grouping.plan.units, grouping.free_reshard, grouping.free_recompute, strict=True))
        return Candidate(
            setting,
            split,
            tuple(next(freed) if free else unit.reshard_after_forward for unit, free, _ in units),
            tuple(next(again) if free else unit.activation_checkpointing for unit, _, free in units),
        )

    def uniform(self, setting: Setting, reshard: str | int, recompute: Recompute) -> Candidate:
        """Return the candidate with all that is free set by two words, in the grouping ``shard()`` makes for them."""
        groupings = self.groupings(setting.replicate)
        split = reshard not in ("default", "never") and True in groupings
        plan = groupings[split].plan
        wanted = choices.reshard_values(plan, reshard, plan.ranks[-1])
        freed = itertools.compress(wanted, groupings[split].free_reshard)
        return self.candidate(setting, split, freed, itertools.repeat(recompute))

    def mixed(self, fast: Candidate, frugal: Candidate, count: int) -> Candidate:
        """Return a candidate whose first ``count`` blocks and units that are none are ``frugal``, the rest ``fast``.

        The first blocks' activations live longest; the last ones' backward comes first, so these stay gathered.
        """
        faster = self._values(fast)
        values, blocks = self._values(frugal), itertools.count()
        for unit in self._units(frugal):
            if unit.kind == "block" and next(blocks) >= count:
                values[unit.name] = faster[unit.name]
        reshard, recompute = zip(*values.values(), strict=True)
        return Candidate(frugal.setting, frugal.split, reshard, recompute)

    def blocks(self, candidate: Candidate) -> int:
        """Return the number of a candidate's blocks."""
        return sum(unit.kind == "block" for unit in self._units(candidate))

    def _units(self, candidate: Candidate) -> tuple[Unit, ...]:
        return self.groupings(candidate.setting.replicate)[candidate.split].plan.units

    def _values(self, candidate: Candidate) -> dict[str, tuple[bool | int, Recompute]]:
        values = zip(candidate.reshard, candidate.recompute, strict=True)
        return {unit.name: value for unit, value in zip(self._units(candidate), values, strict=True)}

    def count(self, replicate: int) -> int:
        """Return the number of candidates in a setting with so many replicas."""
        levels = len(reshard_levels(self.space, replicate))
        return sum(
            levels ** sum(each.free_reshard) * len(RECOMPUTE) ** sum(each.free_recompute)
            for each in self.groupings(replicate).values()
        )

    def every(self, setting: Setting) -> Iterator[Candidate]:
        """Iterate over all candidates of a setting."""
        levels = reshard_levels(self.space, setting.replicate)
        for split, grouping in self.groupings(setting.replicate).items():
            reshard = itertools.product(levels, repeat=sum(grouping.free_reshard))
            recompute = itertools.product(RECOMPUTE, repeat=sum(grouping.free_recompute))
            for freed, again in itertools.product(reshard, recompute):
                yield self.candidate(setting, split, freed, again)

    def plan(self, candidate: Candidate) -> Plan:
        """Return a plan that ``shard()`` takes as it stands, and whose words say the same as its units."""
        setting = candidate.setting
        base = self.groupings(setting.replicate)[candidate.split].plan
        values = zip(base.units, candidate.reshard, candidate.recompute, strict=True)
        units = tuple(
            dataclasses.replace(unit, reshard_after_forward=freed, activation_checkpointing=again)
            for unit, freed, again in values
        )
        plan = dataclasses.replace(base, units=units, offload=setting.offload)
        plan = dataclasses.replace(
            plan, reshard_after_forward=_reshard_word(plan), activation_checkpointing=_recompute_word(plan)
        )
        return dataclasses.replace(plan, resolved_for=plan.policies)

    def budget(self, replicate: int) -> int:
        """Return the bytes for torch on a rank: no more than the device has besides the communicators of that mesh."""
        available = self.space.cluster(replicate).available_bytes
        asked = self.space.budget
        return available if asked is None else asked if replicate == self.replicas[0] else min(asked, available)

    def evaluate(self, candidate: Candidate) -> Forecast:
        """Return a candidate's forecast."""
        if candidate in self.forecasts:
            return self.forecasts[candidate]
        setting = candidate.setting
        made = self.space.study(self.plan(candidate), setting, self.budget(setting.replicate))
        forecast = self.forecasts[candidate] = made.forecast
        self.studies[candidate] = made
        if forecast.fits and (self.best is None or self.rank(candidate) < self.rank(self.best)):
            self.best = candidate
        if self.smallest is None or forecast.peak_reserved_bytes < self.forecasts[self.smallest].peak_reserved_bytes:
            self.smallest = candidate
        self.studies = {each: self.studies[each] for each in (self.best, self.smallest) if each is not None}
        speed = "none fits yet" if self.best is None else f"the best so far {1 / self.best_cost():,.0f} tokens/s a rank"
        self._progress(f"{len(self.forecasts)} plans compared, {speed}")
        return forecast

    def excess(self, candidate: Candidate) -> int:
        """Return the reserved bytes of an evaluated candidate over its budget; negative if it fits."""
        forecast = self.forecasts[candidate]
        return forecast.peak_reserved_bytes - forecast.budget_bytes

    def rank(self, candidate: Candidate) -> tuple[float, int, int]:
        """Smaller is better: seconds a token, then memory, then choices away from ``shard()``'s defaults."""
        forecast, setting = self.forecasts[candidate], candidate.setting
        plain = self.uniform(setting, "default", "none")
        chosen = zip(candidate.reshard, candidate.recompute, strict=True)
        usual = zip(plain.reshard, plain.recompute, strict=True)
        differing = sum(a != b for a, b in zip(chosen, usual, strict=False))
        differing += (candidate.split != plain.split) + (setting.replicate != 1) + (setting.offload != "none")
        return float(f"{cost(forecast):.9g}"), forecast.peak_reserved_bytes, differing

    def best_cost(self) -> float:
        """Return the seconds a token of the best candidate; infinity if none fits."""
        return math.inf if self.best is None else cost(self.forecasts[self.best])


def cost(forecast: Forecast) -> float:
    """Return the seconds a token of one rank."""
    return 1 / forecast.tokens_per_second_per_rank


def slack(forecast: Forecast) -> int:
    """Return the bytes by which a plan that should take less memory than this one may take more.

    What the caching allocator reserves does not fall at every step with what is live: its segments have 20 MiB (for
    requests of 1 to 10 MiB), or what was asked for in units of 2 MiB, and are put together differently.
    """
    return 2 * LARGE_SEGMENT + forecast.peak_reserved_bytes // 50


def _without_auto(word: Any, instead: Any) -> Any:
    if isinstance(word, Mapping):
        return {key: _without_auto(value, instead) for key, value in word.items()}
    return instead if word == "auto" else word


def _reshard_word(plan: Plan) -> Any:
    """Return the shortest word that means the units' values."""
    values = [unit.reshard_after_forward for unit in plan.units]
    ranks = plan.ranks[-1]
    numbers = [value for value in values if not isinstance(value, bool)]
    for word in (*choices.RESHARD_WORDS, *numbers[:1]):
        meant = choices.reshard_values(plan, word, ranks)
        if meant == values and list(map(type, meant)) == list(map(type, values)):  # True is not 1 rank
            return word
    words = ["always" if value is True else "never" if value is False else value for value in values]
    most = max(words, key=words.count)
    exceptions = {glob.escape(unit.name): word for unit, word in zip(plan.units, words, strict=True) if word != most}
    return {"*": most, **exceptions}


def _recompute_word(plan: Plan) -> Any:
    values = [unit.activation_checkpointing for unit in plan.units]
    for word in RECOMPUTE:
        if choices.recompute_values(plan.units, word) == values:
            return word
    return {
        glob.escape(unit.name): unit.activation_checkpointing
        for unit in plan.units
        if unit.activation_checkpointing != "none"
    }


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
    each, rest = divmod(space.global_batch, space.ranks)
    sizes = range(each, 0, -1) if space.microbatch is None else [space.microbatch]
    found = [(size, each // size) for size in sizes if each % size == 0 and space.accumulation in (None, each // size)]
    if rest or not found:
        said = [
            f"{key}={value}" for key in ("microbatch", "accumulation") if (value := getattr(space, key)) is not None
        ]
        raise ValueError(
            f"global_batch={space.global_batch} is not microbatch × accumulation × {space.ranks} ranks"
            f"{' with ' + ' and '.join(said) if said else ''}; use a multiple of "
            f"{space.ranks * (space.microbatch or 1) * (space.accumulation or 1)}"
        )
    return found


def reshard_levels(space: Space, replicate: int) -> tuple[bool | int, ...]:
    """Return the values of ``reshard_after_forward``, from the fastest to the one that takes the least memory.

    A node's ranks are one of them where a replica spans several nodes.
    """
    shard, node = space.ranks // replicate, space.ranks_per_node
    return (False, node, True) if shard > node and shard % node == 0 else (False, True)


def reshard_words(space: Space, replicate: int) -> tuple[str | int, ...]:
    """Return the words for all units together, in the same order."""
    return ("never", "default", *reshard_levels(space, replicate)[1:-1], "always")
