"""Schedule a trace's kernels and collectives on streams as FSDP2 uses them, and estimate the seconds of each.

The schedule follows FSDP2 and NCCL:

- The host issues all events in order, and takes ``launch_seconds`` for each operation, ``collective_seconds`` more for
  a unit's collectives; nothing starts before it is issued. Kernels of the compute stream run one after another.
- An all-gather waits for no kernel. In forward it waits until the unit before the running one has copied its parameters
  out of their buffer, in backward until the running one has: so at most two buffers exist.
- A reduce-scatter starts after the kernels before it. Kernels after it go on, except that the copy into the input of
  the next one waits for it, and that clipping and the optimizer wait for all.
- Collectives of one group of ranks run one at a time, in the order of issue: a communicator has one queue.
- A kernel waits for the communications and transfers whose results it reads.
- Copies of shards to the device run on their own stream, in parallel to kernels and collectives, and wait for buffers
  as all-gathers do; copies of gradients to the host run on the stream of reductions.
- Kernels on host memory (``host``) block the host, which issues nothing meanwhile. They move bytes at the rank's whole
  share of that memory's bandwidth: this takes more threads than the one that ``torchrun`` gives to a rank unless
  ``OMP_NUM_THREADS`` is set.
- Without streams (CPU) everything is sequential.
- Over several nodes the whole step takes a little longer, since ranks wait for the slowest: ``STRAGGLING``.

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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trueshard.planner.hardware import Hardware, Mode
from trueshard.planner.trace import Allocation, Communication, Event, Free, HostCopy, Kernel, Phase, Stream, Trace

SHARD = "shard"
"""Axis of what is not said to be of another one."""


@dataclass(slots=True)
class Span:
    """A time for which a stream is occupied."""

    stream: Stream
    start: float
    """Seconds since the step began."""
    end: float
    name: str
    """Operator or collective."""
    phase: str
    unit: str
    event: int
    """Position in the trace."""


@dataclass(slots=True)
class Gap:
    """A time in which the compute stream computes nothing."""

    kind: Literal["waiting", "host", "ranks"]
    """Reason: it waits for communication, for the host to issue work, for the slowest rank."""
    start: float
    end: float


@dataclass
class Timeline:
    """Spans of a step, and sums of them in seconds.

    ``compute_seconds``, ``exposed_seconds``, ``host_seconds`` and ``straggling_seconds`` add up to ``seconds``.
    """

    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0
    """Time until the last stream of the slowest rank is done."""
    compute_seconds: float = 0.0
    """Computation on the compute stream."""
    exposed_seconds: float = 0.0
    """Compute stream waits for another stream."""
    exposed_by_axis: dict[str, float] = field(default_factory=dict)
    """Parts of ``exposed_seconds``, by the axis of the collective that it waits for."""
    host_seconds: float = 0.0
    """Compute stream waits for the host."""
    straggling_seconds: float = 0.0
    """Ranks of several nodes wait for the slowest."""
    gaps: list[Gap] = field(default_factory=list)


def schedule(trace: Trace, hardware: Hardware, ranks_per_node: int, mode: Mode = "eager") -> Timeline:
    """Schedule the events of one rank's step; all ranks are assumed to be alike. ``mode``: of the units.

    ``ranks_per_node``: neighbouring global ranks that share a node. Raises ValueError if that is not positive.
    """
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node} must be 1 or more")
    return _Scheduler(trace, hardware, ranks_per_node, mode).run()


class _Scheduler:
    """Clocks of host and streams while events are scheduled; all in seconds since the step began."""

    def __init__(self, trace: Trace, hardware: Hardware, ranks_per_node: int, mode: Mode) -> None:
        self.events = trace.events
        self.hardware = hardware
        self.ranks_per_node = ranks_per_node
        self.launch = hardware.efficiency(mode).launch_seconds
        self.launch_collective = self.launch + hardware.efficiency(mode).collective_seconds
        self.times = all_seconds(trace.events, hardware, mode)
        self.line = Timeline()
        self.host = 0.0
        """End of what the host has issued, or computed itself."""
        self.compute = 0.0
        """End of the compute stream's last kernel."""
        self.free: dict[Stream, float] = defaultdict(float)
        """End of the last work of each other stream."""
        self.queues: dict[tuple[str, int, int], float] = {}
        """End of the last collective of each group (axis, ranks, stride): its communicator has one queue."""
        self.done: dict[int, float] = {}
        """End of each communication or transfer, by position: when its result is available."""
        self.issued: dict[int, float] = {}
        """Time at which the host had issued it: before, a kernel that wants it waits for the host."""
        self.may_gather = 0.0
        """Time at which an all-gather gets a buffer: all but the last have been copied out."""
        self.copied_out = 0.0
        """Time at which the last buffer has been copied out."""
        self.in_forward = False
        self.before_forward = 0.0
        """End of the events before this forward on the compute stream."""
        self.reduced = 0.0
        """End of the last reduce-scatter."""
        self.nodes = 1
        """Nodes of the largest group."""

    def run(self) -> Timeline:
        for i, event in enumerate(self.events):
            kind = type(event)
            if kind is Kernel:
                self._kernel(i, event)  # type: ignore[arg-type]
            elif kind is Communication:
                self._communication(i, event)  # type: ignore[arg-type]
            elif kind is HostCopy:
                self._transfer(i, event)  # type: ignore[arg-type]
        line = self.line
        end = max(self.compute, self.host, *self.free.values())
        issued = max(self.compute, self.host)
        line.host_seconds += issued - self.compute
        self._expose(end - issued)
        line.straggling_seconds = end * STRAGGLING * math.log2(self.nodes)
        line.seconds = end + line.straggling_seconds
        self._gap("host", self.compute, issued)
        self._gap("waiting", issued, end)
        self._gap("ranks", end, line.seconds)
        return line

    def _gap(self, kind: Literal["waiting", "host", "ranks"], start: float, end: float) -> None:
        if end > start:
            self.line.gaps.append(Gap(kind, start, end))

    def _kernel(self, i: int, event: Kernel) -> None:
        seconds = self.times[i]
        if seconds == 0.0:
            return  # fused into a kernel before it
        self.host += self.launch
        if event.stream == "host":
            start = max([self.host, *(self.done.get(position, 0.0) for position in event.after)])
            self.host = start + moved_bytes(event) / self.hardware.host_memory_bandwidth
            self._add("host", start, self.host, i)
            return
        phase = event.place.phase
        wait, issued, axis = 0.0, 0.0, SHARD
        for position in event.after:
            if self.done.get(position, 0.0) > wait:
                wait, issued = self.done[position], self.issued[position]
                axis = getattr(self.events[position], "axis", SHARD)
        if event.stream != "compute" and self.hardware.streams:
            if event.stream == "all_gather":
                wait = max(wait, self._buffer_free(phase))
            end = self._on_stream(event.stream, wait, seconds, i)
            for position in event.after:
                self.done[position] = end  # readers of the collective's result read this kernel's
            return
        if event.op == "fsdp.chunk_cat":
            wait = max(wait, self.reduced)
        elif phase not in ("forward", "backward"):
            wait = max(wait, self.free["reduce_scatter"], self.free["all_reduce"])
        end = self._on_compute(wait, seconds, i, issued=issued, axis=axis)
        if any(getattr(self.events[position], "op", "") == "all_gather" for position in event.after):
            # A unit's parameters have been copied out of their buffer.
            self.may_gather = self.copied_out if phase == "forward" else end
            self.copied_out = end

    def _communication(self, i: int, event: Communication) -> None:
        self.host += self.launch if event.stream == "compute" else self.launch_collective
        seconds = communication_seconds(event, self.hardware, self.ranks_per_node)
        self.nodes = max(self.nodes, spread(event, self.ranks_per_node)[1])
        group = (event.axis, event.ranks, event.stride)
        wait = max([self.queues.get(group, 0.0), *(self.done.get(position, 0.0) for position in event.after)])
        if self.hardware.streams and event.stream == "all_gather":
            wait = max(wait, self._buffer_free(event.place.phase))
        elif self.hardware.streams and event.stream == "reduce_scatter":
            wait = max(wait, self.compute)
        self.queues[group] = end = self._move(i, event.stream, wait, seconds)
        if event.op == "reduce_scatter":
            self.reduced = end

    def _transfer(self, i: int, event: HostCopy) -> None:
        self.host += self.launch
        wait = self._buffer_free(event.place.phase) if event.direction == "to_device" else 0.0
        self._move(i, event.stream, wait, event.bytes / self.hardware.host_bandwidth)

    def _move(self, i: int, stream: Stream, wait: float, seconds: float) -> float:
        """Schedule a communication or transfer and return its end; without streams, computation waits for it."""
        if stream == "compute" or not self.hardware.streams:
            axis = getattr(self.events[i], "axis", SHARD)
            end = self._on_compute(wait, seconds, i, waited_for=seconds, axis=axis)
        else:
            end = self._on_stream(stream, wait, seconds, i)
        self.done[i], self.issued[i] = end, self.host
        return end

    def _on_compute(
        self, wait: float, seconds: float, i: int, waited_for: float = 0.0, issued: float = 0.0, axis: str = SHARD
    ) -> float:
        """Add a span to the compute stream, not before ``wait``, and return its end.

        ``waited_for``: seconds of the span that compute nothing; ``issued``: when the host issued its inputs'
        communication, before which the stream waits for the host; ``axis``: of what is waited for.
        """
        start = max(self.compute, self.host, wait)
        exposed = max(0.0, wait - max(self.compute, issued))
        since = max(self.compute, issued) if exposed else self.compute
        self._gap("host", self.compute, since)
        self._gap("waiting", since, since + exposed)
        self._gap("host", since + exposed, start)
        self._gap("waiting", start, start + waited_for)
        self._expose(exposed + waited_for, axis)
        self.line.host_seconds += start - self.compute - exposed
        self.line.compute_seconds += seconds - waited_for
        self.compute = end = start + seconds
        if self.events[i].place.phase != "forward":
            self.before_forward = end
        self._add("compute", start, end, i)
        return end

    def _expose(self, seconds: float, axis: str = SHARD) -> None:
        if seconds:
            self.line.exposed_seconds += seconds
            self.line.exposed_by_axis[axis] = self.line.exposed_by_axis.get(axis, 0.0) + seconds

    def _on_stream(self, stream: Stream, wait: float, seconds: float, i: int) -> float:
        start = max(self.host, self.free[stream], wait)
        end = self.free[stream] = start + seconds
        self._add(stream, start, end, i)
        return end

    def _add(self, stream: Stream, start: float, end: float, i: int) -> None:
        event = self.events[i]
        name = getattr(event, "op", "") or getattr(event, "direction", "")
        self.line.spans.append(Span(stream, start, end, name, event.place.phase, event.place.unit, i))

    def _buffer_free(self, phase: Phase) -> float:
        """Return when an all-gather issued now gets a buffer; a new forward waits for the events before it."""
        if phase == "forward" and not self.in_forward:
            self.may_gather = self.copied_out = max(self.before_forward, self.may_gather)
        self.in_forward = phase == "forward"
        return self.may_gather


# Seconds of one collective, and of one kernel

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
    if communication.seconds is not None:
        return communication.seconds
    moved = max(communication.received, communication.sent)  # links have both directions at once
    if communication.ranks == 1 or moved == 0:
        return 0.0
    inside, nodes = spread(communication, ranks_per_node)
    if communication.op == "all_to_all":
        # Each pair of ranks exchanges directly: data from other nodes arrive through the rank's own adapter.
        near = moved * (inside - 1) / (communication.ranks - 1)
        over_links = near / hardware.link_rate(inside) if inside > 1 else 0.0
        over_network = (moved - near) / (hardware.network_bandwidth * hardware.network_efficiency)
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
    if nodes == 1:
        return hardware.link_rate(inside)
    network = inside * hardware.network_bandwidth * hardware.network_efficiency
    return network if inside == 1 else min(hardware.link_rate(inside), network)


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
    ``matmul`` or ``attention``, also for scans by chunks, for FLOPs and ``memory`` for bytes; of causal attention half
    the FLOPs count.
    """
    if kernel.seconds is not None:
        return kernel.seconds
    efficiency = hardware.efficiency(mode)
    moved = moved_bytes(kernel) / (hardware.memory_bandwidth * efficiency.memory)
    if kernel.flops == 0:
        return max(moved, efficiency.kernel_seconds)
    flops = kernel.flops / 2 if kernel.causal else kernel.flops
    is_attention = "attention" in kernel.op or kernel.op.startswith("fused.chunk_")
    share = efficiency.attention if is_attention else efficiency.matmul
    return max(flops / (hardware.peak(kernel.dtype) * share), moved, efficiency.kernel_seconds)


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
    """Return runs of positions of kernels that are fused, two or more each.

    A collective that the compute stream waits for ends a run, and what reads its result may begin the next.
    """
    meetings = itertools.accumulate(type(event) is Communication and event.stream == "compute" for event in events)
    passed = list(meetings)

    def graph(position: int) -> tuple[str, str, int] | None:
        """Return phase, unit and collectives passed of a kernel that can be fused with its neighbours."""
        kernel: Any = events[position]
        phase, unit = kernel.place.phase, kernel.place.unit
        waits = any(getattr(events[before], "stream", "") != "compute" for before in kernel.after)
        fusable = unit and phase in ("forward", "backward") and is_fusable(kernel) and not waits
        return (phase, unit, passed[position]) if fusable else None

    kernels = [i for i, event in enumerate(events) if type(event) is Kernel]
    runs = [list(run) for key, run in itertools.groupby(kernels, graph) if key is not None]
    return [run for run in runs if len(run) > 1]


def _fused_bytes(events: Sequence[Event], run: Sequence[int]) -> int:
    """Return the bytes that one kernel for the whole run moves: inputs from outside, and results that outlive it.

    Behind the run, buffers of a collective may be allocated, which nothing of it writes.
    """
    operators = {getattr(events[i], "op", "") for i in run}
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
        elif type(event) is Allocation and event.what in operators:
            made[event.storage] = event.bytes
        elif type(event) is Free:
            made.pop(event.storage, None)
    return moved + sum(made.values())
