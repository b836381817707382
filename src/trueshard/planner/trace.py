"""One rank's step as data: allocations and frees, operations, communication and transfers, in host order.

The simulation writes a ``Trace``; the memory curve, the model of the caching allocator, the timeline and the page read
it. It holds numbers and names only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Phase = Literal["forward", "backward", "clip", "optimizer", "between"]
"""``between``: the rest of a step, such as making the batch and ``zero_grad``."""

Kind = Literal[
    "parameters", "gathered", "gradients", "optimizer", "activations", "communication", "temporary", "inputs"
]
"""Use of memory.

- ``parameters``: this rank's shards, replicated parameters, and the model's buffers.
- ``gathered``: a unit's whole parameters between all-gather and reshard.
- ``gradients``: of whole parameters before reduction, and of shards after.
- ``optimizer``: state that outlives the step.
- ``activations``: made in forward (or recomputed) and read by backward.
- ``communication``: input and output buffers of collectives.
- ``temporary``: anything else.
- ``inputs``: the batch.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)

Stream = Literal["compute", "all_gather", "reduce_scatter", "all_reduce", "transfer", "host"]
"""CUDA stream on which FSDP2 would run or allocate.

``transfer``: copies of offloaded shards to the device. ``host``: computation on host memory.
"""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@dataclass(slots=True)
class EventPlace:
    """Phase and unit of an event."""

    phase: Phase
    unit: str
    """Name in the plan of the unit whose forward or backward runs (``""``: the root)."""


@dataclass(slots=True)
class Allocation:
    """A storage is allocated."""

    place: EventPlace
    storage: int
    """Number of its own: a storage that is freed and allocated again gets a new one."""
    bytes: int
    stream: Stream = "compute"
    kind: Kind = "temporary"
    unit: str = ""
    """Unit to which the memory belongs: a parameter's or gradient's own, else the place's."""
    what: str = ""
    """Name of the parameter, or of the operator that made it."""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(slots=True)
class Free:
    """A storage is freed."""

    place: EventPlace
    storage: int
    bytes: int


@dataclass(slots=True)
class Kernel:
    """An operator that runs a kernel."""

    place: EventPlace
    op: str
    """torch's name, for example ``aten.mm``."""
    flops: int
    """FLOPs of matrix products, convolutions and attention, a multiply-add counted as two; 0 for other operators.
    Causal attention is counted in full, as in the field's MFU."""
    read: int
    """Bytes of distinct input tensors."""
    written: int
    """Bytes of outputs."""
    dtype: str
    """Dtype of the first floating-point argument, for example ``"bfloat16"``."""
    after: tuple[int, ...] = ()
    """Positions of communications and transfers whose results it reads."""
    stream: Stream = "compute"
    causal: bool = False
    """Causal attention, which skips half of ``flops``."""
    recomputed: bool = False
    """Repeats the forward inside backward (activation checkpointing)."""
    reads: tuple[int, ...] = ()
    """Storages of its tensor arguments, in order; empty in a finished trace."""
    writes: tuple[int, ...] = ()
    """Storages of its results and of arguments written in place; empty in a finished trace."""
    seconds: float | None = None
    """Duration that whoever rewrote the trace gave it; None: by what it computes and moves."""


@dataclass(slots=True)
class Communication:
    """A collective."""

    place: EventPlace
    op: Collective
    stream: Stream
    ranks: int
    """Size of the group."""
    stride: int
    """Distance between neighbours of the group in global ranks: that of an axis is the size of all axes after it."""
    received: int
    """Bytes received from other ranks, by the ring algorithms: (n-1)/n of the whole tensor, all-reduce twice."""
    bytes: int
    """Bytes of the whole tensor: an all-gather's output, the input of reduce-scatter and all-reduce."""
    dtype: str
    unit: str = ""
    """Unit of the parameters or gradients."""
    after: tuple[int, ...] = ()
    """Positions of communications whose results it reads."""
    axis: str = "shard"
    """Axis of the mesh: ``"replicate"``, ``"shard"``, ``"context"``, ``"tensor"``, ``"experts"``, ``"pipeline"``."""
    seconds: float | None = None
    """Duration, as that of a kernel."""
    sent: int = 0
    """Bytes that an all-to-all sends to other ranks; they may be more than ``received``."""


@dataclass(slots=True)
class HostCopy:
    """A copy between host and device, for offloaded parameters."""

    place: EventPlace
    direction: Literal["to_device", "to_host"]
    bytes: int
    unit: str = ""
    stream: Stream = "transfer"
    """Gradients are copied to the host on the stream that reduced them."""


Event: TypeAlias = Allocation | Free | Kernel | Communication | HostCopy


@dataclass
class Trace:
    """Events of one rank's step."""

    events: list[Event] = field(default_factory=list)
    resident: list[Allocation] = field(default_factory=list)
    """Allocations that are live when the step begins, oldest first."""
    host_bytes: int = 0
    """Peak of the memory that offloaded shards, gradients and optimizer state take on the host; not in ``events``."""
    snapshot_bytes: int = 0
    """Bytes of the rank's part of a snapshot in the host's memory, or of a checkpoint, of model and optimizers."""
    largest_imbalance: float = 1.0
    """Tokens over their mean over ranks, of a rank to whose experts all go that can."""

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)
