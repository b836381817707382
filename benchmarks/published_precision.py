"""What publishers did and ``shard()`` does not: products in 8 bits, and asynchronous tensor parallelism.

**Products in 8 bits**, as torchao's training recipes do it. Parameters, activations, gradients and the optimizer stay
what they are: operands are cast before each of a linear layer's three products (output, gradient of the input, gradient
of the weight), and the result is bfloat16. What stays in the compute dtype: embeddings, the head, attention itself, and
products with a dimension under ``SMALLEST`` (adapters, routers). Casting is memory traffic: bytes for each element of
an operand of a product, half of what torchao's own roofline counts for the two products that read a tensor, without
fusion with what made the tensor (``get_tensor_memory_traffic_ovhd_s`` in
torchao/testing/training/roofline_utils.py). Where ranks share matrices, and a recipe gathers in one byte, each casts
its own piece of a sequence, once for all products that read it, before it is gathered
(torchao/float8/float8_tensor_parallel.py).

**Asynchronous tensor parallelism.** With sequence parallelism, torch's inductor
(``torch/_inductor/fx_passes/micro_pipeline_tp.py``) cuts two pairs into as many pieces as ranks share the matrices
(``torch/distributed/_symmetric_memory``):

- an all-gather and the products that read it: a rank's own piece is multiplied first, while the others arrive;
- a product and the reduce-scatter of its result: a piece is sent while the next is computed, and the pieces are added
  by a kernel of its own at the end.

Not fused: the gradient of what several linear layers read, which is a sum of products, and gradients of weights, whose
product adds over the tokens that are gathered.

Both rewrite the trace of a simulated step. Durations that follow are written into its events.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard
from unittest import mock

from benchmarks.published_rows import Matmul, Row
from trueshard.planner.hardware import Hardware, Mode, hardware
from trueshard.planner.pipelining import Ends
from trueshard.planner.simulation.simulate import Simulation
from trueshard.planner.timeline import all_seconds, communication_seconds, moved_bytes
from trueshard.planner.trace import Allocation, Communication, Event, Free, Kernel, Trace
from trueshard.plans import Plan

SMALLEST = 256
"""Smallest dimension of a product whose operands are cast."""
TRANSPOSED = 2
"""Bytes moved for an element of a gathered operand that is laid out anew for the gradient of a weight."""
_FIRST = -1_000_000
"""Number of the first storage of cast operands; they count down."""


@dataclass(frozen=True)
class Recipe:
    """How operands are cast."""

    peak: str
    """Key of ``Hardware.peak_flops``."""
    operand_bytes: float
    """Of an element that is cast."""
    cast_bytes: float
    """Moved to cast an element of an operand for one product."""
    gathers: bool = False
    """Matrices, and activations on the tensor axis, are cast before they are gathered: one byte an element moves."""


RECIPES: Mapping[Matmul, Recipe] = {
    # Largest value: 2 bytes read; cast: 2 read, 1 written for each of two layouts. 6 for two products.
    "float8": Recipe("float8", 1, 3, gathers=True),
    # Cast along rows, a transposed copy of 2 bytes, cast along its rows. 8 for two products.
    "float8-rowwise": Recipe("float8", 1, 4),
    # Blocks of 32 along rows, and again along columns: 2 read and 1 written each.
    "mxfp8": Recipe("mxfp8", 1 + 1 / 32, 3),
}
"""torchao's ``tensorwise`` with float8 all-gather, ``rowwise`` and ``mxfp8_cublas``."""


EFFICIENCY = 0.85
"""Products of 8 bits reach this part of the share of the peak that those of 16 bits reach.

cuBLAS on an H100 reaches 1,297 of 1,979 TFLOP/s in float8 and 765 of 989 in bfloat16 (NVIDIA/cutlass#1662).
"""


def device_of(row: Row) -> Hardware:
    """Return the device of a row, as its publishers had it."""
    return hardware(row.device, **row.overrides)


def revised(made: Simulation, row: Row) -> Simulation:
    """Return a simulation of a row's setting as those ran it who published the row."""

    def changed(trace: Trace) -> Trace:
        device, mode = device_of(row), row.setting.mode
        if row.matmul is not None:
            trace = cast(trace, made.plan, RECIPES[row.matmul], device, mode)
        return pipelined(trace, device, mode) if row.async_tensor else trace

    return dataclasses.replace(made, first=changed(made.first), steady=changed(made.steady))


@contextlib.contextmanager
def stages_revised(ends: Ends, row: Row) -> Iterator[None]:
    """Let the stages of a pipeline be simulated as those ran them who published a row."""

    def simulate(original: Any, *arguments: Any) -> Simulation:
        return revised(original(*arguments), row)

    with contextlib.ExitStack() as patches:
        for stage in ends.stages.values():
            replacement = functools.partial(simulate, stage.simulator.simulate)
            patches.enter_context(mock.patch.object(stage.simulator, "simulate", replacement))
        yield


# Products in 8 bits


def cast(trace: Trace, plan: Plan, recipe: Recipe, device: Hardware, mode: Mode) -> Trace:
    """Return a step's trace with the linear layers of the plan's blocks in low precision."""
    blocks = {unit.name for unit in plan.units if unit.kind == "block"}
    events: list[Event] = []
    moved: list[int] = []
    already: set[int] = set()
    for event in trace.events:
        copies = 0
        if type(event) is Kernel and event.place.unit in blocks and event.op in ("aten.mm", "aten.addmm"):
            moved_to_cast = _cast_bytes(event, recipe, _gathers_before(trace, event, recipe), already)
            if moved_to_cast:
                copies = int(event.read // 2 * recipe.operand_bytes)
                event = _product(event, recipe, moved_to_cast, device, mode)
        storage = _FIRST - len(events)
        if copies:
            events.append(Allocation(event.place, storage, copies, unit=event.place.unit, what="cast"))
        moved.append(len(events))
        if isinstance(event, (Kernel, Communication)) and event.after:
            event = dataclasses.replace(event, after=tuple(moved[number] for number in event.after))
        events.append(event)
        if copies:
            events.append(Free(event.place, storage, copies))
    return Trace(_gathered_in_one_byte(events, blocks) if recipe.gathers else events, trace.resident)


def _gathers_before(trace: Trace, kernel: Kernel, recipe: Recipe) -> dict[int, Communication]:
    """Return the all-gathers on the tensor axis whose results a product reads, in one byte an element."""
    read = [(i, trace.events[i]) for i in kernel.after] if recipe.gathers else []
    return {i: event for i, event in read if _is_shared_gather(event)}


def _is_shared_gather(event: Event) -> TypeGuard[Communication]:
    return type(event) is Communication and event.op == "all_gather" and event.axis == "tensor"


def _cast_bytes(kernel: Kernel, recipe: Recipe, gathers: Mapping[int, Communication], already: set[int]) -> int:
    """Return the bytes that casting a product's operands moves; 0 if they stay in the compute dtype.

    ``already``: gathers whose pieces were cast for another product; those of this one are added.
    """
    if kernel.dtype not in ("bfloat16", "float16") or kernel.place.phase not in ("forward", "backward"):
        return 0
    if min(dimensions(kernel)) < SMALLEST:
        return 0
    gathered = sum(gather.bytes // 2 for gather in gathers.values())
    moved = (kernel.read // 2 - gathered) * recipe.cast_bytes
    rows, inner, _ = dimensions(kernel)
    moved += gathered * TRANSPOSED if inner > rows else 0  # over more tokens than features: a weight's gradient
    moved += sum(
        gather.bytes // 2 / gather.ranks * recipe.cast_bytes for i, gather in gathers.items() if i not in already
    )
    already.update(gathers)
    return max(1, int(moved))


def _product(kernel: Kernel, recipe: Recipe, cast_bytes: int, device: Hardware, mode: Mode) -> Kernel:
    """Return a product of cast operands, with its seconds: the casts, and then as ``operation_seconds``."""
    efficiency = device.efficiency(mode)
    bandwidth = device.memory_bandwidth * efficiency.memory
    made = dataclasses.replace(kernel, dtype=recipe.peak, read=int(kernel.read // 2 * recipe.operand_bytes))
    computed = made.flops / (device.peak(recipe.peak) * (efficiency.matmul * EFFICIENCY))
    least = max(computed, moved_bytes(made) / bandwidth, efficiency.kernel_seconds)
    return dataclasses.replace(made, seconds=cast_bytes / bandwidth + least)


def dimensions(kernel: Kernel) -> tuple[float, float, float]:
    """Return (m, k, n) of a product of 2-byte matrices, m the larger of m and n, from what it computes and moves.

    With f = m·k·n, c = m·n and s = m·k + k·n: k = f/c, and m and n are the roots of x² - s/k·x + c.
    """
    f, c, s = kernel.flops / 2, kernel.written / 2, kernel.read / 2
    if not f or not c:
        return 0.0, 0.0, 0.0
    k = f / c
    half = s / k / 2
    root = math.sqrt(max(0.0, half * half - c))
    return half + root, k, c / (half + root)


def _gathered_in_one_byte(events: list[Event], blocks: set[str]) -> list[Event]:
    """Halve the matrices among what the blocks gather, and the buffers through which they pass."""
    full: dict[str, int] = defaultdict(int)
    halved: dict[str, int] = defaultdict(int)
    for event in events:
        if type(event) is Allocation and event.kind == "gathered" and event.unit in blocks:
            full[event.unit] += event.bytes
            halved[event.unit] += _halved(event)
    share = {unit: halved[unit] / full[unit] for unit in full if full[unit]}
    sizes: dict[int, int] = {}
    rewritten: list[Event] = []
    for event in events:
        if type(event) is Allocation and event.unit in share:
            if event.kind == "gathered":
                sizes[event.storage] = _halved(event)
            elif event.kind == "communication" and event.stream == "all_gather":
                sizes[event.storage] = int(event.bytes * share[event.unit])
        if isinstance(event, (Allocation, Free)) and event.storage in sizes:
            event = dataclasses.replace(event, bytes=sizes[event.storage])
        elif _is_shared_gather(event) and event.unit in blocks:
            event = dataclasses.replace(event, bytes=event.bytes // 2, received=event.received // 2)
        elif (
            type(event) is Kernel
            and event.op == "aten.clone"
            and any(_is_shared_gather(rewritten[i]) for i in event.after)
        ):
            event = dataclasses.replace(event, read=event.read // 2, written=event.written // 2)
        elif type(event) is Communication and event.op == "all_gather" and event.unit in share:
            part = share[event.unit]
            event = dataclasses.replace(event, bytes=int(event.bytes * part), received=int(event.received * part))
        elif type(event) is Kernel and event.op in ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy"):
            part = share.get(event.place.unit, 1.0)
            event = dataclasses.replace(event, read=int(event.read * part), written=int(event.written * part))
        rewritten.append(event)
    return rewritten


def _halved(event: Allocation) -> int:
    """Return half the bytes of a gathered matrix, whose shape is flat here; vectors stay as they are."""
    is_matrix = event.bytes >= 2 * SMALLEST * SMALLEST
    return event.bytes // 2 if is_matrix and event.dtype in ("bfloat16", "float16") else event.bytes


# Asynchronous tensor parallelism

_COPIES = ("aten.clone", "aten.copy_", "aten._to_copy", "aten.cat")


def pipelined(trace: Trace, device: Hardware, mode: Mode) -> Trace:
    """Return a step's trace in which products hide collectives of the tensor axis that are fused with them."""
    events = list(trace.events)
    times = all_seconds(events, device, mode)
    readers: dict[int, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        if type(event) is Kernel and event.flops:
            for position in event.after:
                readers[position].append(i)
    for i, event in enumerate(trace.events):
        if type(event) is not Communication or event.axis != "tensor":
            continue
        seconds = communication_seconds(event, device, device.ranks_per_node)
        share = (event.ranks - 1) / event.ranks
        if event.op == "all_gather" and (beside := _beside_gather(trace.events, times, readers[i])):
            events[i] = dataclasses.replace(event, seconds=max(0.0, seconds - share * beside))
        elif event.op == "reduce_scatter" and (product := _producer(trace.events, i)) is not None:
            left = max(seconds / event.ranks, seconds - share * times[product])
            added = event.bytes / (device.memory_bandwidth * device.efficiency(mode).memory)
            events[i] = dataclasses.replace(event, seconds=left + added)
    return Trace(events, trace.resident)


def _beside_gather(events: Sequence[Event], times: Sequence[float], readers: Sequence[int]) -> float:
    """Return the seconds of the products that begin with this rank's own piece of what is gathered."""
    kernels = {i: event for i in readers if isinstance(event := events[i], Kernel)}
    forward = [i for i, kernel in kernels.items() if kernel.recomputed or kernel.place.phase == "forward"]
    if forward:
        return sum(times[i] for i in forward)
    return sum(times[i] for i in kernels) / 2  # gradients of an input and of a weight compute as much


def _producer(events: Sequence[Event], position: int) -> int | None:
    """Return the product whose result is scattered; None if something else made it."""
    for i in range(position - 1, -1, -1):
        event = events[i]
        if isinstance(event, (Allocation, Free)) or (isinstance(event, Kernel) and event.op in _COPIES):
            continue
        is_product = isinstance(event, Kernel) and event.flops > 0 and "attention" not in event.op
        return i if is_product else None
    return None
