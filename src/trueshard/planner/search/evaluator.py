"""Candidates of a space: predicted from what their units cost, and, of the few that matter, studied exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueshard.model import names, policies
from trueshard.options import DEFAULTS, SHARDED, Offload, Options, Recompute
from trueshard.planner.forecasting import MICROBATCHES, Cluster
from trueshard.planner.hardware import Mode
from trueshard.planner.inputs.batches import quietly
from trueshard.planner.process import Task, Workers
from trueshard.planner.reserve import LARGE_SEGMENT
from trueshard.planner.search.costs import Costs, Layout, PlannedUnit, UnitCost, measured, memory_of, summed
from trueshard.planner.search.space import RECOMPUTE, Candidate, Setting, Space, Values
from trueshard.planner.simulation.extension import KEPT
from trueshard.planner.simulation.repeats import runs_in
from trueshard.planner.simulation.simulate import Short, Simulation, Simulator
from trueshard.planner.trace import Trace
from trueshard.planner.workload import Job, Study, Workload
from trueshard.plans import Forecast, Plan, Unit

PROBED = 3
"""Blocks of a run in a probe: the one in the middle has neighbours on both sides."""

RESERVED_ABOVE = 3
"""Reserved above live bytes before a study tells, over what the largest unit gathers and reduces."""

SMALL = 256
"""Candidates of one setting and grouping of units up to which all are compared."""

EXTENDED = 0.1
"""Time of extending an event to all blocks, and replaying it, over that of simulating it."""

MARGIN = 2 * LARGE_SEGMENT
"""Bytes by which a plan that is expected not to fit may fit after all."""


class Simulations:
    """Run a workload's simulations in ``workers`` processes, as many as ``Workers`` says, and ``check`` beside them.

    Searches of one model share them: on other meshes, with other microbatches, of another sequence.
    """

    def __init__(self, workload: Workload, workers: int | None, check: Callable[[], Any] = lambda: None) -> None:
        self.simulator = Simulator(workload, self._run_all)
        functions: dict[str, Callable[..., Any]] = {"run": self._run, "probe": self._probe, "check": check}
        self._resolved: dict[str, Plan] = {}
        self.probes: dict[str, tuple[dict[tuple[int, Recompute], Task], Cluster]] = {}
        """Probes of a job by microbatch and way of recomputation, and their cluster; by ``Evaluator.start_probes``."""
        self._memory = functools.cache(lambda probe: memory_of(probe()))
        self._costs: dict[tuple[Task, str], Costs] = {}
        """Costs by probe, and by device and mode in words."""
        self.workers = Workers({name: quietly()(function) for name, function in functions.items()}, workers)
        self._expected: list[Callable[[], object]] = []
        self.run_ahead: Callable[[Sequence[Short]], Sequence[Short]] | None = None
        """(short models of the next study) → those that will probably be asked for later; called once."""
        self._started: dict[Hashable, Task] = {}
        """Runs that were started and not asked for yet, by ``Short.key``."""

    @contextlib.contextmanager
    def running(self) -> Iterator[Simulations]:
        """Inside, there are the processes, and they have the model."""
        with contextlib.suppress(Exception):  # ``check`` raises a better message
            _ = self.simulator.model
        with self.workers:
            yield self

    @functools.cached_property
    def check(self) -> Task:
        """Task that starts when it is first asked for: after the first simulations, or for its result."""
        return self.workers.start("check")

    def expect(self, start: Callable[[], object]) -> None:
        """Let ``start`` hand out what will probably be asked next, when processes would have nothing else to do."""
        if self.workers.count:
            self._expected.append(start)

    def hand_out_expected(self) -> None:
        """Hand out what is expected; called when what is asked for now was handed out. What is refused comes later."""
        for start in [self._expected.pop(0) for _ in list(self._expected)]:
            with contextlib.suppress(ValueError):
                start()

    def resolve(self, options: Options, mesh: tuple[int, ...]) -> Plan:
        """Return what options mean on a mesh, with its units: found out once, whatever the devices."""
        key = repr((options, mesh))
        if key not in self._resolved:
            self._resolved[key] = self.simulator.resolve(options, mesh)
        return self._resolved[key]

    def probe(self, short: Short, *, steps: bool) -> Task:
        """Start a step of a short model, whose trace tells what units cost; ``steps``: and what optimizers do."""
        return self.workers.start("probe", _sendable(short), steps)

    def costs(self, probe: Task, cluster: Cluster, mode: Mode) -> Costs:
        """Return what the units of a probe cost: measured once for a device, however many of them there are."""
        key = probe, repr((cluster.hardware, mode))
        if key not in self._costs:
            self._costs[key] = measured(probe(), self._memory(probe), cluster, mode)
        return self._costs[key]

    def _run_all(self, shorts: Sequence[Short]) -> list[Simulation]:
        keys = [short.key() for short in shorts]
        for key, short in zip(keys, shorts, strict=True):
            self._start(key, short)
        tasks = [self._started.pop(key) for key in keys]
        if self.workers.count:  # behind them, for the process that ends first, and while this one works with the traces
            self.hand_out_expected()
            _ = self.check
            run_ahead, self.run_ahead = self.run_ahead, None
            later = () if run_ahead is None else run_ahead(shorts)
            for short in later:
                self._start(short.key(), short)
        return [task() for task in tasks]

    def _start(self, key: Hashable, short: Short) -> None:
        if key not in self._started:
            self._started[key] = self.workers.start("run", _sendable(short))

    def _run(self, short: Short) -> Simulation:
        return self.simulator.run(self._with_workload(short))

    def _probe(self, short: Short, steps: bool) -> Trace:
        short = self._with_workload(short)
        try:
            return self.simulator.probe(short, steps=steps)
        except Exception:  # an optimizer may not like gradients that are not of a backward
            return self.simulator.run(short).steady

    def _with_workload(self, short: Short) -> Short:
        sequence: Any = short.job.workload
        workload = dataclasses.replace(self.simulator.workload, sequence=sequence)
        return dataclasses.replace(short, job=dataclasses.replace(short.job, workload=workload))


def _sendable(short: Short) -> Short:
    """Return a short model with no more of the workload than its sequence: workers have its functions."""
    workload: Any = short.job.workload.sequence
    plan = short.plan
    axes = DEFAULTS.replace(tensor=plan.tensor, context=plan.context, experts=plan.experts)
    return dataclasses.replace(short, job=dataclasses.replace(short.job, workload=workload, plan=None, choices=axes))


@dataclass(frozen=True)
class Expected:
    """Time and memory of a candidate, as predicted or as studied."""

    cost: float
    """Seconds a token of one rank."""
    reserved: float
    """Bytes."""
    excess: float
    """Reserved bytes over the budget; negative if it fits."""
    is_exact: bool

    @classmethod
    def of(cls, forecast: Forecast) -> Expected:
        """Return the figures of a study."""
        reserved = forecast.peak_reserved_bytes
        return cls(cost(forecast), reserved, max(reserved - forecast.budget_bytes, forecast.host_lack), True)

    @property
    def may_fit(self) -> bool:
        """True if it fits; a prediction, which does not know how segments fill up, may exceed the budget slightly."""
        return self.excess <= (0 if self.is_exact else MARGIN)


class Evaluator:
    """Predicts candidates, studies some, and keeps the best.

    ``simulations``: of the space's model; None: in this process. Raises ValueError if ``shard()`` refuses every mesh,
    or the budget is more than any device has.
    """

    def __init__(
        self,
        space: Space,
        progress: Callable[[str], object] = lambda line: None,
        simulations: Simulations | None = None,
    ) -> None:
        self.space, self._progress = space, progress
        self.simulations = simulations or Simulations(space.workload, 0)
        self.forecasts: dict[Candidate, Forecast] = {}
        """Forecasts of all candidates that were studied so far."""
        self.best: Candidate | None = None
        """The fastest of these that fits."""
        self.smallest: Candidate | None = None
        """The one of these that takes the least memory."""
        self.studies: dict[Candidate, Study] = {}
        """Studies of these two; others are not kept."""
        self.bases = functools.cache(self._bases)
        self.candidates = functools.cache(self._candidates)
        self.predicted = functools.cache(self._predicted)
        self.costs = functools.cache(self._costs)
        self._measured_parts = functools.cache(self._parts)
        self._around = functools.cache(self._blocks)
        self._layout = functools.cache(self._layout_of)
        self.work = 0.0
        """Work of all studies, see ``effort``."""
        self._simulated: set[tuple[tuple[Any, ...], int]] = set()
        """``_simulated_units`` of what was studied: others with the same share its simulations."""
        self._mode: Mode = "compile" if space.choices.compile else "eager"
        self._probes: dict[tuple[int, Recompute], Task] = {}  # until ``start_probes``
        self._probed: Cluster
        """Cluster of the probes; costs are measured on this space's devices."""
        self.replicas: list[int] = []
        """Numbers of replicas that the options allow."""
        refused: list[ValueError] = []
        for replicate in space.replicas():
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

        Where all resharding is free, ``shard()`` makes one of two groupings, see ``policies.frees_root``.
        """
        mesh = self.space.cluster(replicate).mesh
        plans: dict[bool, Plan] = {}
        for word in ("default", "always") if self.space.choices.reshard_after_forward == "auto" else ("default",):
            options = self.space.settled(reshard_after_forward=word, activation_checkpointing="none")
            plan = self.simulations.resolve(options, mesh)
            if not plans or [unit.name for unit in plan.units] != [unit.name for unit in plans[False].units]:
                plans[bool(plans)] = plan
        return plans

    def groupings(self, offload: Offload) -> Iterator[tuple[Setting, bool]]:
        """Yield each setting, and whether embeddings are units of their own: of two, no candidate is a mixture."""
        for replicate, batch in itertools.product(self.replicas, self.space.batches()):
            for split in self.bases(replicate):
                yield Setting(replicate, *batch, offload), split

    def uniform(self, setting: Setting, reshard: str | int, recompute: Recompute) -> Candidate:
        """Return the candidate with all that is free set by two words, in the units that ``shard()`` makes for them."""
        bases = self.bases(setting.replicate)
        split = policies.frees_root(reshard) and True in bases
        words = self.space.gradient_sums(setting.accumulation) or ("auto",)
        sums = words[-1] if reshard == policies.FREES_ALL else words[0]
        return Candidate(setting, split, self._values(bases[split], reshard, recompute, sums))

    def _candidates(self, setting: Setting, split: bool) -> list[Candidate]:
        """Return the candidates with one word of each kind for all blocks; of a small model all candidates.

        Root, embeddings and head have the same word, or stay gathered: they are large, and used once on either side of
        all blocks, so keeping them costs memory and saves time otherwise than keeping blocks.
        """
        base = self.bases(setting.replicate)[split]
        is_block = [unit.kind in ("block", "experts") for unit in base.units]
        choices: list[tuple[Values, ...]] = []
        every = self.space.gradient_sums(setting.accumulation) or ("auto",)
        words = self.space.reshard_words(setting.replicate), RECOMPUTE, every
        for reshard, recompute, sums in itertools.product(*words):
            values, kept = (self._values(base, word, recompute, sums) for word in (reshard, "never"))
            choices.append(tuple(kept[i] if not of_block else values[i] for i, of_block in enumerate(is_block)))
            choices.append(values)
        options = [list(dict.fromkeys(column)) for column in zip(*choices, strict=True)]
        if math.prod(map(len, options)) <= SMALL:
            choices = list(itertools.product(*options))
        return [Candidate(setting, split, values) for values in dict.fromkeys(choices)]

    def _values(self, base: Plan, reshard: str | int, recompute: Recompute, sums: str) -> tuple[Values, ...]:
        options = self.space.settled(
            reshard_after_forward=reshard, activation_checkpointing=recompute, accumulate_gradients=sums
        )
        freed = policies.reshard_values(base, options.reshard_after_forward, base.ranks[-1])
        again = policies.recompute_values(base.units, options.activation_checkpointing)
        memory = self.budget(base.ranks[0] if len(base.ranks) > 1 else 1)
        added = policies.accumulation_values(base, options.accumulate_gradients, base.ranks[-1], memory)
        return tuple(zip(freed, again, added, strict=True))

    def units(self, candidate: Candidate) -> tuple[Unit, ...]:
        """Return a candidate's units; their values are not its own."""
        return self.bases(candidate.setting.replicate)[candidate.split].units

    def plan(self, candidate: Candidate) -> Plan:
        """Return a plan that ``shard()`` takes as it stands, and whose words say the same as its units."""
        base = self.bases(candidate.setting.replicate)[candidate.split]
        freed, again, sums = zip(*candidate.values, strict=True)
        plan = dataclasses.replace(
            base,
            accumulate_gradients=policies.accumulation_word(base.units, sums),
            reshard_after_forward=policies.reshard_word(base, freed, base.ranks[-1]),
            activation_checkpointing=policies.recompute_word(base.units, again),
            offload=candidate.setting.offload,
        )
        return policies.apply_words(plan, base.ranks[-1])

    def budget(self, replicate: int) -> int:
        """Return the bytes for torch on a rank: no more than the device has besides the communicators of that mesh."""
        available = self.space.cluster(replicate).available_bytes
        budget = self.space.budget
        if budget is None:
            return available
        return budget if replicate == self.replicas[0] else min(budget, available)

    # Prediction

    def start_probes(self) -> None:
        """Start all measurements, to go on side by side, or take those of the same job on other ranks or devices.

        A probe's trace depends on the ranks by its shards alone, which are scaled, and not on the device.
        """
        space, cluster = self.space, self.space.cluster(self.replicas[0])
        key = repr((space.choices, space.batches(), space.workload.sequence, space.hardware.streams))
        self._probes, probed = self.simulations.probes.setdefault(key, ({}, cluster))
        self._probed = dataclasses.replace(probed, hardware=space.hardware)
        if self._probes:
            return
        sizes = sorted({microbatch for microbatch, _ in self.space.batches()})
        setting = Setting(self.replicas[0], *self.space.batches()[0], "none")
        used = {again for candidate in self.candidates(setting, False) for _, again, _ in candidate.values}
        base = list(self.bases(self.replicas[0]).values())[-1]
        for recompute in (word for word in RECOMPUTE if word in used):
            again = self.space.settled(activation_checkpointing=recompute).activation_checkpointing
            plan = dataclasses.replace(
                base, reshard_after_forward="always", activation_checkpointing=again, offload="none"
            )
            plan = policies.apply_words(plan, base.ranks[-1])
            runs = self.simulations.simulator.repeats.runs(plan)
            for size in dict.fromkeys((sizes[0], sizes[-1])):
                job = Job(self.space.workload, cluster.mesh, microbatch=size, on_cpu=not cluster.hardware.streams)
                short = Short(job, plan, runs, [PROBED] * len(runs))
                # Clipping and optimizers do the same in each: the first probe alone measures them.
                self._probes[size, recompute] = self.simulations.probe(short, steps=not self._probes)

    def _costs(self, microbatch: int, recompute: Recompute) -> Costs:
        """Return what units cost, on a straight line between the two microbatches that were measured."""
        if not self._probes:  # predicted outside of a search
            self.start_probes()
        sizes = sorted({size for size, word in self._probes if word == recompute})
        probes = (self._probes[size, recompute] for size in (sizes[0], sizes[-1]))
        few, many = (self.simulations.costs(probe, self._probed, self._mode) for probe in probes)
        share = (microbatch - sizes[0]) / max(1, sizes[-1] - sizes[0])
        costs: Costs = few.at(many, share) if share else few
        stepped = self.simulations.costs(next(iter(self._probes.values())), self._probed, self._mode)
        return dataclasses.replace(costs, step=stepped.step, step_events=stepped.step_events)

    def _parts(self, replicate: int, split: bool, measured_units: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
        """Return the position of each unit, in the order of forwards, and the measured units of which it consists.

        A probe has three of equal blocks in a row, of which the one in the middle stands for all: the first and the
        last have other neighbours. Its embeddings are units, which may belong to the root here.
        """
        units = self.bases(replicate)[split].units
        names = {unit.name for unit in units}
        kind_of = {unit.name: unit.kind for base in self.bases(replicate).values() for unit in base.units}
        likeness = {unit.name: _likeness(unit) for base in self.bases(replicate).values() for unit in base.units}
        equal: defaultdict[Any, list[str]] = defaultdict(list)
        for name in measured_units:
            equal[likeness.get(name)].append(name)
        joined = [name for name in measured_units if name not in names and kind_of.get(name, "block") != "block"]
        parts = []
        for i, unit in enumerate(units):
            if unit.kind != "block" and unit.name in measured_units:
                parts.append((i, (unit.name, *(joined if not unit.name else ()))))
            else:
                equals = equal[_likeness(unit)]
                parts.append((i, (equals[min(1, len(equals) - 1)],) if equals else ()))
        rank = {name: number for number, name in enumerate(measured_units)}
        return sorted(parts, key=lambda part: rank[part[1][0]] if part[1] else len(rank))

    def _blocks(self, replicate: int, split: bool) -> list[int]:
        """Return for each unit its own position, or that of the block in which it lies."""
        units = self.bases(replicate)[split].units
        blocks = {"": 0} | {unit.name: i for i, unit in enumerate(units) if unit.kind == "block"}
        return [names.nearest_above(unit.name, blocks) or i for i, unit in enumerate(units)]

    def _predicted(self, candidate: Candidate) -> tuple[float, float]:
        """Return (seconds, live bytes) of a step."""
        setting = candidate.setting
        layout = self._layout(setting)
        # Inside a block that is recomputed, experts are, too.
        ways = [candidate.values[around][1] for around in self._around(setting.replicate, candidate.split)]
        costs = {word: self.costs(setting.microbatch, word) for word in set(ways)}
        most = max(costs.values(), key=lambda cost: len(cost.units))
        planned = []
        for i, parts in self._measured_parts(setting.replicate, candidate.split, tuple(most.units)):
            freed, _, sums = candidate.values[i]
            cost = summed([costs[ways[i]].units.get(name, UnitCost()) for name in parts])
            group = layout.cluster.mesh[-1]
            ranks = 0 if freed is False else group if freed is True else freed
            apart = self.units(candidate)[i].kind == "experts"
            planned.append(PlannedUnit(cost, ranks, sums == SHARDED, apart))
        return layout.seconds(planned, most), layout.live_bytes(planned, most)

    def _layout_of(self, setting: Setting) -> Layout:
        return Layout(self.space.cluster(setting.replicate), setting.accumulation, self._mode, setting.offload == "cpu")

    def expected(self, candidate: Candidate) -> Expected:
        """Return a candidate's figures: studied, or predicted and corrected by what studies of its setting told."""
        setting = candidate.setting
        if (forecast := self.forecasts.get(candidate)) is not None:
            return Expected.of(forecast)
        seconds, live = self.predicted(candidate)
        studied = [other for other in self.forecasts if other.setting == setting]
        studied = studied or [other for other in self.forecasts if other.setting.offload == setting.offload][-1:]
        if studied:
            # A study tells a factor for the seconds, and what the allocator reserves above live bytes: the one nearest
            # in memory counts, and between two studies what lies between them.
            nearest = min(studied, key=lambda other: abs(self.predicted(other)[1] - live))
            seconds *= self.forecasts[nearest].step_seconds / self.predicted(nearest)[0]
            predicted = [(self.predicted(other)[1], self.forecasts[other].peak_reserved_bytes) for other in studied]
            points = np.array(sorted((bytes, reserved - bytes) for bytes, reserved in predicted))
            expected = live + float(np.interp(live, points[:, 0], points[:, 1]))
        else:
            shared = self.space.cluster(setting.replicate).along("experts")
            units = self.units(candidate)
            largest = max(unit.bytes // (shared if unit.kind == "experts" else 1) for unit in units)
            expected = live + RESERVED_ABOVE * (largest + largest // 2)
        readers = self.space.cluster(setting.replicate).readers_share  # ranks with the same samples share their tokens
        tokens = setting.microbatch * setting.accumulation * self.space.workload.sequence / readers
        return Expected(seconds / tokens, expected, expected - self.budget(setting.replicate), False)

    def order(self, candidate: Candidate) -> tuple[float, float]:
        """Return a key, smaller for better: expected seconds a token, and memory."""
        expected = self.expected(candidate)
        return float(f"{expected.cost:.7g}"), expected.reserved

    # Study

    def effort(self, candidate: Candidate) -> float:
        """Return the work of a study: about how many events are simulated, and of those extended a part."""
        events = max(self.costs(candidate.setting.microbatch, word).all_events for _, word, _ in candidate.values)
        kept, runs = self._simulated_units(candidate)
        blocks = 0 if (kept, runs) in self._simulated else len(kept) * (1 + runs)
        passes = 2 * min(candidate.setting.accumulation, MICROBATCHES)
        return events * passes * (blocks + EXTENDED * len(candidate.values))

    def _simulated_units(self, candidate: Candidate) -> tuple[tuple[Any, ...], int]:
        """Return the units that a simulation of a candidate keeps, and the number of runs of equal blocks."""
        units = zip(self.units(candidate), candidate.values, strict=True)
        rows = [(candidate.setting, unit.kind, unit.parameters, values) for unit, values in units]
        runs = runs_in("", rows)
        for run in reversed(runs):
            del rows[run.start : run.start + (run.count - KEPT) * run.period]
        return tuple(rows), len(runs)

    def evaluate(self, candidate: Candidate) -> Forecast:
        """Return a candidate's forecast, studied exactly."""
        if candidate in self.forecasts:
            return self.forecasts[candidate]
        self.work += self.effort(candidate) if self._probes else 0.0  # outside of a search nobody asks
        self._simulated.add(self._simulated_units(candidate))
        budget = self.budget(candidate.setting.replicate)
        study = self.space.study(self.plan(candidate), candidate.setting, budget, self.simulations.simulator)
        forecast = self.forecasts[candidate] = study.forecast
        self.studies[candidate] = study
        if forecast.fits and (self.best is None or self.order(candidate) < self.order(self.best)):
            self.best = candidate
        if self.smallest is None or forecast.peak_reserved_bytes < self.forecasts[self.smallest].peak_reserved_bytes:
            self.smallest = candidate
        self.studies = {kept: self.studies[kept] for kept in (self.best, self.smallest) if kept is not None}
        fastest = f"the best so far {1 / self.best_cost():,.0f} {forecast.counted}/s a rank"
        speed = "none fits yet" if self.best is None else fastest
        count = len(self.forecasts)
        self._progress(f"{count} {'plan' if count == 1 else 'plans'} compared, {speed}")
        return forecast

    def best_cost(self) -> float:
        """Return the seconds a token of the best candidate; infinity if none fits."""
        return math.inf if self.best is None else cost(self.forecasts[self.best])


def _likeness(unit: Unit) -> tuple[str, int, int]:
    """Return what two units have in common that cost the same."""
    return unit.kind, unit.parameters, unit.bytes


def cost(forecast: Forecast) -> float:
    """Return the seconds a token of one rank."""
    return 1 / forecast.tokens_per_second_per_rank
