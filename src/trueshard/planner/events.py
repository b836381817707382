"""What one rank does in one step, as data: memory taken and given back, operations, communication, in host order.

A ``Trace`` is what the simulation writes and what everything else of the planner reads: the memory curve, the model of
the caching allocator, the time line, the page. It holds numbers and names only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Phase = Literal["forward", "backward", "clip", "optimizer", "between"]
"""``between``: anything else of a step, such as making the batch and ``zero_grad``."""

Kind = Literal[
    "parameters", "gathered", "gradients", "optimizer", "activations", "communication", "temporary", "inputs"
]
"""What memory is for.

- ``parameters``: this rank's shards, replicated parameters, and the model's buffers.
- ``gathered``: whole parameters of a unit between gathering and freeing.
- ``gradients``: of whole parameters before they are reduced, and of shards after.
- ``optimizer``: state that outlives the step.
- ``activations``: made in forward (or recomputed) and read by backward.
- ``communication``: what collectives read from and write to.
- ``temporary``: anything else.
- ``inputs``: the batch.
"""

KINDS: tuple[Kind, ...] = (
    "parameters",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "temporary",
    "inputs",
)

Stream = Literal["compute", "all_gather", "reduce_scatter", "all_reduce", "transfer", "host"]
"""The CUDA stream on which FSDP2 would run or allocate; on a CPU everything is one.

``transfer``: copies of shards that rest in host memory to the device. ``host``: what computes on host memory.
"""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@dataclass(slots=True)
class Place:
    """Where in the step something happened."""

    phase: Phase
    unit: str
    """Name of the unit whose forward or backward runs (``""``: the root), as in the plan."""
    block: int = -1
    """Position among repeated blocks, as ``repeats`` numbers them; -1 outside of them."""


@dataclass(slots=True)
class Allocation:
    """A storage takes memory."""

    place: Place
    storage: int
    """A number of its own: memory that a storage gives back and takes again has a new one."""
    bytes: int
    stream: Stream = "compute"
    kind: Kind = "temporary"
    unit: str = ""
    """To which unit the memory belongs: of a parameter or gradient its own, otherwise the place's."""
    what: str = ""
    """The parameter's name, or the operation that made it."""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(slots=True)
class Free:
    """A storage gives its memory back."""

    place: Place
    storage: int
    bytes: int


@dataclass(slots=True)
class Kernel:
    """An operation."""

    place: Place
    op: str
    """As torch calls it, for example ``aten.mm``."""
    flops: int
    """Floating-point operations of matrix products, convolutions and attention; a multiplication and an addition are
    two. Causal attention is counted in full, as the field's MFU does. 0 for anything else."""
    read: int
    """Bytes of distinct input tensors."""
    written: int
    """Bytes of outputs (and inputs written in place)."""
    dtype: str
    """Of the first floating-point tensor among its arguments, for example ``"bfloat16"``."""
    after: tuple[int, ...] = ()
    """Positions in the trace of communications and transfers whose results it reads: it waits for them."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its tensor arguments."""
    stream: Stream = "compute"
    causal: bool = False
    """Attention that skips half of ``flops``."""
    recomputed: bool = False
    """Whether it repeats the forward inside backward (activation checkpointing)."""
    reads: tuple[int, ...] = ()
    """Storages of its tensor arguments, in their order, while a trace is worked on; a finished one has none."""
    writes: tuple[int, ...] = ()
    """Storages of its results and of what it changes in place, likewise."""


@dataclass(slots=True)
class Communication:
    """A collective."""

    place: Place
    op: Collective
    stream: Stream
    ranks: int
    """Size of the group."""
    stride: int
    """Distance of neighbours in the group, in global ranks: 1 for ranks in a row, the shard size for replicas."""
    received: int
    """Bytes that reach this rank from others, by the ring algorithms: (n-1)/n of the whole tensor, all-reduce twice."""
    bytes: int
    """The whole tensor: what an all-gather makes, what reduce-scatter and all-reduce take."""
    dtype: str
    unit: str = ""
    """Whose parameters or gradients these are."""
    after: tuple[int, ...] = ()
    """Positions of communications whose results it reads."""


@dataclass(slots=True)
class Transfer:
    """A copy between host and device, for parameters that rest in host memory."""

    place: Place
    direction: Literal["to_device", "to_host"]
    bytes: int
    unit: str = ""
    stream: Stream = "transfer"
    """Gradients go to the host on the stream that reduced them."""


Event: TypeAlias = Allocation | Free | Kernel | Communication | Transfer


@dataclass
class Trace:
    """One rank's step."""

    events: list[Event] = field(default_factory=list)
    resident: list[Allocation] = field(default_factory=list)
    """What was allocated when the step began, in the order in which it was made."""

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)
