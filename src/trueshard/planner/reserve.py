"""Forecast ``torch.cuda.max_memory_reserved``: replay a job's steps through the model of the caching allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from trueshard.planner.allocator import Block, CachingAllocator
from trueshard.planner.trace import Allocation, Free, Kernel, Trace

MATMULS = frozenset(
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation", "_scaled_mm")
)
"""Operations that go to cuBLAS."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Memory of a job on one device, in bytes."""

    peak_reserved: int
    """As ``torch.cuda.max_memory_reserved``; nothing that is reserved goes back to the device."""
    peak_allocated: int
    """As ``torch.cuda.max_memory_allocated``: in blocks, which are rounded up."""


def replay(first: Trace, steady: Trace, *, repeats: int = 2, workspace_bytes: int = 0) -> Reserved:
    """Replay resident storages, a first step, and then ``repeats`` steady ones through the allocator.

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
    run = _Replay(workspace_bytes)
    for trace in [first] + [steady] * repeats:
        run.step(trace)
    return Reserved(run.allocator.reserved, run.allocator.peak_allocated)


class _Replay:
    """Runs steps one after another on one allocator."""

    def __init__(self, workspace_bytes: int) -> None:
        self.allocator = CachingAllocator()
        self.live: dict[int, tuple[Allocation, Block | None]] = {}
        """By number; no block for storages of 0 bytes."""
        self.workspace_bytes = workspace_bytes
        self.without_workspace = {False, True} if workspace_bytes else set()
        """Threads whose cuBLAS handle has no workspace yet; True: autograd's, which runs backward."""

    def step(self, trace: Trace) -> None:
        for resident in self._match(trace.resident):
            self._allocate(resident)
        for event in trace.events:
            kind = type(event)
            if kind is Allocation:
                self._allocate(event)  # type: ignore[arg-type]
            elif kind is Free:
                self._free(self.live.pop(event.storage)[1])  # type: ignore[union-attr]
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
                if found := by_key[key(resident)]:
                    self.live[resident.storage] = resident, left.pop(found.pop())[1]
                else:
                    unmatched.append(resident)
            residents = unmatched
        for _, block in left.values():
            self._free(block)
        return residents

    def _allocate(self, allocation: Allocation) -> None:
        block = self.allocator.allocate(allocation.bytes, allocation.stream) if allocation.bytes else None
        self.live[allocation.storage] = allocation, block

    def _free(self, block: Block | None) -> None:
        if block is not None:
            self.allocator.free(block)

    def _allocate_workspace(self, kernel: Kernel) -> None:
        backward = kernel.place.phase == "backward"
        if backward in self.without_workspace and kernel.op in MATMULS and kernel.stream != "host":
            self.without_workspace.remove(backward)
            self.allocator.allocate(self.workspace_bytes)


_KEYS: tuple[Callable[[Allocation], Hashable], ...] = (
    lambda each: (each.storage, each.bytes),
    lambda each: (each.kind, each.unit, each.what, each.bytes, each.stream),
    lambda each: each.bytes,
)
"""Ways to tell that a resident is a storage of the last step, the surest first."""
