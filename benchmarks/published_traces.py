"""What others' code takes otherwise than this library's: rewrites of a simulated step's trace, expandable segments."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from benchmarks.published_rows import Setting
from trueshard.planner.ledger import Lifetime, lifetimes
from trueshard.planner.reserve import MINIMUM, CachingAllocator, MemoryBlock, Pool, round_up
from trueshard.planner.trace import Allocation, Communication, Event, Free, Kernel, Stream, Trace

STASH = 5
"""Inputs of blocks that stay on the device while later ones are copied to the host.

Source: ``max_fwd_stash_size`` of torchtune/training/_activation_offloading.py.
"""
_OURS, _TORCHAO = 1 / 2 + 4 / 64, 1 / 2 + 1 / 64 + 2 / (64 * 256)
"""Bytes of a weight in 4 bits: with a scale of 32 bits for each 64; with one of 8 bits, and a factor in bfloat16 for
each 256 scales (``NF4Tensor`` of torchao/dtypes/nf4tensor.py)."""
_OF_LOGITS = "aten._log_softmax_backward_data"
_AGAIN = 1 << 40
"""Added to a storage's number when it comes back from the host."""


def on_one_device(trace: Trace, setting: Setting) -> Trace:
    """Return the step as those who train on one GPU run it."""
    trace = _without_fsdp(trace)
    if setting.quantize:
        trace.resident = [_in_four_bits(allocation) for allocation in trace.resident]
    trace = in_one_graph(trace) if setting.whole else trace
    return inputs_on_host(trace) if setting.offload else trace


def _without_fsdp(trace: Trace) -> Trace:
    """Return the step with nothing gathered into memory of its own."""
    dropped: set[int] = set()
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Allocation) and event.kind in ("gathered", "communication"):
            dropped.add(event.storage)
            continue
        is_fsdp = isinstance(event, Communication) or (isinstance(event, Kernel) and event.op.startswith("fsdp."))
        if is_fsdp or (isinstance(event, Free) and event.storage in dropped):
            continue
        events.append(replace(event, after=()) if isinstance(event, Kernel) and event.after else event)
    resident = [allocation for allocation in trace.resident if allocation.kind not in ("gathered", "communication")]
    return Trace(events, resident)


def _in_four_bits(allocation: Allocation) -> Allocation:
    is_packed = allocation.kind == "parameters" and allocation.what.endswith(".packed")
    return replace(allocation, bytes=int(allocation.bytes * _TORCHAO / _OURS)) if is_packed else allocation


def in_one_graph(trace: Trace) -> Trace:
    """Return the step with what a microbatch's backward returns, and what it is given, until it ends.

    What autograd gives a node (the gradient of logits) is held while it runs: ``PyNode::apply`` of
    torch/csrc/autograd/python_function.cpp.
    """
    of_parameters = {
        event.shape for event in trace.events if isinstance(event, Allocation) and event.kind == "gradients"
    }
    events: list[Event] = []
    until_end: list[Event] = []
    held: set[int] = set()
    for event in trace.events:
        if event.place.phase != "backward":
            events += until_end
            until_end.clear()
            held.clear()
        elif isinstance(event, Allocation) and (event.shape in of_parameters or event.what == _OF_LOGITS):
            held.add(event.storage)
        elif isinstance(event, Free) and event.storage in held:
            until_end.append(event)
            continue
        events.append(event)
    return Trace([*events, *until_end], trace.resident)


def inputs_on_host(trace: Trace) -> Trace:
    """Return the step with what recomputed blocks read on the host, from a few blocks later until their backward.

    Copies take no time: a block's input is copied while the next blocks compute, on a stream of its own.
    """
    inputs = _inputs_of_blocks(trace)
    changes: dict[int, list[Event]] = defaultdict(list)
    back: set[int] = set()
    for lifetime, later in zip(inputs, inputs[STASH:], strict=False):
        made, freed = lifetime.allocation, trace.events[lifetime.freed]
        unit = freed.place.unit
        begin = next(
            i for i in range(lifetime.made, lifetime.freed + 1)
            if (place := trace.events[i].place).phase == "backward" and place.unit == unit
        )  # fmt: skip
        changes[later.made].append(Free(made.place, made.storage, made.bytes))
        changes[begin].append(replace(made, place=trace.events[begin].place, storage=made.storage + _AGAIN))
        back.add(lifetime.freed)
    events: list[Event] = []
    for i, event in enumerate(trace.events):
        events += changes[i]
        events.append(
            replace(event, storage=event.storage + _AGAIN) if isinstance(event, Free) and i in back else event
        )
    return Trace(events, trace.resident)


def _inputs_of_blocks(trace: Trace) -> list[Lifetime]:
    """Return what blocks' forwards leave for their backwards, oldest first: of the size that takes most in all."""
    left = [lifetime for lifetime in lifetimes(trace) if lifetime.made >= 0 and lifetime.freed < len(trace.events)]
    left = [lifetime for lifetime in left if lifetime.allocation.kind == "activations"]
    sizes: dict[int, int] = defaultdict(int)
    for lifetime in left:
        sizes[lifetime.allocation.bytes] += lifetime.allocation.bytes
    by_size = [lifetime for lifetime in left if lifetime.allocation.bytes == max(sizes, key=lambda size: sizes[size])]
    return sorted(by_size, key=lambda lifetime: lifetime.made)


_ADDRESSES = 1 << 50
"""Distance between segments that grow."""


class ExpandableAllocator(CachingAllocator):
    """The allocator with ``expandable_segments:True`` in ``PYTORCH_CUDA_ALLOC_CONF``.

    A pool is one segment that grows by pages of 2 or 20 MiB behind its last block, which is extended if it is free, and
    every remainder of 512 bytes is split off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[Pool, int] = {}
        """Address behind each pool's segment."""

    def pool(self, stream: Stream, small: bool) -> Pool:
        pool = super().pool(stream, small)
        if pool not in self.ends:
            pool.remainder = MINIMUM
            self.ends[pool] = _ADDRESSES * len(self.ends)
        return pool

    def reserve(self, pool: Pool, size: int) -> MemoryBlock:
        end = self.ends[pool]
        base = end // _ADDRESSES * _ADDRESSES
        start = end
        if (last := pool.ends.get(end)) is not None:
            pool.remove(last)
            start = last.address
        more = round_up(start + size - end, pool.segment)
        self.ends[pool] = end + more
        self.reserved += more
        return MemoryBlock(pool, base, start, end + more - start)
