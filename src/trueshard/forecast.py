"""What a plan is expected to cost, as frozen data beside the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """Memory, traffic and speed of one step of one rank. Bytes, seconds and counts; nothing is rounded."""

    model: str
    hardware: str
    """Key of the catalogue, for example ``"h100"``."""
    ranks: int
    ranks_per_node: int
    sequence: int
    microbatch: int
    """Samples a rank in one forward."""
    accumulation: int
    """Microbatches a step."""
    optimizer: str
    fits: bool
    budget_bytes: int
    """What ``peak_reserved_bytes`` is held against: ``memory=``, or the device's memory less ``overhead_bytes``."""
    peak_live_bytes: int
    """The most memory that tensors take at one time."""
    peak_reserved_bytes: int
    """What ``torch.cuda.max_memory_reserved()`` would say."""
    overhead_bytes: int
    """Taken outside of torch's allocator: the device's context and the communicators' buffers."""
    peak_phase: str
    peak_unit: str
    peak_by_kind: Mapping[str, int]
    """Live bytes at the peak by kind; their sum is ``peak_live_bytes``."""
    bytes_received_per_step: int
    received_by_collective: Mapping[str, int]
    flops_per_step: int
    """Of this rank, recomputation included."""
    model_flops_per_step: int
    """Of this rank without recomputation: what MFU counts."""
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    """Time in which nothing is computed because communication is waited for."""
    tokens_per_second_per_rank: float
    mfu: float
    """Model operations a second over the device's peak in the compute dtype, between 0 and 1."""
