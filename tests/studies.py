"""Traces and studies made by hand, for what the planner shows: `Writer` writes a trace, `study` a whole small one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trueshard.planner import ledger
from trueshard.planner.timeline import Span, Timeline
from trueshard.planner.trace import (
    Allocation,
    Collective,
    Communication,
    Event,
    EventPlace,
    Free,
    Kernel,
    Kind,
    Phase,
    Stream,
    Trace,
)
from trueshard.planner.workload import Alternative, Study
from trueshard.plans import Forecast, MixedPrecision, Plan, Unit

#: Of the pretended device.
FLOPS_A_SECOND, BYTES_A_SECOND = 400e12, 50e9


class Writer:
    """Writes a trace; `at` says where in the step what follows happens."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.place = EventPlace("between", "")
        self._bytes: dict[int, int] = {}

    def at(self, phase: Phase, unit: str) -> None:
        self.place = EventPlace(phase, unit)

    def rest(self, bytes: int, kind: Kind, unit: str = "", what: str = "") -> int:
        """Something that is there when the step begins."""
        allocation = self._allocation(bytes, kind, unit, what, (), "float32")
        self.trace.resident.append(allocation)
        return allocation.storage

    def take(
        self,
        bytes: int,
        kind: Kind,
        unit: str | None = None,
        what: str = "",
        shape: tuple[int, ...] = (),
        dtype: str = "bfloat16",
    ) -> int:
        allocation = self._allocation(bytes, kind, self.place.unit if unit is None else unit, what, shape, dtype)
        self._write(allocation)
        return allocation.storage

    def give(self, storage: int) -> None:
        self._write(Free(self.place, storage, self._bytes[storage]))

    def compute(self, op: str, flops: int, *, recomputed: bool = False) -> int:
        return self._write(Kernel(self.place, op, flops, 0, 0, "bfloat16", recomputed=recomputed))

    def communicate(self, op: Collective, stream: Stream, received: int, unit: str, ranks: int = 8) -> int:
        whole = received * ranks // (ranks - 1)
        return self._write(Communication(self.place, op, stream, ranks, 1, received, whole, "bfloat16", unit))

    def _write(self, event: Event) -> int:
        self.trace.events.append(event)
        return len(self.trace.events) - 1

    def _allocation(
        self, bytes: int, kind: Kind, unit: str, what: str, shape: tuple[int, ...], dtype: str
    ) -> Allocation:
        storage = len(self._bytes)
        self._bytes[storage] = bytes
        return Allocation(self.place, storage, bytes, "compute", kind, unit, what, shape, dtype)


def plan(layers: int = 3, width: int = 4096) -> Plan:
    """A model with an embedding, `layers` blocks and a root; the last block is not resharded."""

    def unit(name: str, kind: str, elements: int, reshard: bool, why: str) -> Unit:
        return Unit(name, (name,), kind, elements, 4 * elements, elements, "float32", reshard, why=why)  # type: ignore[arg-type]

    blocks = [
        unit(f"model.layers.{i}", "block", 12 * width * width, i < layers - 1, "a repeated block")
        for i in range(layers)
    ]
    return Plan(
        units=(
            unit("model.embed_tokens", "embedding", 32000 * width, True, "backward does not read it"),
            *blocks,
            unit("", "root", 32000 * width, False, "what no other unit holds"),
        ),
        mixed_precision=MixedPrecision("bfloat16", "float32"),
        ranks=(8,),
    )


def trace(of: Plan, ranks: int = 8, tokens: int = 16384, kernels: int = 12) -> Trace:
    """A step of `of` as FSDP2 would make it, in the rough: gather, compute, free; gather, compute, reduce."""
    writer = Writer()
    gathered: dict[str, int] = {}
    kept: dict[str, list[int]] = {}

    def gather(unit: Unit) -> None:
        flat = writer.take(unit.parameters * 2, "communication", unit.name, "all-gather output")
        writer.communicate("all_gather", "all_gather", unit.parameters * 2 * (ranks - 1) // ranks, unit.name, ranks)
        gathered[unit.name] = writer.take(unit.parameters * 2, "gathered", unit.name, f"{unit.name}.weight")
        writer.give(flat)

    def compute(unit: Unit, number: int, passes: int, *, recomputed: bool = False) -> None:
        """Every second kernel is a product, and does the work of two."""
        flops = passes * 2 * unit.parameters * tokens * (number % 2) * 2 // kernels
        writer.compute("aten.mm" if number % 2 else "aten.mul", flops, recomputed=recomputed)

    def forward(unit: Unit) -> None:
        writer.at("forward", unit.name)
        gather(unit)
        kept[unit.name] = []
        for number in range(kernels):
            what = "aten.mm" if number % 2 else "aten.mul"
            kept[unit.name].append(writer.take(tokens * 4096 * 2, "activations", what=what, shape=(tokens, 4096)))
            compute(unit, number, 1)
        if unit.reshard_after_forward:
            writer.give(gathered.pop(unit.name))

    def backward(unit: Unit) -> int:
        """Return the storage of the gradient's shard."""
        writer.at("backward", unit.name)
        if unit.name not in gathered:
            gather(unit)
        size, name = unit.parameters * 4, f"{unit.name}.weight"
        gradient = writer.take(size // 2, "gradients", what=name)
        for number, storage in enumerate(reversed(kept.pop(unit.name))):
            compute(unit, number, 2, recomputed=number == 1)
            writer.give(storage)
        writer.give(gathered.pop(unit.name))
        reduced = writer.take(size, "communication", what="reduce-scatter input", dtype="float32")
        writer.give(gradient)
        writer.communicate("reduce_scatter", "reduce_scatter", size * (ranks - 1) // ranks, unit.name, ranks)
        shard = writer.take(size // ranks, "gradients", what=f"{name} shard", dtype="float32")
        writer.give(reduced)
        return shard

    for unit in of.units:
        writer.rest(unit.bytes // ranks, "parameters", unit.name, f"{unit.name}.weight")
        writer.rest(unit.bytes * 2 // ranks, "optimizer", unit.name, f"{unit.name}.weight exp_avg, exp_avg_sq")
    writer.take(tokens * 8, "inputs", what="input_ids", shape=(2, tokens // 2), dtype="int64")
    for unit in of.units:
        forward(unit)
    shards = [backward(unit) for unit in reversed(of.units)]
    writer.at("optimizer", "")
    for unit, shard in zip(reversed(of.units), shards, strict=True):
        update = writer.take(unit.bytes // ranks, "temporary", unit.name, "aten._fused_adamw_", (), "float32")
        writer.compute("aten._fused_adamw_", unit.parameters * 8)
        writer.give(update)
        writer.give(shard)
    return writer.trace


def timeline(of: Trace) -> Timeline:
    """Each stream in order; a unit's kernels wait for its gather, a collective for the kernels before it."""
    free = {"compute": 0.0, "all_gather": 0.0, "reduce_scatter": 0.0}
    ready: dict[str, float] = {}
    spans, computed = [], 0.0
    for position, event in enumerate(of.events):
        place = event.place
        if isinstance(event, Kernel):
            start = max(free["compute"], ready.get(place.unit, 0.0))
            end = start + max(event.flops / FLOPS_A_SECOND, 20e-6)
            computed += end - start
            spans.append(Span("compute", start, end, event.op, place.phase, place.unit, position))
            free["compute"] = end
        elif isinstance(event, Communication):
            behind = free["compute"] if event.op == "reduce_scatter" else 0.0
            start = max(free[event.stream], behind)
            end = start + event.received / BYTES_A_SECOND
            spans.append(Span(event.stream, start, end, event.op, place.phase, event.unit, position))
            free[event.stream] = end
            ready[place.unit] = end if event.op == "all_gather" else 0.0
    seconds = max(free.values())
    return Timeline(spans, seconds, computed, seconds - computed)


def forecast(of: Trace, time: Timeline, budget: int = 80 << 30) -> Forecast:
    peak = ledger.peak(of)
    reserved = peak.bytes + (peak.bytes >> 3)
    received = ledger.received(of)
    return Forecast(
        model="a hand-made model",
        hardware="h100",
        ranks=8,
        ranks_per_node=8,
        sequence=8192,
        microbatch=2,
        accumulation=1,
        optimizer="adamw",
        fits=reserved <= budget,
        budget_bytes=budget,
        peak_live_bytes=peak.bytes,
        peak_reserved_bytes=reserved,
        overhead_bytes=1 << 30,
        peak_phase=peak.phase,
        peak_unit=peak.unit,
        peak_by_kind=dict(peak.by_kind),
        bytes_received_per_step=sum(received.values()),
        received_by_collective=received,
        flops_per_step=ledger.flops(of),
        model_flops_per_step=ledger.flops(of, recomputed=False),
        step_seconds=time.seconds,
        compute_seconds=time.compute_seconds,
        exposed_communication_seconds=time.exposed_seconds,
        tokens_per_second_per_rank=16384 / time.seconds,
        mfu=ledger.flops(of, recomputed=False) / time.seconds / 989e12,
    )


def study(layers: int = 3, kernels: int = 12) -> Study:
    chosen = plan(layers)
    step = trace(chosen, kernels=kernels)
    time = timeline(step)
    return Study(
        plan=chosen,
        forecast=forecast(step, time),
        trace=step,
        timeline=time,
        reasons=("Blocks are freed after forward: gathering again is hidden behind computation.",),
        assumptions=("Every rank has batches of the same shape.",),
    )


def with_alternatives(layers: int, others: Mapping[str, tuple[float, float]], too_large: str) -> Study:
    """A study with other plans, whose words have memory and speed as multiples of this plan's; one does not fit."""
    one = study(layers)
    mine = one.forecast
    alternatives = [
        Alternative(
            words,
            dataclasses.replace(
                mine,
                peak_reserved_bytes=int(mine.peak_reserved_bytes * memory),
                tokens_per_second_per_rank=mine.tokens_per_second_per_rank * speed,
                fits=words != too_large,
            ),
        )
        for words, (memory, speed) in others.items()
    ]
    return dataclasses.replace(one, alternatives=alternatives)
