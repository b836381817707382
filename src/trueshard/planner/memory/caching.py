"""A model of PyTorch's CUDA caching allocator: which memory it takes from the device for what a program asks of it.

It decides as ``c10/cuda/CUDACachingAllocator.cpp`` does with default settings, or with ``expandable_segments:True``.
Constants are from ``c10/core/AllocatorConfig.h`` of torch 2.13.

- A request is rounded up to 512 bytes. Up to 1 MiB it comes from the small pool, above from the large one. Each stream
  has pools of its own; memory never goes from one to another.
- The smallest free block that is large enough is taken, among equals the one at the lowest address. It is split if 512
  bytes are left over in the small pool, more than 1 MiB in the large one; otherwise the request gets all of it.
- Without such a block, a segment is taken from the device: 2 MiB for the small pool, 20 MiB for requests under 10 MiB,
  the request rounded up to 2 MiB above. A freed block merges with free neighbours of its segment and stays reserved.
- If the device has no room, segments that are wholly free go back to it, of all streams; then it is tried once more.
- Expandable: a pool of a stream is one range of addresses, backed by memory in pages of 2 MiB (small) or 20 MiB (large)
  from the lowest address on; blocks split whenever 512 bytes are left over; whole free pages can go back to the device.

Where the model differs: addresses of segments only ever rise (the driver's may not, which changes ties alone), and the
address range of an expandable pool has no end (really 9/8 of the device's memory, after which there is a second one).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from trueshard.planner.events import Stream

MINIMUM = 512
"""Requests are rounded up to a multiple of it (kMinBlockSize)."""
SMALL = 1 << 20
"""The largest request of the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 << 20
"""Segment, or page, of the small pool (kSmallBuffer)."""
LARGE_SEGMENT = 20 << 20
"""Segment for requests of the large pool under ``MIN_LARGE``; page of an expandable large pool (large_segment_size)."""
MIN_LARGE = 10 << 20
"""Requests from this size on get a segment of their own size (kMinLargeAlloc)."""
ROUND_LARGE = 2 << 20
"""... rounded up to a multiple of it (kRoundLarge)."""

_ADDRESS_BITS = 64
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_ADDRESS_SPACE = LARGE_SEGMENT << 18
"""Of an expandable pool: 5 TiB, more than any device has; a multiple of both page sizes."""


class CapacityError(MemoryError):
    """The device has no room for a request, also after everything that is cached went back to it."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} bytes are missing")
        self.missing = missing
        """Bytes by which the device would have to be larger for this request."""


class Block:
    """A piece of a segment: in use, free, or (in an expandable pool) addresses without memory."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        """Whether memory is behind it."""
        self.free = True
        self.prev: Block | None = None
        """The neighbour at lower addresses in the same segment."""
        self.next: Block | None = None

    def cut(self, size: int) -> Block:
        """Shortens it to its first ``size`` bytes; returns the rest, which is in no list yet."""
        rest = Block(self.pool, self.address + size, self.size - size, self.mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_neighbours(self) -> None:
        """Merges with the free neighbours of its sort, which leave their lists; it is in none itself."""
        before, after = self.prev, self.next
        if before is not None and before.free and before.mapped == self.mapped:
            before.leave()
            self.address = before.address
            self.size += before.size
            self.prev = before.prev
            if before.prev is not None:
                before.prev.next = self
        if after is not None and after.free and after.mapped == self.mapped:
            after.leave()
            self.size += after.size
            self.next = after.next
            if after.next is not None:
                after.next.prev = self

    def leave(self) -> None:
        """Out of the list of free blocks, or of addresses without memory."""
        pool = self.pool
        if self.mapped:
            del pool.free[bisect_left(pool.free, self.size << _ADDRESS_BITS | self.address)]
            del pool.blocks[self.address]
        else:
            pool.unmapped.remove(self)

    def enter(self) -> None:
        """Into the list of free blocks, or of addresses without memory."""
        self.free = True
        pool = self.pool
        if self.mapped:
            insort(pool.free, self.size << _ADDRESS_BITS | self.address)
            pool.blocks[self.address] = self
        else:
            insort(pool.unmapped, self, key=lambda block: block.address)


class Pool:
    """Free memory of one stream, for small or for large requests."""

    __slots__ = ("blocks", "free", "page", "remainder", "unmapped")

    def __init__(self, small: bool, expandable: bool) -> None:
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.remainder = MINIMUM if small or expandable else SMALL + MINIMUM
        """A block is split if at least this much is left over."""
        self.free: list[int] = []
        """Keys of free blocks, sorted: size, then address."""
        self.blocks: dict[int, Block] = {}
        """Free blocks by address."""
        self.unmapped: list[Block] = []
        """Addresses without memory, sorted; only in an expandable pool."""

    def at(self, index: int) -> Block:
        """The free block of a position in ``free``."""
        return self.blocks[self.free[index] & _ADDRESS_MASK]

    def best(self, size: int) -> int:
        """Where in ``free`` the smallest block of at least ``size`` is; the length of ``free``: nowhere."""
        return bisect_left(self.free, size << _ADDRESS_BITS)

    def best_expandable(self, size: int) -> int:
        """As ``best``, a block that can grow counting as large as it can become."""
        index = self.best(size)
        while index + 1 < len(self.free) and _grown(self.at(index + 1)) < _grown(self.at(index)):
            index += 1
        return index


class CachingAllocator:
    """The allocator of one device; all sizes in bytes.

    Args:
        capacity: memory of the device that it may take; None: without limit.
        expandable: as with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
    """

    def __init__(self, capacity: int | None = None, expandable: bool = False) -> None:
        self.capacity = capacity
        self.expandable = expandable
        self.allocated = 0
        """In blocks in use, as ``torch.cuda.memory_allocated``."""
        self.reserved = 0
        """Taken from the device, as ``torch.cuda.memory_reserved``."""
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0
        """How often the cache went back to the device to make room (``num_alloc_retries``)."""
        self._pools: dict[tuple[Stream, bool], Pool] = {}
        self._top = 0
        """The lowest address that was never used."""

    def allocate(self, bytes: int, stream: Stream = "compute", *, beyond: bool = False) -> Block:
        """A block of at least ``bytes`` (which must be positive), to be used on ``stream``.

        Args:
            beyond: what is missing is given although the device does not have it.

        Raises:
            CapacityError: the device has no room.
        """
        size = (bytes + MINIMUM - 1) // MINIMUM * MINIMUM
        pool = self._pools.get((stream, size <= SMALL)) or self._new_pool(stream, size <= SMALL)
        index = pool.best_expandable(size) if self.expandable else pool.best(size)
        if index < len(pool.free):
            block = pool.blocks.pop(pool.free.pop(index) & _ADDRESS_MASK)
        else:
            block = self._grow(pool, size, beyond)
        if block.size - size >= pool.remainder:
            block.cut(size).enter()
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Gives a block back to the cache; it must not be used afterwards."""
        self.allocated -= block.size
        block.absorb_neighbours()
        block.enter()

    def empty_cache(self) -> None:
        """Gives segments (or pages) that are wholly free back to the device, as ``torch.cuda.empty_cache``."""
        for pool in self._pools.values():
            for block in [pool.at(index) for index in range(pool.best(SMALL_SEGMENT), len(pool.free))]:
                if self.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    block.leave()
                    self.reserved -= block.size

    def cached(self) -> list[Block]:
        """The free blocks that are reserved, by pool, size and address."""
        return [pool.at(index) for pool in self._pools.values() for index in range(len(pool.free))]

    def _new_pool(self, stream: Stream, small: bool) -> Pool:
        pool = self._pools[stream, small] = Pool(small, self.expandable)
        if self.expandable:
            Block(pool, self._addresses(_ADDRESS_SPACE), _ADDRESS_SPACE, mapped=False).enter()
        return pool

    def _addresses(self, size: int) -> int:
        """The first of ``size`` addresses that were never used."""
        first = self._top
        self._top += size
        return first

    def _grow(self, pool: Pool, size: int, beyond: bool) -> Block:
        """A free block of at least ``size``, in no list, of memory that is new at least in part."""
        grow = self._expand if self.expandable else self._segment
        if beyond or self.capacity is None:
            return grow(pool, size, None)
        try:
            return grow(pool, size, self.capacity)
        except CapacityError:
            self.empty_cache()
            self.retries += 1
            return grow(pool, size, self.capacity)

    def _reserve(self, size: int, capacity: int | None) -> None:
        if capacity is not None and self.reserved + size > capacity:
            raise CapacityError(self.reserved + size - capacity)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _segment(self, pool: Pool, size: int, capacity: int | None) -> Block:
        total = pool.page if size < MIN_LARGE else _up(size, ROUND_LARGE)
        self._reserve(total, capacity)
        return Block(pool, self._addresses(total), total)

    def _expand(self, pool: Pool, size: int, capacity: int | None) -> Block:
        """Puts memory behind the lowest addresses that have room; what is there stays if a later part fails."""
        block = next(start for start in map(_start, pool.unmapped) if _room(start, size) >= size)
        if not block.mapped:
            self._map(block, min(size, block.size), capacity)
        while block.size < size:
            following = block.next
            assert following is not None
            self._map(following, min(size - block.size, following.size), capacity)
            block = following
        block.leave()
        return block

    def _map(self, block: Block, size: int, capacity: int | None) -> None:
        """Puts memory behind the first ``size`` addresses of a block, in whole pages; it is free afterwards."""
        size = _up(size, block.pool.page)
        self._reserve(size, capacity)
        block.leave()
        if size < block.size:
            block.cut(size).enter()
        block.mapped = True
        block.absorb_neighbours()
        block.enter()

    def _unmap(self, block: Block) -> None:
        """Gives the whole pages in a free block back to the device."""
        first = _up(block.address, block.pool.page)
        size = (block.address + block.size) // block.pool.page * block.pool.page - first
        if size <= 0:
            return
        block.leave()
        pages = block
        if first > block.address:
            pages = block.cut(first - block.address)
            block.enter()
        if pages.size > size:
            pages.cut(size).enter()
        pages.mapped = False
        pages.absorb_neighbours()
        pages.enter()
        self.reserved -= size


def _up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def _grown(block: Block) -> int:
    """How large a free block can become: with the addresses behind it that have no memory yet."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def _start(unmapped: Block) -> Block:
    """Where a block that uses these addresses begins: at the free block before them, if there is one."""
    before = unmapped.prev
    return before if before is not None and before.free else unmapped


def _room(block: Block, enough: int) -> int:
    """Addresses from ``block`` on up to the next block in use, counted until there are ``enough``."""
    total = 0
    following: Block | None = block
    while following is not None and following.free and total < enough:
        total += following.size
        following = following.next
    return total
