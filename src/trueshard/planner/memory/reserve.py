"""What ``torch.cuda.max_memory_reserved`` would say: a job's steps, replayed through a model of the allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from trueshard.planner.events import Allocation, Free, Kernel, Trace
from trueshard.planner.memory.caching import Block, CachingAllocator, CapacityError

MATMULS = frozenset(
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation", "_scaled_mm")
)
"""Operations that go to cuBLAS."""

_Held = tuple[Allocation, Block | None]
"""A storage that is live; no block behind 0 bytes."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The first request for which the device had no room."""

    step: int
    """0: the first step."""
    event: int
    """Position in that step's trace; -1: of what is resident when the step begins."""
    allocation: Allocation
    missing: int
    """Bytes by which the device would have to be larger to serve this request (later ones may need more)."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Memory of a job on one device, in bytes."""

    peak_reserved: int
    """As ``torch.cuda.max_memory_reserved``."""
    peak_allocated: int
    """As ``torch.cuda.max_memory_allocated``: in blocks, which are rounded up."""
    peak_live: int
    """As asked for; workspaces are not in it."""
    reserved: int
    """After the last step."""
    retries: int
    """How often cached memory had to go back to the device to make room; each stops the device for a moment."""
    out_of_memory: OutOfMemory | None
    capacity: int | None

    @property
    def shortfall(self) -> int:
        """Bytes by which the job does not fit; 0: it fits."""
        return 0 if self.capacity is None else max(0, self.peak_reserved - self.capacity)


def matmul_workspace(architecture: str) -> int:
    """Bytes of the workspace that torch gives each cuBLAS (or hipBLASLt) handle.

    Source: ``parseChosenWorkspaceSize`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``: 32 MiB on compute capability
    9, 10 and 12; before, and on 11, ``:4096:2:16:8``, that is 2 x 4 MiB + 8 x 16 KiB; 128 MiB on gfx94 and gfx95, 32
    MiB on other AMD devices.

    Args:
        architecture: for example ``"sm_80"``, ``"sm_90"``, ``"gfx942"``.

    Raises:
        ValueError: neither ``sm_`` and a number nor ``gfx`` and a name.
    """
    if architecture.startswith("gfx"):
        return (128 if architecture.startswith(("gfx94", "gfx95")) else 32) << 20
    digits = architecture.removeprefix("sm_").rstrip("af")
    if not architecture.startswith("sm_") or not digits.isdecimal():
        raise ValueError(f"architecture {architecture!r} is unknown; write it as 'sm_90' or 'gfx942'")
    return 32 << 20 if int(digits) // 10 in (9, 10, 12) else (2 * 4096 + 8 * 16) << 10


def replay(
    first: Trace,
    steady: Trace,
    *,
    capacity: int | None = None,
    expandable: bool = False,
    repeats: int = 2,
    workspace_bytes: int = 0,
) -> Reserved:
    """What the allocator reserves for what is resident, a first step, and then ``repeats`` steady ones.

    A storage goes from one step to the next by its number. Where a step frees a resident storage and leaves a new one
    in its place (gradients that wait for the next ``zero_grad``), the next step finds the new one under the resident's
    number: matched by what it is, or else by its size. What the next step does not know is freed before it; what it
    knows and nobody left is allocated before it.

    A freed block can be used again at once. That is right for FSDP2, although its streams run at different times: it
    does not mark tensors with ``record_stream`` but keeps them referenced until the host has made the stream that
    would reuse them wait, so the trace has the free where the allocator sees it.

    If the device has no room, memory is given all the same, so that the result says how much the whole job lacks.

    Args:
        capacity: what the device has for the allocator: its memory without the CUDA context and without what
            NCCL takes, which no figure of the allocator contains; None: without limit.
        expandable: as with ``expandable_segments:True``.
        workspace_bytes: see ``matmul_workspace``. Such a workspace is allocated at a thread's first matrix product and
            stays. Handles belong to threads (``thread_local`` in ``CublasHandlePool.cpp``), and autograd runs the
            backward of a device in a thread of its own, so there are two.

    Raises:
        ValueError: a trace frees what is not live, or allocates a storage twice.
    """
    run = _Replay(CachingAllocator(capacity, expandable), workspace_bytes)
    for trace in [first] + [steady] * repeats:
        run.step(trace)
    return run.result()


class _Replay:
    """Steps one after another, on one allocator."""

    def __init__(self, allocator: CachingAllocator, workspace_bytes: int) -> None:
        self.allocator = allocator
        self.held: dict[int, _Held] = {}
        self.bytes = 0
        self.peak = 0
        self.steps = 0
        self.out_of_memory: OutOfMemory | None = None
        self.workspace_bytes = workspace_bytes
        self.without_workspace = {False, True} if workspace_bytes else set()
        """Threads, by whether they run backward."""

    def result(self) -> Reserved:
        allocator = self.allocator
        return Reserved(
            peak_reserved=allocator.peak_reserved,
            peak_allocated=allocator.peak_allocated,
            peak_live=self.peak,
            reserved=allocator.reserved,
            retries=allocator.retries,
            out_of_memory=self.out_of_memory,
            capacity=allocator.capacity,
        )

    def step(self, trace: Trace) -> None:
        self._begin(trace)
        for index, event in enumerate(trace.events):
            sort = type(event)
            if sort is Allocation:
                self._allocate(event, index)  # type: ignore[arg-type]
            elif sort is Free:
                self._free(event.storage, index)  # type: ignore[union-attr]
            elif sort is Kernel and self.without_workspace:
                self._give_workspace(event, index)  # type: ignore[arg-type]
        self.steps += 1

    def _begin(self, trace: Trace) -> None:
        """Finds what the last step left under the numbers that this one knows."""
        left, self.held = self.held, {}
        absent = []
        for resident in trace.resident:
            if resident.storage in left and left[resident.storage][0].bytes == resident.bytes:
                self.held[resident.storage] = left.pop(resident.storage)
            else:
                absent.append(resident)
        for likeness in (_meaning, _size):
            absent = self._adopt(absent, left, likeness)
        for _, block in left.values():
            if block is not None:
                self.allocator.free(block)
        self.bytes = sum(allocation.bytes for allocation, _ in self.held.values())
        for resident in absent:
            self._allocate(resident, -1)

    def _adopt(
        self, absent: list[Allocation], left: dict[int, _Held], likeness: Callable[[Allocation], Hashable]
    ) -> list[Allocation]:
        """Gives what is left to what is absent and alike, in order; returns what is still absent."""
        alike: defaultdict[Hashable, list[int]] = defaultdict(list)
        for storage, (allocation, _) in reversed(left.items()):
            alike[likeness(allocation)].append(storage)
        still = []
        for resident in absent:
            if found := alike[likeness(resident)]:
                self.held[resident.storage] = left.pop(found.pop())
            else:
                still.append(resident)
        return still

    def _allocate(self, allocation: Allocation, index: int) -> None:
        if allocation.storage in self.held:
            raise ValueError(f"event {index} of the trace allocates storage {allocation.storage}, which is live")
        block = self._block(allocation, index) if allocation.bytes else None
        self.held[allocation.storage] = allocation, block
        self.bytes += allocation.bytes
        if self.bytes > self.peak:
            self.peak = self.bytes

    def _free(self, storage: int, index: int) -> None:
        held = self.held.pop(storage, None)
        if held is None:
            raise ValueError(f"event {index} of the trace frees storage {storage}, which is not live")
        allocation, block = held
        if block is not None:
            self.allocator.free(block)
            self.bytes -= allocation.bytes

    def _block(self, allocation: Allocation, index: int) -> Block:
        try:
            return self.allocator.allocate(allocation.bytes, allocation.stream)
        except CapacityError as error:
            if self.out_of_memory is None:
                self.out_of_memory = OutOfMemory(self.steps, index, allocation, error.missing)
            return self.allocator.allocate(allocation.bytes, allocation.stream, beyond=True)

    def _give_workspace(self, kernel: Kernel, index: int) -> None:
        backward = kernel.place.phase == "backward"
        if backward in self.without_workspace and kernel.op in MATMULS and kernel.stream != "host":
            self.without_workspace.remove(backward)
            self._block(Allocation(kernel.place, -1, self.workspace_bytes, what="cuBLAS workspace"), index)


def _meaning(allocation: Allocation) -> Hashable:
    return allocation.kind, allocation.unit, allocation.what, allocation.bytes, allocation.stream


def _size(allocation: Allocation) -> Hashable:
    return allocation.bytes
