"""What each unit costs by itself, measured on a short model, and from that the seconds and the memory of any plan.

A *probe* is one simulated step of a model of which few equal blocks are left, with everything freed after forward and
one way of recomputation. It tells for each unit the seconds of its forward and backward, what it keeps from one to the
other, and what it takes besides while it runs. All of these are straight lines in the microbatch, so probes of two
sizes tell those of all. What is gathered and reduced follows from bytes and ranks.

A plan's step is then laid out unit by unit as ``timeline`` does it event by event: a unit's gather runs beside the
computation of the one before, its reduction beside that of the next. Its memory is what rests, and what units keep,
hold gathered and take besides, at the worst place. What the caching allocator reserves above that is not known here.
"""

from __future__ import annotations

import dataclasses
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
    """Seconds on the compute stream, without gathering, as are those of backward."""
    backward: float = 0.0
    copies: float = 0.0
    """Seconds in which what was gathered is copied out of its buffer."""
    kept: float = 0.0
    """Bytes made in forward and freed in backward."""
    forward_peak: float = 0.0
    """Most bytes besides what rests and is kept, gathered parameters included; likewise in backward."""
    backward_peak: float = 0.0
    rests: float = 0.0
    """Bytes of shards and buffers; of a step, of optimizer state."""
    gradient: float = 0.0
    """Bytes of the gradient's shard."""
    gathered: float = 0.0
    """Bytes of the whole unit in the dtype that it is gathered in, and in the one that it is reduced in."""
    reduced: float = 0.0

    def with_tokens(self, factor: float) -> UnitCost:
        """Return the bytes, roughly, with ``factor`` times the tokens: what is gathered and reduced stays."""
        stays = 2 * (self.gathered + self.reduced)
        peaks = (min(each, stays) + max(0.0, each - stays) * factor for each in (self.forward_peak, self.backward_peak))
        forward, backward = peaks
        return dataclasses.replace(self, kept=self.kept * factor, forward_peak=forward, backward_peak=backward)


@dataclass(frozen=True)
class Costs:
    """Of a model's units, by name, in the order of their forwards; the units of a probe and those they stand for."""

    units: Mapping[str, UnitCost]
    step: UnitCost
    """Clipping and optimizers of the probe: ``forward`` seconds, ``forward_peak`` and ``rests`` bytes."""
    shards: float
    """Ranks of a shard group in the probe."""
    took: float = 0.0
    """Seconds in which a block was simulated once."""

    @property
    def rests(self) -> float:
        """Bytes of shards in the probe."""
        return sum(each.rests for each in self.units.values())

    def at(self, other: Costs, share: float) -> Costs:
        """Return what lies between these costs (``share`` 0) and others (1), or beyond, on a straight line."""
        units = {name: _between(mine, other.units[name], share) for name, mine in self.units.items()}
        return Costs(units, _between(self.step, other.step, share), self.shards, self.took)


def _between(one: UnitCost, two: UnitCost, share: float) -> UnitCost:
    pairs = ((getattr(one, each.name), getattr(two, each.name)) for each in dataclasses.fields(UnitCost))
    return UnitCost(*(max(0.0, a + share * (b - a)) for a, b in pairs))


def summed(costs: Sequence[UnitCost]) -> UnitCost:
    """Return the cost of several units that are one: peaks are the largest, the rest adds up."""

    def together(name: str) -> float:
        values = [getattr(each, name) for each in costs]
        return max(values) if name.endswith("_peak") else sum(values)

    return UnitCost(*(together(each.name) for each in dataclasses.fields(UnitCost)))


def measured(trace: Trace, cluster: Cluster, mode: Mode) -> Costs:
    """Return the costs of the units of a probe."""
    found: defaultdict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    last: dict[str, int] = {}
    kernels: defaultdict[tuple[str, str], int] = defaultdict(int)
    for i, (event, seconds) in enumerate(
        zip(trace.events, all_seconds(trace.events, cluster.hardware, mode), strict=True)
    ):
        phase, unit = event.place.phase, event.place.unit
        if type(event) is Kernel:
            if phase == "forward":
                last[unit] = i
            if event.stream != "compute":
                continue
            if event.op == _COPY_OUT:
                found[unit]["copies"] += seconds if phase == "forward" else 0.0
                continue
            key = (unit, phase) if phase in ("forward", "backward") else (_STEP, "forward")
            kernels[key] += seconds > 0.0
            found[key[0]][key[1]] += seconds
        elif type(event) is Communication and event.op in ("all_gather", "reduce_scatter"):
            kind = "gathered" if event.op == "all_gather" else "reduced"
            found[event.unit][kind] = max(found[event.unit][kind], event.bytes)
    launch = cluster.hardware.efficiency(mode).launch_seconds
    for (name, way), count in kernels.items():
        found[name][way] = max(found[name][way], count * launch)
    _measure_memory(trace, found)
    step = UnitCost(**found.pop(_STEP, {}))
    for unit in found:
        last.setdefault(unit, -1)
    units = {unit: UnitCost(**found[unit]) for unit in sorted(found, key=lambda each: last[each])}
    return Costs(units, step, cluster.mesh[-1])


def _measure_memory(trace: Trace, found: Mapping[str, dict[str, float]]) -> None:
    """Add the bytes of each unit to its costs."""
    end = len(trace.events)
    changes = np.zeros(end + 1, np.int64)
    for each in ledger.lifetimes(trace):
        made, size = each.allocation, each.allocation.bytes
        freed = trace.events[each.freed].place.phase if each.freed < end else "between"
        if each.made < 0:
            found[_STEP if made.kind == "optimizer" else made.unit]["rests"] += size
        elif made.place.phase == "forward" and freed == "backward" and made.kind not in ("gathered", "communication"):
            found[made.place.unit]["kept"] += size
        elif made.place.phase == "backward" and freed not in ("forward", "backward"):
            found[made.unit]["gradient"] += size
        else:
            changes[each.made] += size
            changes[each.freed] -= size
    live = np.cumsum(changes)
    for i, event in enumerate(trace.events):
        phase = event.place.phase
        mine = found[event.place.unit if phase in ("forward", "backward") else _STEP]
        key = "backward_peak" if phase == "backward" else "forward_peak"
        mine[key] = max(mine[key], int(live[i]))


@dataclass(frozen=True)
class Laid:
    """A unit of a plan: its cost with the plan's way of recomputation, and what is gathered again for backward.

    ``again``: ranks of which it is gathered again; 0: it stays gathered.
    """

    cost: UnitCost
    again: int


class Layout:
    """Predicts steps on one cluster, of ``accumulation`` microbatches."""

    def __init__(self, cluster: Cluster, accumulation: int, mode: Mode, offload: bool) -> None:
        self.cluster, self.accumulation, self.offload = cluster, accumulation, offload
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

    def seconds(self, units: Sequence[Laid], of: Costs) -> float:
        """Return the seconds of a step of units in the order of their forwards; ``of``: what their costs are of."""
        group = self.cluster.mesh[-1]
        more = sum(each.cost.rests for each in units) / max(1.0, of.rests)
        first = self._microbatch(units, group, reduces=self.accumulation == 1)
        total = first
        if self.accumulation > 1:
            added = ADDED * sum(each.cost.reduced for each in units) / self.bandwidth
            total = (self.accumulation - 1) * (first + added) + self._microbatch(units, group, reduces=True)
        total += of.step.forward * more * of.shards / group
        if self.offload:
            gathers = 1 + sum(each.again > 0 for each in units) / max(1, len(units))
            size = sum(each.cost.gathered for each in units) / group
            total += self.accumulation * gathers * size / self.cluster.hardware.host_bandwidth
        nodes = self.cluster.ranks // min(self.cluster.ranks, self.cluster.ranks_per_node)
        return total * (1 + STRAGGLING * float(np.log2(nodes)))

    def _microbatch(self, units: Sequence[Laid], group: int, *, reduces: bool) -> float:
        """Return the seconds of forward and backward: one queue of collectives beside the compute stream."""
        replicas = self.cluster.along("replicate")
        compute = queue = copied = before = reduced = 0.0
        for each in units:
            cost = each.cost
            queue = max(queue, before) + self._seconds("all_gather", group, 1, cost.gathered)
            before, copied = copied, max(compute, queue) + cost.copies
            compute = copied + cost.forward
        ready = 0.0
        if units and units[-1].again:
            ready = queue = max(queue, compute) + self._seconds(
                "all_gather", units[-1].again, 1, units[-1].cost.gathered
            )
        for i in range(len(units) - 1, -1, -1):
            cost = units[i].cost
            if units[i].again:
                copied = compute = max(compute, ready) + cost.copies
            if i and (ranks := units[i - 1].again):
                ready = queue = max(queue, copied) + self._seconds("all_gather", ranks, 1, units[i - 1].cost.gathered)
            compute += cost.backward
            if reduces and cost.reduced:
                compute = max(compute, reduced)
                reduced = queue = max(queue, compute) + self._seconds("reduce_scatter", group, 1, cost.reduced)
                if replicas > 1:
                    reduced += self._seconds("all_reduce", replicas, group, cost.reduced / group)
        return max(compute, queue, reduced)

    def live_bytes(self, units: Sequence[Laid], of: Costs) -> float:
        """Return the most bytes that are live in a step; arguments as of ``seconds``."""
        factor = of.shards / self.cluster.mesh[-1]
        shards = sum(each.cost.rests for each in units)
        more = shards / max(1.0, of.rests)
        rests = 0.0 if self.offload else (shards + of.step.rests * more) * factor
        several = self.accumulation > 1
        whole = sum(each.cost.reduced for each in units) if several else 0.0
        most, held, now = 0.0, 0.0, rests + whole
        for each in units:
            cost = each.cost
            most = max(most, now + cost.forward_peak + held)
            now += cost.kept
            held += cost.gathered if not each.again else 0.0
            if 0 < each.again < self.cluster.mesh[-1]:
                held += cost.gathered / each.again
        gradients = 0.0
        for i in range(len(units) - 1, -1, -1):
            cost = units[i].cost
            besides = cost.backward_peak
            besides -= cost.gathered if not units[i].again else 0.0
            besides -= units[i - 1].cost.gathered if i and not units[i - 1].again else 0.0
            most = max(most, now + held + gradients + max(0.0, besides))
            now -= cost.kept + (cost.reduced if several else 0.0)
            held -= cost.gathered if not units[i].again else 0.0
            if 0 < units[i].again < self.cluster.mesh[-1]:
                held -= cost.gathered / units[i].again
            gradients += 0.0 if self.offload else cost.gradient * factor
        return max(most, rests + gradients + of.step.forward_peak * more * factor)
