"""Rewrite a step's trace to one whose blocks' linear layers multiply in 8 bits, as torchao's training recipes do.

Parameters, activations, gradients and the optimizer stay what they are: operands are cast before each of a layer's
three products (output, gradient of the input, gradient of the weight), and the result is bfloat16. What stays in the
compute dtype: embeddings, the head, attention itself, and products with a dimension under ``SMALLEST`` (adapters,
routers). Casting is memory traffic: bytes for each element of an operand of a product, half of what torchao's own
roofline counts for the two products that read a tensor, without fusion with what made the tensor
(``get_tensor_memory_traffic_ovhd_s`` in torchao/testing/training/roofline_utils.py).

Where ranks share matrices, and a recipe gathers in one byte, each casts its own piece of a sequence, once for all
products that read it, before it is gathered (torchao/float8/float8_tensor_parallel.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

from trueshard.planner.hardware import Hardware
from trueshard.planner.trace import Allocation, Communication, Event, Free, Kernel, Trace
from trueshard.plans import Plan

Matmul = Literal["float8", "float8-rowwise", "mxfp8"]

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


def recipe_of(matmul: str, hardware: Hardware) -> Recipe:
    """Return a recipe that the device has products for.

    Raises:
        ValueError: unknown word, or the device's ``peak_flops`` has no such products.
    """
    words = get_args(Matmul)
    recipe = next((RECIPES[word] for word in words if word == matmul), None)
    if recipe is None:
        raise ValueError(f"matmul={matmul!r} is no recipe; use one of {', '.join(words)}")
    if recipe.peak not in hardware.peak_flops:
        raise ValueError(
            f"matmul={matmul!r}: {hardware.name} has no products in {recipe.peak}; its peak_flops are of "
            f"{', '.join(hardware.peak_flops)}"
        )
    return recipe


def cast(trace: Trace, plan: Plan, recipe: Recipe) -> Trace:
    """Return a step's trace with the linear layers of the plan's blocks in low precision."""
    blocks = {unit.name for unit in plan.units if unit.kind == "block"}
    events: list[Event] = []
    moved: list[int] = []
    known: set[int] = set()
    for event in trace.events:
        copies = 0
        if type(event) is Kernel and event.place.unit in blocks and event.op in ("aten.mm", "aten.addmm"):
            elements = event.read // 2
            event = _product(event, recipe, _gathers_before(trace, event, recipe), known)
            copies = int(elements * recipe.operand_bytes) if event.cast else 0
        storage = _FIRST - len(events)
        if copies:
            events.append(Allocation(event.place, storage, copies, unit=event.place.unit, what="cast"))
        moved.append(len(events))
        if isinstance(event, (Kernel, Communication)) and event.after:
            event = dataclasses.replace(event, after=tuple(moved[each] for each in event.after))
        events.append(event)
        if copies:
            events.append(Free(event.place, storage, copies))
    return Trace(_gathered_in_one_byte(events, blocks) if recipe.gathers else events, trace.resident)


def _gathers_before(trace: Trace, kernel: Kernel, recipe: Recipe) -> dict[int, Communication]:
    """Return the all-gathers on the tensor axis whose results a product reads, in one byte an element."""
    found = [(i, trace.events[i]) for i in kernel.after] if recipe.gathers else []
    return {i: event for i, event in found if _is_shared_gather(event)}


def _is_shared_gather(event: Event) -> TypeGuard[Communication]:
    return type(event) is Communication and event.op == "all_gather" and event.axis == "tensor"


def _product(kernel: Kernel, recipe: Recipe, gathers: Mapping[int, Communication], known: set[int]) -> Kernel:
    """``known``: gathers whose pieces were cast for another product; those of this one are added."""
    if kernel.dtype not in ("bfloat16", "float16"):
        return kernel
    if kernel.place.phase not in ("forward", "backward") or min(dimensions(kernel)) < SMALLEST:
        return kernel
    elements = kernel.read // 2
    gathered = sum(each.bytes // 2 for each in gathers.values())
    moved = (elements - gathered) * recipe.cast_bytes
    rows, inner, _ = dimensions(kernel)
    moved += gathered * TRANSPOSED if inner > rows else 0  # over more tokens than features: a weight's gradient
    moved += sum(each.bytes // 2 / each.ranks * recipe.cast_bytes for i, each in gathers.items() if i not in known)
    known.update(gathers)
    return dataclasses.replace(
        kernel, dtype=recipe.peak, read=int(elements * recipe.operand_bytes), cast=max(1, int(moved))
    )


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
    whole: dict[str, int] = defaultdict(int)
    halved: dict[str, int] = defaultdict(int)
    for event in events:
        if type(event) is Allocation and event.kind == "gathered" and event.unit in blocks:
            whole[event.unit] += event.bytes
            halved[event.unit] += _halved(event)
    share = {unit: halved[unit] / whole[unit] for unit in whole if whole[unit]}
    sizes: dict[int, int] = {}
    found: list[Event] = []
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
            type(event) is Kernel and event.op == "aten.clone" and any(_is_shared_gather(found[i]) for i in event.after)
        ):
            event = dataclasses.replace(event, read=event.read // 2, written=event.written // 2)
        elif type(event) is Communication and event.op == "all_gather" and event.unit in share:
            part = share[event.unit]
            event = dataclasses.replace(event, bytes=int(event.bytes * part), received=int(event.received * part))
        elif type(event) is Kernel and event.op in ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy"):
            part = share.get(event.place.unit, 1.0)
            event = dataclasses.replace(event, read=int(event.read * part), written=int(event.written * part))
        found.append(event)
    return found


def _halved(event: Allocation) -> int:
    """Return half the bytes of a gathered matrix, whose shape is flat here; vectors stay as they are."""
    is_matrix = event.bytes >= 2 * SMALLEST * SMALLEST
    return event.bytes // 2 if is_matrix and event.dtype in ("bfloat16", "float16") else event.bytes
