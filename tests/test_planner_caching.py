"""The model of the caching allocator: each rule by hand, then against plain list-scanning ones; what always holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_traces import ExpandableAllocator
from plain_allocators import Plain
from trueshard.planner.reserve import CachingAllocator, MemoryBlock
from trueshard.planner.trace import Stream

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # 10 MiB and more: a segment of its own, in whole 2 MiB
        (10 * MIB, 10 * MIB, 10 * MIB),
        # what is left over, at most 1 MiB, stays with the block
        (11 * MIB, 12 * MIB, 12 * MIB),
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
    ],
)
def test_a_first_request(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_an_expandable_segment_grows_behind_its_last_block() -> None:
    """20 MiB pages; a free last block is extended, any remainder is split off, streams have segments of their own."""
    allocator = ExpandableAllocator()
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved == 40 * MIB
    second = allocator.allocate(11 * MIB)  # 10 MiB are free behind the first: one page more
    assert (second.address - first.address, allocator.reserved) == (30 * MIB, 60 * MIB)
    allocator.free(first)
    third = allocator.allocate(29 * MIB + 512 * KIB)
    assert (third.size, allocator.reserved) == (29 * MIB + 512 * KIB, 60 * MIB)
    assert [block.size for block in cached(allocator)] == [512 * KIB, 19 * MIB]
    allocator.allocate(1)
    allocator.allocate(MIB + 512, "all_gather")
    assert allocator.reserved == 60 * MIB + 2 * MIB + 20 * MIB
    allocator.free(second)
    allocator.free(third)
    assert allocator.allocate(60 * MIB).address == first.address
    assert allocator.reserved == 82 * MIB


def cached(allocator: CachingAllocator) -> list[MemoryBlock]:
    """Return the free blocks, by pool, size and address."""
    return [block for pool in allocator.pools.values() for _, _, block in pool.free]


def test_requests_of_some_mib_share_a_segment() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(8 * MIB), allocator.allocate(8 * MIB)
    assert (first.address, second.address) == (0, 8 * MIB)
    # 4 MiB are left: 3 MiB fit, and the 1 MiB behind them is too little to be split off
    third = allocator.allocate(3 * MIB)
    assert (third.size, allocator.reserved) == (4 * MIB, 20 * MIB)
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 40 * MIB


@pytest.mark.parametrize(("over", "size"), [(MIB, 21 * MIB), (MIB + 512, 20 * MIB)])
def test_a_large_block_is_split_if_more_than_a_mib_is_left_over(over: int, size: int) -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(100 * MIB)
    allocator.free(whole)
    cached = allocator.allocate(20 * MIB + over)
    rest = allocator.allocate(79 * MIB - over)
    assert allocator.reserved == 100 * MIB
    assert rest.address == cached.address + cached.size
    allocator.free(cached)
    assert allocator.allocate(20 * MIB).size == size


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_among_equals() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 20, 30)]
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(22 * MIB).address == addresses[1]
    assert allocator.allocate(30 * MIB).address == addresses[3]
    assert allocator.allocate(30 * MIB).address == addresses[0]
    assert allocator.reserved == 120 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_merge(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    for index in order:
        allocator.free(blocks[index])
    assert [(block.address, block.size) for block in cached(allocator)] == [(0, 20 * MIB)]


def test_alternating_sizes_fragment() -> None:
    """Every second of ten blocks is freed: 150 MiB are free, and 32 MiB fit nowhere."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(30 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(32 * MIB)
    assert (allocator.reserved, allocator.allocated) == (332 * MIB, 182 * MIB)


SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(1, 60 * MIB),
    st.sampled_from([MIB - 512, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 20 * MIB, 30 * MIB]),
)
STREAMS: st.SearchStrategy[Stream] = st.sampled_from(["compute", "compute", "all_gather"])
REQUESTS = st.lists(st.one_of(st.tuples(SIZES, STREAMS), st.integers(0, 1000)), max_size=80)
"""A size and stream to allocate, or which of the live blocks to free."""


@pytest.mark.rest
@settings(max_examples=200, deadline=None)
@given(REQUESTS)
def test_it_decides_as_a_plain_one(requests: list[tuple[int, Stream] | int]) -> None:
    allocator, plain = CachingAllocator(), Plain()
    live: list[tuple[MemoryBlock, list[int | str]]] = []
    for request in requests:
        if isinstance(request, tuple):
            block, expected = allocator.allocate(*request), plain.allocate(*request)
            live.append((block, expected))
            assert [block.address, block.size] == expected[:2]
            assert request[0] <= block.size < request[0] + MIB + 512
        elif live:
            block, expected = live.pop(request % len(live))
            allocator.free(block)
            plain.free(expected)
        assert allocator.reserved == plain.reserved
        free = sorted([b.address, b.size] for b in cached(allocator))
        assert free == sorted([b[0], b[1]] for b in plain.blocks if b[4])
        both = sorted([*(block for block, _ in live), *cached(allocator)], key=lambda block: block.address)
        assert all(low.address + low.size <= high.address for low, high in pairwise(both))
        assert sum(block.size for block, _ in live) == allocator.allocated <= allocator.peak_allocated
        assert sum(block.size for block in both) == allocator.reserved >= allocator.peak_allocated
    for block, _ in live:
        allocator.free(block)
    free_blocks = cached(allocator)
    assert len({block.segment for block in free_blocks}) == len(free_blocks), "a free segment is one block"
