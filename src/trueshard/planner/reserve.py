"""Forecast ``torch.cuda.max_memory_reserved``: replay a job's steps through a model of PyTorch's caching allocator.

It decides as ``c10/cuda/CUDACachingAllocator.cpp`` does with default settings on a device that has enough memory.
Constants are from ``c10/core/AllocatorConfig.h`` of torch 2.13.

- A request is rounded up to 512 bytes. Up to 1 MiB it comes from the small pool, above from the large one. Each stream
  has its own pools; memory never moves from one to another.
- Best fit: the smallest free block that is large enough is taken, the one at the lowest address among equals. It is
  split if 512 bytes remain in the small pool, more than 1 MiB in the large one.
- If no block fits, a segment is reserved: 2 MiB for the small pool, 20 MiB for requests under 10 MiB, the request
  rounded up to 2 MiB above. A freed block is coalesced with free neighbours of its segment and stays reserved.

The model differs in one point: addresses of segments only ever rise. The driver's may not, which changes ties alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from trueshard.planner.trace import Allocation, Free, Kernel, Stream, Trace

MATMULS = frozenset(
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation", "_scaled_mm")
)
"""Operations that go to cuBLAS."""


def replay(
    first: Trace,
    steady: Trace,
    *,
    repeats: int = 2,
    workspace_bytes: int = 0,
    allocator: CachingAllocator | None = None,
) -> CachingAllocator:
    """Replay resident storages, a first step, and then ``repeats`` steady ones through an allocator, and return it.

    A storage is matched from one step to the next by its number. If a step frees a resident storage and leaves a new
    one in its place (gradients that wait for the next ``zero_grad``), the next step finds that under the resident's
    number: matched by name and kind, else by size. Live storages that the next step does not know are freed before it;
    resident ones that nothing matches are allocated before it.

    A freed block can be reused at once. That is right for FSDP2, although its streams run at different times: it does
    not mark tensors with ``record_stream`` but keeps them referenced until the host has made the stream that would
    reuse them wait, so the trace has the free where the allocator sees it.

    ``workspace_bytes``: workspace that torch gives each cuBLAS handle at its first matrix product and keeps. Handles
    belong to threads (``thread_local`` in ``CublasHandlePool.cpp``), and autograd runs the backward of a device in a
    thread of its own, so there are two.
    """
    run = _Replay(workspace_bytes, allocator or CachingAllocator())
    run.step(first)
    for _ in range(repeats):
        before = run.state()
        run.step(steady)
        if run.state() == before:  # so every further step does the same
            break
    return run.allocator


class _Replay:
    def __init__(self, workspace_bytes: int, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.live: dict[int, tuple[Allocation, MemoryBlock | None]] = {}
        """Storages by number; no block for those of 0 bytes."""
        self.workspace_bytes = workspace_bytes
        self.without_workspace = {False, True} if workspace_bytes else set()
        """Threads whose cuBLAS handle has no workspace yet; True: autograd's, which runs backward."""

    def state(self) -> Any:
        """Return all that tells what a further step does: live storages with their blocks, and free blocks."""
        places = [(storage, block and block.address) for storage, (_, block) in self.live.items()]
        free = {key: [(size, address) for size, address, _ in pool.free] for key, pool in self.allocator.pools.items()}
        return places, free, set(self.without_workspace)

    def step(self, trace: Trace) -> None:
        for resident in self._match(trace.resident):
            self._allocate(resident)
        live, allocator = self.live, self.allocator
        for event in trace.events:
            kind = type(event)
            if kind is Allocation:
                self._allocate(event)  # type: ignore[arg-type]
            elif kind is Free:
                if (block := live.pop(event.storage)[1]) is not None:  # type: ignore[union-attr]
                    allocator.free(block)
            elif kind is Kernel and self.without_workspace:
                self._allocate_workspace(event)  # type: ignore[arg-type]

    def _match(self, residents: list[Allocation]) -> list[Allocation]:
        """Match the last step's live storages with residents, free the others, and return residents without a match."""
        left, self.live = self.live, {}
        for key in _KEYS:
            by_key: defaultdict[Hashable, list[int]] = defaultdict(list)
            for storage, (allocation, _) in reversed(left.items()):
                by_key[key(allocation)].append(storage)
            unmatched = []
            for resident in residents:
                if storages := by_key[key(resident)]:
                    self.live[resident.storage] = resident, left.pop(storages.pop())[1]
                else:
                    unmatched.append(resident)
            residents = unmatched
        for _, block in left.values():
            if block is not None:
                self.allocator.free(block)
        return residents

    def _allocate(self, allocation: Allocation) -> None:
        block = self.allocator.allocate(allocation.bytes, allocation.stream) if allocation.bytes else None
        self.live[allocation.storage] = allocation, block

    def _allocate_workspace(self, kernel: Kernel) -> None:
        backward = kernel.place.phase == "backward"
        if backward in self.without_workspace and kernel.op in MATMULS and kernel.stream != "host":
            self.without_workspace.remove(backward)
            self.allocator.allocate(self.workspace_bytes)


_KEYS: tuple[Callable[[Allocation], Hashable], ...] = (
    lambda held: (held.storage, held.bytes),
    lambda held: (held.kind, held.unit, held.what, held.bytes, held.stream),
    lambda held: held.bytes,
)
"""Ways to tell that a resident is a storage of the last step, the surest first."""


# The allocator

MINIMUM = 512
"""Requests are rounded up to a multiple of it (kMinBlockSize)."""
SMALL = 1 << 20
"""Largest request of the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 << 20
"""Segment of the small pool (kSmallBuffer)."""
LARGE_SEGMENT = 20 << 20
"""Segment for requests of the large pool under ``MIN_LARGE`` (large_segment_size)."""
MIN_LARGE = 10 << 20
"""Requests from this size on get a segment of their own (kMinLargeAlloc)."""
ROUND_LARGE = 2 << 20
"""Multiple to which such a segment is rounded up (kRoundLarge)."""


@dataclass(slots=True, eq=False)  # not frozen, by which making one would take three times as long
class MemoryBlock:
    """A part of a segment, in use or free; it is not changed."""

    pool: Pool
    segment: int
    """Address of the segment."""
    address: int
    size: int


class Pool:
    """Free blocks of one stream, for small or for large requests."""

    def __init__(self, small: bool) -> None:
        self.segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.remainder = MINIMUM if small else SMALL + MINIMUM
        """Smallest remainder that is split off."""
        self.free: list[tuple[int, int, MemoryBlock]] = []
        """(size, address, block), sorted; addresses are unique."""
        self.begins: dict[int, MemoryBlock] = {}
        """Address at which a free block begins → the block."""
        self.ends: dict[int, MemoryBlock] = {}
        """Address behind a free block → the block. Another segment may begin there."""

    def add(self, block: MemoryBlock) -> None:
        """Add a free block, coalesced with adjacent free ones."""
        address, size = block.address, block.size
        before, behind = self.ends.get(address), self.begins.get(address + size)
        for near in (before, behind):
            if near is not None and near.segment == block.segment:
                self.remove(near)
                address, size = min(near.address, address), near.size + size
        if size != block.size:
            block = MemoryBlock(self, block.segment, address, size)
        self.begins[address] = self.ends[address + size] = block
        insort(self.free, (size, address, block))

    def remove(self, block: MemoryBlock) -> None:
        self._pop(bisect_left(self.free, (block.size, block.address)))

    def take(self, size: int) -> MemoryBlock | None:
        """Remove and return the best fit for ``size`` bytes; None if no free block is large enough."""
        index = bisect_left(self.free, (size,))
        return self._pop(index) if index < len(self.free) else None

    def _pop(self, index: int) -> MemoryBlock:
        size, address, block = self.free.pop(index)
        del self.begins[address], self.ends[address + size]
        return block


class CachingAllocator:
    """The allocator of one device; all sizes in bytes."""

    def __init__(self) -> None:
        self.allocated = 0
        """Bytes of blocks in use, as ``torch.cuda.memory_allocated``."""
        self.reserved = 0
        """Bytes of segments, as ``torch.cuda.max_memory_reserved``: none go back to the device."""
        self.peak_allocated = 0
        """Bytes of blocks, which are rounded up, as ``torch.cuda.max_memory_allocated``."""
        self.pools: dict[tuple[Stream, bool], Pool] = {}

    def allocate(self, bytes: int, stream: Stream = "compute") -> MemoryBlock:
        """Return a block of at least ``bytes`` (which must be positive), to be used on ``stream``."""
        size = round_up(bytes, MINIMUM)
        pool = self.pool(stream, size <= SMALL)
        block = pool.take(size) or self.reserve(pool, size)
        if (left := block.size - size) >= pool.remainder:
            pool.add(MemoryBlock(pool, block.segment, block.address + size, left))
            block = MemoryBlock(pool, block.segment, block.address, size)
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return a block to its pool; it must not be used afterwards."""
        self.allocated -= block.size
        block.pool.add(block)

    def pool(self, stream: Stream, small: bool) -> Pool:
        """Return the pool of a stream for small or large requests."""
        if (stream, small) not in self.pools:
            self.pools[stream, small] = Pool(small)
        return self.pools[stream, small]

    def reserve(self, pool: Pool, size: int) -> MemoryBlock:
        """Return a new segment, at least ``size`` bytes."""
        total = pool.segment if size < MIN_LARGE else round_up(size, ROUND_LARGE)
        block = MemoryBlock(pool, self.reserved, self.reserved, total)
        self.reserved += total
        return block


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not smaller."""
    return (size + multiple - 1) // multiple * multiple
