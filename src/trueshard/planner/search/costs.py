"""Cost of each unit by itself, measured on a short model, and from that the seconds and the memory of any plan.

A *probe* is one simulated step of a model of which few equal blocks are left, with everything freed after forward and
one way of recomputation. It tells for each unit the seconds of its forward and backward, what it keeps from one to the
other, and what it takes besides while it runs. All of these are straight lines in the microbatch, so probes of two
sizes tell those of all. What is gathered and reduced follows from bytes and ranks.

A plan's step is then laid out unit by unit as ``timeline`` does it event by event: a unit's gather runs beside the
computation of the one before, its reduction beside that of the next. Its memory is shards and optimizer state, and what
units keep, hold gathered and take besides, at the worst place. What the caching allocator reserves above that is not
known here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trueshard.planner import ledger
from trueshard.planner.forecasting import Cluster
from trueshard.planner.hardware import Mode
from trueshard.planner.timeline import STRAGGLING, all_seconds, communication_seconds
from trueshard.planner.trace import Collective, Communication, EventPlace, Kernel, Trace

_COPY_OUT = "fsdp.split_with_sizes_copy"
"""Operator that copies a unit's parameters out of a gather's buffer."""

_STEP = "(step)"
"""Stands for the unit of what clipping and optimizers cost."""

ADDED = 1.5
"""Memory traffic of adding up whole gradients, over their bytes in the dtype of reduction: it is not measured."""


@dataclass(frozen=True)
class UnitCost:
    """Seconds and bytes of one unit in one microbatch."""

    forward: float = 0.0
    """Seconds on the compute stream, without gathering; likewise ``backward``."""
    backward: float = 0.0
    copies: float = 0.0
    """Seconds in which what was gathered is copied out of its buffer."""
    kept: float = 0.0
    """Bytes made in forward and freed in backward."""
    forward_peak: float = 0.0
    """Most bytes besides ``resting`` and ``kept``, gathered parameters included; likewise ``backward_peak``."""
    backward_peak: float = 0.0
    resting: float = 0.0
    """Bytes of shards and buffers; of a step, of optimizer state."""
    gradient: float = 0.0
    """Bytes of the gradient's shard."""
    gathered: float = 0.0
    """Bytes of the whole unit in the dtype that it is gathered in; ``reduced``: in the one that it is reduced in."""
    reduced: float = 0.0
    issuing: float = 0.0
    """Seconds in which the host issues its reduction."""


@dataclass(frozen=True)
class Costs:
    """Costs of a model's units, by name, in the order of their forwards: those of a probe, which stand for others."""

    units: Mapping[str, UnitCost]
    step: UnitCost
    """Clipping and optimizers of the probe: ``forward`` seconds, ``forward_peak`` and ``resting`` bytes; nothing if the
    probe had none."""
    shards: float
    """Ranks of a shard group in the probe."""
    events: float
    """Events of a unit's forward and backward in the probe."""
    step_events: float
    """Events of clipping and optimizers for a unit."""

    @property
    def all_events(self) -> float:
        """Events of a unit in a step."""
        return self.events + self.step_events

    @property
    def resting(self) -> float:
        """Bytes of shards in the probe."""
        return sum(cost.resting for cost in self.units.values())

    def at(self, other: Costs, share: float) -> Costs:
        """Return what lies between these costs (``share`` 0) and others (1), or beyond, on a straight line."""
        units = {name: _between(cost, other.units[name], share) for name, cost in self.units.items()}
        return dataclasses.replace(self, units=units, step=_between(self.step, other.step, share))


_NAMES = [field.name for field in dataclasses.fields(UnitCost)]


def _between(one: UnitCost, two: UnitCost, share: float) -> UnitCost:
    pairs = ((getattr(one, name), getattr(two, name)) for name in _NAMES)
    return UnitCost(*(max(0.0, a + share * (b - a)) for a, b in pairs))


def summed(costs: Sequence[UnitCost]) -> UnitCost:
    """Return the cost of several units that are one: peaks are the largest, the rest adds up."""
    if len(costs) == 1:
        return costs[0]
    columns = {name: [getattr(cost, name) for cost in costs] for name in _NAMES}
    return UnitCost(*(max(v, default=0.0) if name.endswith("_peak") else sum(v) for name, v in columns.items()))


def measured(trace: Trace, memory: Mapping[str, Mapping[str, float]], cluster: Cluster, mode: Mode) -> Costs:
    """Return the costs of the units of a probe; ``memory``: as ``memory_of`` returns it."""
    units: defaultdict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    last_forward: dict[str, int] = {}
    kernels: defaultdict[tuple[str, str], int] = defaultdict(int)
    times = all_seconds(trace.events, cluster.hardware, mode)
    efficiency = cluster.hardware.efficiency(mode)
    launch = efficiency.launch_seconds
    for i, (event, seconds) in enumerate(zip(trace.events, times, strict=True)):
        phase, unit = event.place.phase, event.place.unit
        if type(event) is Kernel:
            if phase == "forward":
                last_forward[unit] = i
            if event.stream != "compute":
                units[unit]["issuing"] += launch if phase == "backward" else 0.0
                continue
            if event.op == _COPY_OUT:
                units[unit]["copies"] += seconds if phase == "forward" else 0.0
                continue
            part = (unit, str(phase)) if phase in ("forward", "backward") else (_STEP, "forward")
            kernels[part] += seconds > 0.0
            units[part[0]][part[1]] += seconds
        elif type(event) is Communication and event.stream == "compute":  # nothing hides it
            if phase in ("forward", "backward"):
                units[unit][phase] += communication_seconds(event, cluster.hardware, cluster.ranks_per_node)
        elif type(event) is Communication and event.op in ("all_gather", "reduce_scatter"):
            kind = "gathered" if event.op == "all_gather" else "reduced"
            units[event.unit][kind] = max(units[event.unit][kind], event.bytes)
            if kind == "reduced":
                units[event.unit]["issuing"] += launch + efficiency.collective_seconds
    for (name, key), count in kernels.items():  # the host issues kernels one after the other
        units[name][key] = max(units[name][key], count * launch)
    for name, sizes in memory.items():
        units[name].update(sizes)
    step = UnitCost(**units.pop(_STEP, {}))
    order = sorted(units, key=lambda name: last_forward.get(name, -1))
    costs = {name: UnitCost(**units[name]) for name in order}
    of_passes = sum(event.place.phase in ("forward", "backward") for event in trace.events)
    events, of_step = (count / (len(costs) + 1) for count in (of_passes, len(trace.events) - of_passes))
    return Costs(costs, step, cluster.mesh[-1], events, of_step)


def memory_of(trace: Trace) -> Mapping[str, Mapping[str, float]]:
    """Return bytes of each unit of a probe, and of ``_STEP``, by field of ``UnitCost``: the same on every device."""
    units: defaultdict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    end = len(trace.events)
    changes = np.zeros(end + 1, np.int64)
    for lifetime in ledger.lifetimes(trace):
        made, size = lifetime.allocation, lifetime.allocation.bytes
        freed = trace.events[lifetime.freed].place.phase if lifetime.freed < end else "between"
        if lifetime.made < 0:
            units[_STEP if made.kind == "optimizer" else made.unit]["resting"] += size
        elif made.place.phase == "forward" and freed == "backward" and made.kind not in ("gathered", "communication"):
            units[made.place.unit]["kept"] += size
        elif made.place.phase == "backward" and freed not in ("forward", "backward"):
            units[made.unit]["gradient"] += size
        else:
            changes[lifetime.made] += size
            changes[lifetime.freed] -= size
    live = np.cumsum(changes)
    for i, event in enumerate(trace.events):
        phase = event.place.phase
        unit = units[event.place.unit if phase in ("forward", "backward") else _STEP]
        key = "backward_peak" if phase == "backward" else "forward_peak"
        unit[key] = max(unit[key], int(live[i]))
    return units


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of a plan: its cost with the plan's way of recomputation, when it is gathered again, and reduced."""

    cost: UnitCost
    again: int
    """Ranks that it is resharded to after forward, and gathered from for backward; 0: it stays gathered."""
    reduces_each: bool = False
    """True if each microbatch is reduced; False: only the last one, of whole gradients."""
    apart: bool = False
    """True for experts that ranks share: the ranks that hold the same ones gather and reduce them."""


class Layout:
    """Predicts steps on one cluster, of ``accumulation`` microbatches.

    Units are given in the order of their forwards, with the costs of a probe from which theirs are taken.
    """

    def __init__(self, cluster: Cluster, accumulation: int, mode: Mode, offload: bool) -> None:
        self.cluster, self.accumulation, self.offload = cluster, accumulation, offload
        self.group, experts = cluster.mesh[-1], cluster.along("experts")
        self.groups = {False: (self.group, cluster.along("tensor")), True: (cluster.ranks_of_copy // experts, experts)}
        """Ranks over which a unit is sharded, and the distance between neighbours, by ``PlannedUnit.apart``."""
        self._collectives: dict[tuple[str, int, int, float], float] = {}
        self.bandwidth = cluster.hardware.memory_bandwidth * cluster.hardware.efficiency(mode).memory

    def _seconds(self, op: Collective, ranks: int, stride: int, size: float) -> float:
        """Return the seconds of a collective whose whole tensor has so many bytes."""
        key = (op, ranks, stride, size)
        if key not in self._collectives:
            received = int(size * (ranks - 1) / ranks) * (2 if op == "all_reduce" else 1)
            event = Communication(EventPlace("between", ""), op, "compute", ranks, stride, received, int(size), "")
            self._collectives[key] = communication_seconds(event, self.cluster.hardware, self.cluster.ranks_per_node)
        return self._collectives[key]

    def seconds(self, units: Sequence[PlannedUnit], probe: Costs) -> float:
        """Return the seconds of a step."""
        total = self._microbatch(units, is_last=True)
        if self.accumulation > 1:
            earlier = self._microbatch(units, is_last=False)
            earlier += ADDED * sum(unit.cost.reduced for unit in units if not unit.reduces_each) / self.bandwidth
            earlier += sum(unit.cost.issuing for unit in units if unit.reduces_each)
            total += (self.accumulation - 1) * earlier
        larger = sum(unit.cost.resting for unit in units) / max(1.0, probe.resting)
        total += probe.step.forward * larger * probe.shards / self.group
        if self.offload:
            gathers = 1 + sum(unit.again > 0 for unit in units) / max(1, len(units))
            size = sum(unit.cost.gathered for unit in units) / self.group
            total += self.accumulation * gathers * size / self.cluster.hardware.host_bandwidth
        nodes = self.cluster.ranks // min(self.cluster.ranks, self.cluster.ranks_per_node)
        return total * (1 + STRAGGLING * math.log2(nodes))

    def _microbatch(self, units: Sequence[PlannedUnit], *, is_last: bool) -> float:
        """Return the seconds of forward and backward: one queue of collectives beside the compute stream.

        A unit's gather is issued when the unit before has been copied out of its buffer (FSDP2 prefetches one).
        """
        replicas = self.cluster.along("replicate")
        compute = queue = copied = before = reduced = 0.0
        for unit in units:
            cost = unit.cost
            queue = max(queue, before) + self._seconds("all_gather", *self.groups[unit.apart], cost.gathered)
            before, copied = copied, max(compute, queue) + cost.copies
            compute = copied + cost.forward
        ready, copied = 0.0, compute
        nothing = PlannedUnit(UnitCost(), 0)
        for unit, following in itertools.pairwise([nothing, *reversed(units), nothing]):
            cost = unit.cost
            if unit.again:
                copied = compute = max(compute, ready) + cost.copies
            if following.again:
                ranks, stride = self.groups[following.apart]
                gather = self._seconds("all_gather", min(ranks, following.again), stride, following.cost.gathered)
                ready = queue = max(queue, copied) + gather
            compute += cost.backward
            if (is_last or unit.reduces_each) and cost.reduced:
                compute = max(compute, reduced)
                ranks, stride = self.groups[unit.apart]
                seconds = self._seconds("reduce_scatter", ranks, stride, cost.reduced)
                reduced = queue = max(queue, compute) + seconds
                if replicas > 1 and is_last:
                    reduced += self._seconds("all_reduce", replicas, ranks * stride, cost.reduced / ranks)
        return max(compute, queue, reduced)

    def live_bytes(self, units: Sequence[PlannedUnit], probe: Costs) -> float:
        """Return the most bytes that are live in a step."""
        factor = probe.shards / self.group
        shards = sum(unit.cost.resting for unit in units)
        larger = shards / max(1.0, probe.resting)
        resting = 0.0 if self.offload else (shards + probe.step.resting * larger) * factor
        sums = [0.0 if self.accumulation == 1 else self._sum(unit) for unit in units]
        live = resting + sum(sums)
        most, held = 0.0, 0.0
        for unit in units:
            most = max(most, live + held + unit.cost.forward_peak)
            live += unit.cost.kept
            held += self._held(unit)
        gradients = 0.0
        reverse = itertools.pairwise([*reversed(units), PlannedUnit(UnitCost(), 0)])
        for (unit, following), waiting in zip(reverse, reversed(sums), strict=True):
            cost = unit.cost
            # A probe gathers each unit and prefetches the next; what stays gathered is counted as held.
            besides = cost.backward_peak - sum(0.0 if near.again else near.cost.gathered for near in (unit, following))
            most = max(most, live + held + gradients + max(0.0, besides))
            live -= cost.kept + waiting
            held -= self._held(unit)
            gradients += 0.0 if self.offload else cost.gradient * factor
        return max(most, resting + gradients + probe.step.forward_peak * larger * factor)

    def _sum(self, unit: PlannedUnit) -> float:
        """Return the bytes that a unit's gradients of earlier microbatches take until the last one reduces it."""
        if not unit.reduces_each:
            return unit.cost.reduced
        return 0.0 if self.offload else unit.cost.reduced / self.group

    def _held(self, unit: PlannedUnit) -> float:
        """Return the bytes of gathered parameters that a unit holds between its forward and its backward."""
        if not unit.again:
            return unit.cost.gathered
        return unit.cost.gathered / unit.again if unit.again < self.group else 0.0
