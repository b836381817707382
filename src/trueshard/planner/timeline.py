"""Schedule a trace's kernels and collectives on streams as FSDP2 uses them.

The model follows FSDP2 and NCCL:

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
- Over several nodes the whole step takes a little longer, since ranks wait for the slowest: ``costs.STRAGGLING``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from trueshard.planner import costs
from trueshard.planner.hardware import Hardware, Mode
from trueshard.planner.trace import Communication, Kernel, Phase, Stream, Trace, Transfer


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


@dataclass
class Timeline:
    """Spans of a step, and sums of them in seconds."""

    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0
    """Until the last stream of the slowest rank is done; its wait for ranks of other nodes is in no span."""
    compute_seconds: float = 0.0
    """Computation on the compute stream."""
    exposed_seconds: float = 0.0
    """Compute stream waits for another stream."""
    host_seconds: float = 0.0
    """Compute stream waits for the host."""


def schedule(trace: Trace, hardware: Hardware, ranks_per_node: int, mode: Mode = "eager") -> Timeline:
    """Schedule the events of one rank's step; all ranks are assumed to be alike.

    Args:
        trace: the step.
        hardware: device with its links.
        ranks_per_node: neighbouring global ranks that share a node.
        mode: of the units, eager or compiled.

    Raises:
        ValueError: ``ranks_per_node`` is not positive.
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
        self.times = costs.all_seconds(trace.events, hardware, mode)
        self.line = Timeline()
        self.host = 0.0
        self.compute = 0.0
        # When each is idle: streams other than compute, and communicators of groups (ranks, stride).
        self.free: dict[Stream, float] = defaultdict(float)
        self.queues: dict[tuple[int, int], float] = {}
        # By position: when the result of a communication or transfer is available, and when the host issued it.
        self.done: dict[int, float] = {}
        self.issued: dict[int, float] = {}
        # When all all-gather buffers but the last have been copied out, and when the last has.
        self.may_gather = 0.0
        self.copied_out = 0.0
        self.in_forward = False
        self.before_forward = 0.0
        """When the compute stream is done with the events before this forward."""
        self.reduced = 0.0
        """When the last reduce-scatter is done."""
        self.nodes = 1
        """Nodes of the largest group."""

    def run(self) -> Timeline:
        for i, event in enumerate(self.events):
            kind = type(event)
            if kind is Kernel:
                self._kernel(i, event)  # type: ignore[arg-type]
            elif kind is Communication:
                self._communication(i, event)  # type: ignore[arg-type]
            elif kind is Transfer:
                self._transfer(i, event)  # type: ignore[arg-type]
        line = self.line
        line.seconds = max(self.compute, self.host, *self.free.values())
        line.host_seconds += max(0.0, self.host - self.compute)
        line.exposed_seconds += line.seconds - max(self.compute, self.host)
        line.seconds += line.seconds * costs.STRAGGLING * math.log2(self.nodes)
        return line

    def _kernel(self, i: int, event: Kernel) -> None:
        seconds = self.times[i]
        if seconds == 0.0:
            return  # fused into a kernel before it
        self.host += self.launch
        if event.stream == "host":
            start = max([self.host, *(self.done.get(position, 0.0) for position in event.after)])
            self.host = start + costs.moved_bytes(event) / self.hardware.host_memory_bandwidth
            self._add("host", start, self.host, i)
            return
        phase = event.place.phase
        wait = issued = 0.0
        for position in event.after:
            if self.done.get(position, 0.0) > wait:
                wait, issued = self.done[position], self.issued[position]
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
        end = self._on_compute(wait, seconds, i, issued=issued)
        if any(getattr(self.events[position], "op", "") == "all_gather" for position in event.after):
            # A unit's parameters have been copied out of their buffer.
            self.may_gather = self.copied_out if phase == "forward" else end
            self.copied_out = end

    def _communication(self, i: int, event: Communication) -> None:
        self.host += self.launch if event.stream == "compute" else self.launch_collective
        seconds = costs.communication_seconds(event, self.hardware, self.ranks_per_node)
        self.nodes = max(self.nodes, costs.spread(event, self.ranks_per_node)[1])
        group = (event.ranks, event.stride)
        wait = max([self.queues.get(group, 0.0), *(self.done.get(position, 0.0) for position in event.after)])
        if self.hardware.streams and event.stream == "all_gather":
            wait = max(wait, self._buffer_free(event.place.phase))
        elif self.hardware.streams and event.stream == "reduce_scatter":
            wait = max(wait, self.compute)
        self.queues[group] = end = self._move(i, event.stream, wait, seconds)
        if event.op == "reduce_scatter":
            self.reduced = end

    def _transfer(self, i: int, event: Transfer) -> None:
        self.host += self.launch
        wait = self._buffer_free(event.place.phase) if event.direction == "to_device" else 0.0
        self._move(i, event.stream, wait, event.bytes / self.hardware.host_bandwidth)

    def _move(self, i: int, stream: Stream, wait: float, seconds: float) -> float:
        """Schedule a communication or transfer and return its end; without streams, computation waits for it."""
        if stream == "compute" or not self.hardware.streams:
            end = self._on_compute(wait, seconds, i, waited_for=seconds)
        else:
            end = self._on_stream(stream, wait, seconds, i)
        self.done[i], self.issued[i] = end, self.host
        return end

    def _on_compute(self, wait: float, seconds: float, i: int, waited_for: float = 0.0, issued: float = 0.0) -> float:
        """Add a span to the compute stream, not before ``wait``, and return its end.

        ``waited_for``: seconds of the span that compute nothing; ``issued``: when the host issued its inputs'
        communication, before which the stream waits for the host.
        """
        start = max(self.compute, self.host, wait)
        exposed = max(0.0, wait - max(self.compute, issued))
        self.line.exposed_seconds += exposed + waited_for
        self.line.host_seconds += start - self.compute - exposed
        self.line.compute_seconds += seconds - waited_for
        self.compute = end = start + seconds
        if self.events[i].place.phase != "forward":
            self.before_forward = end
        self._add("compute", start, end, i)
        return end

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
