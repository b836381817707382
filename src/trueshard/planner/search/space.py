"""The plans to choose from: what is free, what is fixed, how a candidate reads as a plan, and what it costs."""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import math
from collections.abc import Callable, Mapping
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
        self.bases = functools.cache(self._bases)
        self.replicas: list[int] = []
        refused: list[ValueError] = []
        for replicate in meshes(space):
            try:
                self.bases(replicate)
                self.replicas.append(replicate)
            except ValueError as error:
                refused.append(error)
        if not self.replicas:
            raise refused[0]

    def _bases(self, replicate: int) -> dict[bool, Plan]:
        """Return plans with the units that a candidate may have, by whether embeddings are split off.

        Where all resharding is free, ``shard()`` knows two, see ``engine.resolve``.
        """
        joined = self._resolved(replicate, "default")
        if self.space.choices.reshard_after_forward != "auto":
            return {False: joined}
        split = self._resolved(replicate, "always")
        names = [[unit.name for unit in each.units] for each in (joined, split)]
        return {False: joined} if names[0] == names[1] else {False: joined, True: split}

    def _resolved(self, replicate: int, reshard: str) -> Plan:
        chosen = self.space.given(reshard_after_forward=reshard, activation_checkpointing="none")
        with _torch.fake_tensors():
            return engine.resolve(self.space.workload.model(), chosen, self.space.cluster(replicate).mesh)

    def uniform(self, setting: Setting, reshard: str | int, recompute: Recompute) -> Candidate:
        """Return the candidate with all that is free set by two words, in the units that ``shard()`` makes for them."""
        bases = self.bases(setting.replicate)
        split = reshard not in ("default", "never") and True in bases
        return Candidate(setting, split, self._values(bases[split], reshard, recompute))

    def _values(self, base: Plan, reshard: str | int, recompute: Recompute) -> tuple[Values, ...]:
        given = self.space.given(reshard_after_forward=reshard, activation_checkpointing=recompute)
        freed = choices.reshard_values(base, given.reshard_after_forward, base.ranks[-1])
        return tuple(zip(freed, choices.recompute_values(base.units, given.activation_checkpointing), strict=True))

    def options(self, replicate: int) -> dict[bool, list[list[Values]]]:
        """Return all values that each unit may have, by whether embeddings are split off."""
        words = list(itertools.product(reshard_words(self.space, replicate), RECOMPUTE))
        found = {}
        for split, base in self.bases(replicate).items():
            plans = [self._values(base, *each) for each in words]
            found[split] = [list(dict.fromkeys(values)) for values in zip(*plans, strict=True)]
        return found

    def mixed(self, fast: Candidate, frugal: Candidate, count: int) -> Candidate:
        """Return a candidate whose first ``count`` blocks and units that are none are ``frugal``, the rest ``fast``.

        The first blocks' activations live longest; the last ones' backward comes first, so these stay gathered.
        """
        faster = {unit.name: values for unit, values in zip(self.units(fast), fast.values, strict=True)}
        blocks = itertools.count()
        values = (
            faster[unit.name] if unit.kind == "block" and next(blocks) >= count else values
            for unit, values in zip(self.units(frugal), frugal.values, strict=True)
        )
        return dataclasses.replace(frugal, values=tuple(values))

    def units(self, candidate: Candidate) -> tuple[Unit, ...]:
        """Return a candidate's units; their values are not its own."""
        return self.bases(candidate.setting.replicate)[candidate.split].units

    def plan(self, candidate: Candidate) -> Plan:
        """Return a plan that ``shard()`` takes as it stands, and whose words say the same as its units."""
        base = self.bases(candidate.setting.replicate)[candidate.split]
        plan = dataclasses.replace(
            base,
            reshard_after_forward=_reshard_word(base, [freed for freed, _ in candidate.values]),
            activation_checkpointing=_recompute_word(base, [again for _, again in candidate.values]),
            offload=candidate.setting.offload,
        )
        return choices.apply_words(plan, base.ranks[-1])

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
        differing = sum(mine != usual for mine, usual in zip(candidate.values, plain.values, strict=False))
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


def _reshard_word(plan: Plan, values: list[bool | int]) -> Any:
    """Return the shortest word that means these values of the units."""
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


def _recompute_word(plan: Plan, values: list[Recompute]) -> Any:
    for word in RECOMPUTE:
        if choices.recompute_values(plan.units, word) == values:
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
    each, rest = divmod(space.global_batch, space.ranks)
    sizes = range(each, 0, -1) if space.microbatch is None else [space.microbatch]
    found = [(size, each // size) for size in sizes if each % size == 0 and space.accumulation in (None, each // size)]
    if rest or not found:
        said = [
            f"{key}={value}" for key in ("microbatch", "accumulation") if (value := getattr(space, key)) is not None
        ]
        raise ValueError(
            f"global_batch={space.global_batch} is not microbatch × accumulation × {space.ranks} ranks"
            f"{' with ' + ' and '.join(said) if said else ''}; use {'' if len(said) > 1 else 'a multiple of '}"
            f"{space.ranks * (space.microbatch or 1) * (space.accumulation or 1)}"
            f"{', or leave one of them out' if len(said) > 1 else ''}"
        )
    return found


def reshard_words(space: Space, replicate: int) -> tuple[str | int, ...]:
    """Return the words for all units together, from the fastest to the one that takes the least memory.

    A node's ranks are one of them where a replica spans several nodes.
    """
    shard, node = space.ranks // replicate, space.ranks_per_node
    return ("never", "default", *([node] if shard > node and shard % node == 0 else []), "always")
