"""Candidates of a space: predicted from what their units cost, and, of the few that matter, studied exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trueshard.model import policies
from trueshard.options import DEFAULTS, Recompute
from trueshard.planner.forecasting import MICROBATCHES, Cluster
from trueshard.planner.hardware import Mode
from trueshard.planner.inputs.batches import quietly
from trueshard.planner.reserve import LARGE_SEGMENT
from trueshard.planner.search.costs import Costs, Laid, Layout, UnitCost, measured, summed
from trueshard.planner.search.space import (
    RECOMPUTE,
    Candidate,
    Setting,
    Space,
    Values,
    batches,
    meshes,
    recompute_word,
    reshard_word,
    reshard_words,
)
from trueshard.planner.simulation.extension import KEPT
from trueshard.planner.simulation.repeats import FEWEST, find_runs
from trueshard.planner.simulation.simulate import Short, Simulator, Steps
from trueshard.planner.workers import Task, Workers
from trueshard.planner.workload import Job, Study, Workload
from trueshard.plans import Forecast, Plan, Unit

PROBED = 3
"""Blocks of a run in a probe: the one in the middle has neighbours on both sides."""

RESERVED_ABOVE = 3
"""Reserved above live bytes before a study tells, over what the largest unit gathers and reduces."""


MARGIN = 2 * LARGE_SEGMENT
"""Bytes by which a plan that is expected not to fit may fit after all."""


class Simulations:
    """A workload's simulations, run in workers.

    Args:
        workload: of all jobs.
        workers: as of ``Workers``; 0: in this process.
        check: runs beside the rest, as the task ``checking``.
    """

    def __init__(self, workload: Workload, workers: int | None, check: Callable[[], Any] = lambda: None) -> None:
        self.simulator = Simulator(workload, self._run_all)
        functions: dict[str, Callable[..., Any]] = {"run": self._run, "probe": self._probe, "check": check}
        self.workers = Workers({name: _quiet(each) for name, each in functions.items()}, workers)

    def prepare(self) -> None:
        """Build the model, so that workers have it."""
        with contextlib.suppress(Exception):  # ``check`` says it better
            _ = self.simulator.model

    def probe(self, short: Short, cluster: Cluster, mode: Mode) -> Task:
        """Start to measure what the units of a short model cost."""
        return self.workers.start("probe", _sendable(short), cluster, mode)

    def _run_all(self, shorts: Sequence[Short]) -> list[Steps]:
        tasks = [self.workers.start("run", _sendable(each)) for each in shorts]
        return [self.workers.result(each) for each in tasks]

    def _run(self, short: Short) -> Steps:
        return self.simulator.run(self._here(short))

    def _probe(self, short: Short, cluster: Cluster, mode: Mode) -> Costs:
        short = self._here(short)
        began = time.perf_counter()
        try:
            trace = self.simulator.probe(short)
        except Exception:  # an optimizer may not like gradients that are not of a backward
            trace = self.simulator.run(short).steady
        found = measured(trace, cluster, mode)
        return dataclasses.replace(found, took=(time.perf_counter() - began) / (len(found.units) + 1))

    def _here(self, short: Short) -> Short:
        return dataclasses.replace(short, job=dataclasses.replace(short.job, workload=self.simulator.workload))


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with quietly():
            return function(*arguments)

    return run


def _sendable(short: Short) -> Short:
    """Return it without functions of the workload, which workers have."""
    workload: Any = None
    plan = short.plan
    axes = DEFAULTS.replace(tensor=plan.tensor, context=plan.context, experts=plan.experts)
    return dataclasses.replace(short, job=dataclasses.replace(short.job, workload=workload, plan=None, choices=axes))


@dataclass(frozen=True)
class Expected:
    """What a candidate takes, as predicted or as studied."""

    cost: float
    """Seconds a token of one rank."""
    reserved: float
    """Bytes."""
    excess: float
    """Reserved bytes over the budget; negative if it fits."""
    is_exact: bool

    @property
    def may_fit(self) -> bool:
        """True if it fits; of a prediction, which does not know how segments fill up, also if it hardly does not."""
        return self.excess <= (0 if self.is_exact else MARGIN)


@dataclass(frozen=True)
class _Grouping:
    """Units of a base plan in the order of their forwards, with the name under which costs know each."""

    order: tuple[int, ...]
    names: tuple[str, ...]
    of_root: tuple[str, ...]
    """Units of the probe that this plan leaves to the root."""


class Evaluator:
    """Predicts candidates, studies some, and keeps the best.

    Attributes:
        replicas: numbers of replicas that the options allow.
        simulations: run in ``workers``, from when their context is entered.
        forecasts: of every candidate that was studied so far.
        best: the fastest of these that fits.
        smallest: the one that takes the least memory.
        studies: of these two; others are not kept.

    Raises:
        ValueError: ``shard()`` refuses every mesh, or the budget is more than any device has.
    """

    def __init__(
        self,
        space: Space,
        progress: Callable[[str], object] = lambda line: None,
        workers: int | None = 0,
        check: Callable[[], Any] = lambda: None,
    ) -> None:
        self.space, self._progress = space, progress
        self.simulations = Simulations(space.workload, workers, check)
        self.workers = self.simulations.workers
        self.forecasts: dict[Candidate, Forecast] = {}
        self.best: Candidate | None = None
        self.smallest: Candidate | None = None
        self.studies: dict[Candidate, Study] = {}
        self.bases = functools.cache(self._bases)
        self.options = functools.cache(self._options)
        self.predicted = functools.cache(self._predicted)
        self.costs = functools.cache(self._costs)
        self._grouping = functools.cache(self._grouped)
        self._layout = functools.cache(self._laid_out)
        self._probes: dict[tuple[int, Recompute], Task] = {}
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

    # What there is to choose from

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
        return self.simulations.simulator.resolve(chosen, self.space.cluster(replicate).mesh)

    def uniform(self, setting: Setting, reshard: str | int, recompute: Recompute) -> Candidate:
        """Return the candidate with all that is free set by two words, in the units that ``shard()`` makes for them."""
        bases = self.bases(setting.replicate)
        split = reshard not in ("default", "never") and True in bases
        return Candidate(setting, split, self._values(bases[split], reshard, recompute))

    def uniforms(self, setting: Setting) -> list[Candidate]:
        """Return the candidates that two words describe, the fastest first."""
        words = itertools.product(reshard_words(self.space, setting.replicate), RECOMPUTE)
        return list(dict.fromkeys(self.uniform(setting, *each) for each in words))

    def _values(self, base: Plan, reshard: str | int, recompute: Recompute) -> tuple[Values, ...]:
        given = self.space.given(reshard_after_forward=reshard, activation_checkpointing=recompute)
        freed = policies.reshard_values(base, given.reshard_after_forward, base.ranks[-1])
        return tuple(zip(freed, policies.recompute_values(base.units, given.activation_checkpointing), strict=True))

    def _options(self, replicate: int) -> dict[bool, list[list[Values]]]:
        """Return all values that each unit may have, by whether embeddings are split off."""
        words = list(itertools.product(reshard_words(self.space, replicate), RECOMPUTE))
        found = {}
        for split, base in self.bases(replicate).items():
            plans = [self._values(base, *each) for each in words]
            found[split] = [list(dict.fromkeys(values)) for values in zip(*plans, strict=True)]
        return found

    def units(self, candidate: Candidate) -> tuple[Unit, ...]:
        """Return a candidate's units; their values are not its own."""
        return self.bases(candidate.setting.replicate)[candidate.split].units

    def plan(self, candidate: Candidate) -> Plan:
        """Return a plan that ``shard()`` takes as it stands, and whose words say the same as its units."""
        base = self.bases(candidate.setting.replicate)[candidate.split]
        plan = dataclasses.replace(
            base,
            reshard_after_forward=reshard_word(base, [freed for freed, _ in candidate.values]),
            activation_checkpointing=recompute_word(base, [again for _, again in candidate.values]),
            offload=candidate.setting.offload,
        )
        return policies.apply_words(plan, base.ranks[-1])

    def budget(self, replicate: int) -> int:
        """Return the bytes for torch on a rank: no more than the device has besides the communicators of that mesh."""
        available = self.space.cluster(replicate).available_bytes
        asked = self.space.budget
        return available if asked is None else asked if replicate == self.replicas[0] else min(asked, available)

    # Prediction

    def start_probes(self) -> None:
        """Start all measurements, to go on side by side."""
        sizes = sorted({size for size, _ in batches(self.space)})
        options = next(iter(self.options(self.replicas[0]).values()))
        words = {again for values in options for _, again in values}
        for size, word in itertools.product(dict.fromkeys((sizes[0], sizes[-1])), (w for w in RECOMPUTE if w in words)):
            self._probes[size, word] = self._started(size, word)

    def _started(self, size: int, recompute: Recompute) -> Task:
        replicate = self.replicas[0]
        cluster = self.space.cluster(replicate)
        base = list(self.bases(replicate).values())[-1]
        plan = dataclasses.replace(base, reshard_after_forward="always", offload="none")
        given = self.space.given(reshard_after_forward="always", activation_checkpointing=recompute)
        plan = dataclasses.replace(plan, activation_checkpointing=given.activation_checkpointing)
        plan = policies.apply_words(plan, base.ranks[-1])
        runs = find_runs(self.simulations.simulator.model, plan)
        job = Job(self.space.workload, cluster.mesh, microbatch=size, on_cpu=not cluster.hardware.streams)
        return self.simulations.probe(Short(job, plan, runs, [PROBED] * len(runs)), cluster, self._mode)

    @property
    def _mode(self) -> Mode:
        return "compile" if self.space.choices.compile else "eager"

    def _costs(self, microbatch: int, recompute: Recompute) -> Costs:
        """Return what units cost, on a straight line between the two microbatches that were measured."""
        if not self._probes:
            self.start_probes()
        sizes = sorted({size for size, word in self._probes if word == recompute})
        few, many = (self.workers.result(self._probes[size, recompute]) for size in (sizes[0], sizes[-1]))
        share = (microbatch - sizes[0]) / max(1, sizes[-1] - sizes[0])
        found: Costs = few.at(many, share) if share else few
        return found

    def _grouped(self, replicate: int, split: bool, measured_units: tuple[str, ...]) -> _Grouping:
        base = self.bases(replicate)[split]
        same = {
            unit.name: (unit.kind, unit.parameters, unit.bytes)
            for plan in self.bases(replicate).values()
            for unit in plan.units
        }
        rank = {name: at for at, name in enumerate(measured_units)}
        alike = {same[name]: name for name in measured_units if name in same and name}
        # Of equal blocks in a row the one in the middle of those that were measured stands for all.
        for key in set(alike.values()):
            equal = [name for name in measured_units if same.get(name) == same[key]]
            alike[same[key]] = equal[min(1, len(equal) - 1)]
        names = [
            unit.name if unit.kind != "block" and unit.name in rank else alike.get(same[unit.name], "")
            for unit in base.units
        ]
        places = sorted(range(len(names)), key=lambda i: rank.get(names[i], len(rank)))
        known = {unit.name for unit in base.units}
        left = [
            name
            for name in measured_units
            if name not in known and name not in names and same.get(name, ("",))[0] != "block"
        ]
        return _Grouping(tuple(places), tuple(names), tuple(left))

    def _predicted(self, candidate: Candidate) -> tuple[float, float]:
        """Return (seconds, live bytes) of a step."""
        layout = self._layout(candidate.setting)
        laid, costs = self._laid(candidate, layout)
        return layout.seconds(laid, costs), layout.live_bytes(laid, costs)

    def live_bytes(self, candidate: Candidate, *, tokens: float = 1.0, ranks: float = 1.0) -> float:
        """Return the live bytes of a step, roughly, with so many times the tokens of a microbatch, and the ranks."""
        layout = self._layout(candidate.setting)
        laid, costs = self._laid(candidate, layout)
        laid = [Laid(each.cost.with_tokens(tokens), each.again) for each in laid]
        return layout.live_bytes(laid, dataclasses.replace(costs, shards=costs.shards / ranks))

    def _laid(self, candidate: Candidate, layout: Layout) -> tuple[list[Laid], Costs]:
        """Return the units of a candidate with their costs, in the order of their forwards, and all costs."""
        setting = candidate.setting
        of = {word: self.costs(setting.microbatch, word) for word in {again for _, again in candidate.values}}
        some = max(of.values(), key=lambda each: len(each.units))
        grouping = self._grouping(setting.replicate, candidate.split, tuple(some.units))
        laid = []
        for i in grouping.order:
            freed, again = candidate.values[i]
            cost = of[again].units.get(grouping.names[i], UnitCost())
            if not grouping.names[i]:
                cost = summed([cost, *(of[again].units[name] for name in grouping.of_root)])
            laid.append(Laid(cost, 0 if freed is False else layout.cluster.mesh[-1] if freed is True else freed))
        return laid, some

    def _laid_out(self, setting: Setting) -> Layout:
        cluster = self.space.cluster(setting.replicate)
        return Layout(cluster, setting.accumulation, self._mode, setting.offload == "cpu")

    def expected(self, candidate: Candidate) -> Expected:
        """Return a candidate's figures: studied, or predicted and corrected by what studies of its setting told."""
        setting = candidate.setting
        tokens = setting.microbatch * setting.accumulation * self.space.workload.sequence
        budget = self.budget(setting.replicate)
        if (known := self.forecasts.get(candidate)) is not None:
            reserved = known.peak_reserved_bytes
            return Expected(cost(known), reserved, reserved - known.budget_bytes, True)
        seconds, live = self.predicted(candidate)
        studied = [each for each in self.forecasts if each.setting == setting]
        studied = studied or [each for each in self.forecasts if each.setting.offload == setting.offload][-1:]
        if not studied:
            unit = max(self.units(candidate), key=lambda each: each.bytes)
            above: float = RESERVED_ABOVE * (unit.bytes + unit.bytes // 2)
            return Expected(seconds / tokens, live + above, live + above - budget, False)
        points = sorted((self.predicted(each)[1], self._above(each)) for each in studied)
        reserved_now = live + _on_line(points, live)
        nearest = min(studied, key=lambda each: abs(self.predicted(each)[1] - live))
        seconds *= self.forecasts[nearest].step_seconds / self.predicted(nearest)[0]
        return Expected(seconds / tokens, reserved_now, reserved_now - budget, False)

    def _above(self, candidate: Candidate) -> float:
        """Return the bytes that a studied candidate reserves above what was predicted to be live."""
        return self.forecasts[candidate].peak_reserved_bytes - self.predicted(candidate)[1]

    # Study

    def effort(self, candidate: Candidate) -> float:
        """Return the seconds that a study of a candidate may take, by the blocks that it runs."""
        units = zip(self.units(candidate), candidate.values, strict=True)
        rows = [(unit.kind, unit.parameters, values) for unit, values in units]
        lengths = [len(list(row)) for _, row in itertools.groupby(rows)]
        runs = sum(length >= FEWEST for length in lengths)
        blocks = sum(min(length, KEPT) if length >= FEWEST else length for length in lengths) * (1 + runs)
        took = next(self.costs(candidate.setting.microbatch, word).took for _, word in candidate.values)
        passes = 2 * min(candidate.setting.accumulation, MICROBATCHES)
        return took * passes * blocks / max(1, self.workers.count)

    def evaluate(self, candidate: Candidate) -> Forecast:
        """Return a candidate's forecast, studied exactly."""
        if candidate in self.forecasts:
            return self.forecasts[candidate]
        setting = candidate.setting
        budget = self.budget(setting.replicate)
        made = self.space.study(self.plan(candidate), setting, budget, self.simulations.simulator)
        forecast = self.forecasts[candidate] = made.forecast
        self.studies[candidate] = made
        if forecast.fits and (self.best is None or self.rank(candidate) < self.rank(self.best)):
            self.best = candidate
        if self.smallest is None or forecast.peak_reserved_bytes < self.forecasts[self.smallest].peak_reserved_bytes:
            self.smallest = candidate
        self.studies = {each: self.studies[each] for each in (self.best, self.smallest) if each is not None}
        fastest = f"the best so far {1 / self.best_cost():,.0f} {forecast.counted}/s a rank"
        speed = "none fits yet" if self.best is None else fastest
        self._progress(f"{len(self.forecasts)} plans compared, {speed}")
        return forecast

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


def _on_line(points: list[tuple[float, float]], at: float) -> float:
    """Return the value at ``at`` of a line through points (position, value), which is level beyond its ends."""
    before = [each for each in points if each[0] <= at]
    behind = [each for each in points if each[0] > at]
    if not before or not behind:
        return (before or behind[:1])[-1][1]
    (a, low), (b, high) = before[-1], behind[0]
    return low + (at - a) / (b - a) * (high - low)


def cost(forecast: Forecast) -> float:
    """Return the seconds a token of one rank."""
    return 1 / forecast.tokens_per_second_per_rank
