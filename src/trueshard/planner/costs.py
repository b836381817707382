"""Seconds of one collective, and of one kernel.

Collectives: latency by their steps, and bytes over the bandwidth of the links on their way. A rank receives
``received`` bytes, (n-1)/n of the whole for an all-gather or a reduce-scatter and twice that for an all-reduce, so time
is ``received`` over the *bus bandwidth* as NCCL's tests define it (nccl-tests, PERFORMANCE.md). Steps and their
latencies are those of NCCL's own tuning model (src/graph/tuning.cc): a ring of n ranks over k nodes has n-k steps
inside nodes and k-1 between them, a tree has log2(k) steps between nodes in each direction.

Kernels: FLOPs or bytes moved, whichever takes longer, by the roofline model (Williams, Waterman, Patterson, "Roofline",
2009) with the share of each peak that kernels reach.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from trueshard.planner.hardware import Hardware, Mode
from trueshard.planner.trace import Allocation, Communication, Event, Free, Kernel

BASE_LATENCY = 10e-6
"""Seconds of start-up of a collective: NCCL's own model has 7 to 14 µs for a ring, by protocol."""

TREE = 0.9
"""Bandwidth of a tree over that of a ring, in NCCL's tuning model."""

STRAGGLING = 0.01
"""Relative growth of a step for each doubling of nodes: every collective waits for the slowest rank.

Published steps grow by that much more than links explain: from 1 to 16 nodes 4% (TorchTitan, 8B on H100; llm-foundry,
7B on H100), from 8 to 64 nodes 3% (llm-foundry, 70B), and more only where steps are short (7B to 64 nodes: 11%).
"""


def communication_seconds(communication: Communication, hardware: Hardware, ranks_per_node: int) -> float:
    """Return the seconds for which a collective occupies its stream, once every rank has reached it.

    ``ranks_per_node``: neighbouring global ranks that share a node.
    """
    if communication.ranks == 1 or communication.received == 0:
        return 0.0
    inside, nodes = spread(communication, ranks_per_node)
    if communication.op == "all_to_all":
        # Each pair of ranks exchanges directly: data from other nodes arrive through the rank's own adapter.
        near = communication.received * (inside - 1) / (communication.ranks - 1)
        over_links = near / (hardware.link_bandwidth * hardware.link_efficiency)
        over_network = (communication.received - near) / (hardware.network_bandwidth * hardware.network_efficiency)
        latency = hardware.link_latency if nodes == 1 else hardware.network_latency
        return BASE_LATENCY + latency + max(over_links, over_network)
    bus = bus_bandwidth(inside, nodes, hardware)
    ring = (communication.ranks - nodes) * hardware.link_latency + (nodes - 1) * hardware.network_latency
    if communication.op != "all_reduce":
        return BASE_LATENCY + ring + communication.received / bus
    tree = (inside - 1) * hardware.link_latency + math.ceil(math.log2(nodes)) * hardware.network_latency
    return BASE_LATENCY + min(
        2 * ring + communication.received / bus,
        2 * tree + communication.received / (bus * TREE),
    )


def spread(communication: Communication, ranks_per_node: int) -> tuple[int, int]:
    """Return (ranks of the group on one node, nodes) for a group that begins at the first rank of a node."""
    inside = min(communication.ranks, max(1, ranks_per_node // communication.stride))
    return inside, math.ceil(communication.ranks / inside)


def bus_bandwidth(inside: int, nodes: int, hardware: Hardware) -> float:
    """Return the bytes a second that each rank of a ring receives, with ``inside`` ranks on each of ``nodes`` nodes.

    NCCL builds rings so that each enters a node through another rank's adapter: a node's ranks share the bandwidth of
    all their adapters, and data then passes over the links inside, which may be slower.
    """
    link = hardware.link_bandwidth * hardware.link_efficiency
    if nodes == 1:
        return link
    network = inside * hardware.network_bandwidth * hardware.network_efficiency
    return network if inside == 1 else min(link, network)


_OVERWRITING = {
    *("aten.copy_", "aten._foreach_copy_", "aten._foreach_zero_", "aten.fill_", "aten.zero_"),
    *("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "fsdp.chunk_cat"),
}
"""Operators that do not read the arguments they write: these are among the inputs, and move once."""

_GATHERING = {
    *("aten.embedding", "aten.embedding_dense_backward", "aten.index", "aten.index_select", "aten.gather"),
    *("aten.nll_loss_forward", "aten.nll_loss_backward"),
}
"""Operators that read a few rows of a large tensor: as many bytes as they write."""

_UNFUSABLE = {
    *("aten.embedding", "aten.embedding_dense_backward", "aten.nll_loss_forward", "aten.nll_loss_backward"),
    *("aten.index_put_", "aten._index_put_impl_", "aten.scatter_", "aten.scatter_add_", "aten.index_add_"),
    *("aten.sort", "aten.topk", "aten.cumsum", "aten.native_dropout", "aten.multinomial"),
}
"""Memory-bound operators that a compiler does not fuse with their neighbours."""


def operation_seconds(kernel: Kernel, hardware: Hardware, mode: Mode) -> float:
    """Return the seconds for which a kernel occupies the device, by itself.

    ``max(flops / (peak · share), bytes / (bandwidth · share))``, and at least ``kernel_seconds``. ``share`` is
    ``matmul`` or ``attention`` for FLOPs and ``memory`` for bytes; of causal attention half the FLOPs count.
    """
    efficiency = hardware.efficiency(mode)
    moved = moved_bytes(kernel) / (hardware.memory_bandwidth * efficiency.memory)
    if kernel.flops == 0:
        return max(moved, efficiency.kernel_seconds)
    flops = kernel.flops / 2 if kernel.causal else kernel.flops
    share = efficiency.attention if "attention" in kernel.op else efficiency.matmul
    computed = flops / (hardware.peak(kernel.dtype) * share)
    return max(computed, moved, efficiency.kernel_seconds)


def moved_bytes(kernel: Kernel) -> int:
    """Return the bytes that a kernel reads and writes: each input and each output once."""
    if kernel.op in _OVERWRITING:
        return max(kernel.read, kernel.written)
    if kernel.op in _GATHERING:
        return min(kernel.read, kernel.written) + kernel.written
    return kernel.read + kernel.written


def is_fusable(kernel: Kernel) -> bool:
    """True if a compiler would fuse the kernel with its neighbours: element-wise, reductions, copies."""
    return kernel.flops == 0 and kernel.op.startswith("aten.") and kernel.op not in _UNFUSABLE


def all_seconds(events: Sequence[Event], hardware: Hardware, mode: Mode) -> list[float]:
    """Return for each event the seconds for which it occupies the device; 0 for events that are no kernels.

    In mode ``compile``, consecutive fusable kernels within one unit's forward or backward are one kernel, since units
    are compiled. The first of them carries its time. A finished trace does not tell which tensor a kernel reads, so the
    rule goes by size: of a kernel's input bytes, the largest earlier result of the run that is not larger comes from
    registers; and a result is written to memory unless it is freed within the run.
    """
    times = [operation_seconds(event, hardware, mode) if type(event) is Kernel else 0.0 for event in events]
    if mode == "compile":
        for run in _runs(events):
            spent = _fused_bytes(events, run) / (hardware.memory_bandwidth * hardware.compile.memory)
            for i in run:
                times[i] = 0.0
            times[run[0]] = max(spent, hardware.compile.kernel_seconds)
    return times


def _runs(events: Sequence[Event]) -> list[list[int]]:
    """Return runs of positions of kernels that are fused, two or more each."""

    def graph(position: int) -> tuple[str, str] | None:
        """Return phase and unit of a kernel that can be fused with its neighbours."""
        kernel: Any = events[position]
        phase, unit = kernel.place.phase, kernel.place.unit
        fusable = unit and phase in ("forward", "backward") and is_fusable(kernel) and not kernel.after
        return (phase, unit) if fusable else None

    kernels = [i for i, event in enumerate(events) if type(event) is Kernel]
    runs = [list(run) for found, run in itertools.groupby(kernels, graph) if found is not None]
    return [run for run in runs if len(run) > 1]


def _fused_bytes(events: Sequence[Event], run: Sequence[int]) -> int:
    """Return the bytes that one kernel for the whole run moves: inputs from outside, and results that outlive it."""
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
