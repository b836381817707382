"""How long an operation occupies the device: by arithmetic or by memory, whichever takes longer.

The roofline model (Williams, Waterman, Patterson, "Roofline", 2009), with what part of each peak kernels reach.
"""

from __future__ import annotations

from collections.abc import Sequence

from trueshard.planner.events import Allocation, Event, Free, Kernel
from trueshard.planner.speed.hardware import Hardware, Mode

_OVERWRITING = frozenset(
    {
        "aten.copy_",
        "aten._foreach_copy_",
        "aten._foreach_zero_",
        "aten.fill_",
        "aten.zero_",
        "fsdp.all_gather_copy_in",
        "fsdp.split_with_sizes_copy",
        "fsdp.chunk_cat",
    }
)
"""Operators that do not read what they write: their outputs are among the inputs, and move once."""

_GATHERING = frozenset(
    {
        "aten.embedding",
        "aten.index",
        "aten.index_select",
        "aten.gather",
        "aten.nll_loss_forward",
        "aten.nll_loss_backward",
        "aten.embedding_dense_backward",
    }
)
"""Operators that read a few rows of a large tensor: as much as they write."""

_APART = frozenset(
    {
        "aten.embedding",
        "aten.embedding_dense_backward",
        "aten.index_put_",
        "aten._index_put_impl_",
        "aten.scatter_",
        "aten.scatter_add_",
        "aten.index_add_",
        "aten.nll_loss_forward",
        "aten.nll_loss_backward",
        "aten.sort",
        "aten.topk",
        "aten.cumsum",
        "aten.native_dropout",
        "aten.multinomial",
    }
)
"""Memory-bound operators that a compiler does not fuse with their neighbours."""


def seconds(kernel: Kernel, hardware: Hardware, mode: Mode) -> float:
    """How long the kernel occupies the device, by itself.

    ``max(flops / (peak · part), bytes / (bandwidth · part))``, and at least ``kernel_seconds``. ``part`` is
    ``matmul`` or ``attention`` for arithmetic and ``memory`` for bytes; of causal attention half the flops count.
    """
    efficiency = hardware.efficiency(mode)
    moved = moved_bytes(kernel) / (hardware.memory_bandwidth * efficiency.memory)
    if kernel.flops == 0:
        return max(moved, efficiency.kernel_seconds)
    is_attention = "attention" in kernel.op
    flops = kernel.flops / 2 if kernel.causal else kernel.flops
    part = efficiency.attention if is_attention else efficiency.matmul
    computed = flops / (hardware.peak(kernel.dtype) * part)
    return max(computed, moved, efficiency.kernel_seconds)


def moved_bytes(kernel: Kernel) -> int:
    """Bytes between the device and its memory: each input and each output once."""
    if kernel.op in _OVERWRITING:
        return max(kernel.read, kernel.written)
    if kernel.op in _GATHERING:
        return min(kernel.read, kernel.written) + kernel.written
    return kernel.read + kernel.written


def is_fusable(kernel: Kernel) -> bool:
    """Whether a compiler would put it into one kernel with its neighbours: element-wise, reductions, copies."""
    return kernel.flops == 0 and kernel.op.startswith("aten.") and kernel.op not in _APART


def all_seconds(events: Sequence[Event], hardware: Hardware, mode: Mode) -> list[float]:
    """For each event how long it occupies the device; 0 for what is no kernel.

    In mode ``compile`` kernels that can be fused and follow each other within one unit, forward or backward, are one
    kernel, since units are what is compiled. Its first member carries its time. A trace does not say which tensor a
    kernel reads, so the rule is by size: of what a kernel reads, the largest result of the run so far that is not
    larger comes from registers; and a result is written to memory unless it is freed within the run.
    """
    known: dict[tuple[str, int, int, int, str, bool], float] = {}
    times = [0.0] * len(events)
    for i, event in enumerate(events):
        if type(event) is Kernel:
            key = (event.op, event.flops, event.read, event.written, event.dtype, event.causal)
            if key not in known:
                known[key] = seconds(event, hardware, mode)
            times[i] = known[key]
    if mode == "compile":
        for run in _runs(events):
            spent = _fused_bytes(events, run) / (hardware.memory_bandwidth * hardware.compile.memory)
            for i in run:
                times[i] = 0.0
            times[run[0]] = max(spent, hardware.compile.kernel_seconds)
    return times


def _runs(events: Sequence[Event]) -> list[list[int]]:
    """Positions of kernels that are fused, two or more each."""
    runs: list[list[int]] = []
    run: list[int] = []
    where: tuple[str, str] | None = None
    for i, event in enumerate(events):
        if type(event) is Kernel:
            place = (event.place.phase, event.place.unit)
            in_unit = bool(event.place.unit) and event.place.phase in ("forward", "backward")
            fusable = in_unit and is_fusable(event) and not event.after
            if run and (not fusable or place != where):
                runs.append(run)
                run = []
            if fusable:
                run.append(i)
                where = place
    runs.append(run)
    return [each for each in runs if len(each) > 1]


def _fused_bytes(events: Sequence[Event], run: Sequence[int]) -> int:
    """What one kernel in place of the run moves: bytes read from outside, and bytes of results that outlive it."""
    made: dict[int, int] = {}
    sizes: set[int] = set()
    moved = 0
    for i in range(run[0], len(events)):
        event = events[i]
        if type(event) is Kernel:
            if i > run[-1]:
                break
            moved += event.read - max((size for size in sizes if size <= event.read), default=0)
            sizes.add(event.written)
        elif type(event) is Allocation:
            made[event.storage] = event.bytes
        elif type(event) is Free:
            made.pop(event.storage, None)
    return moved + sum(made.values())
