"""What a step's record gets besides loss, norm and rate: tokens a second, MFU, memory.

- A figure that is not known is absent, never 0.
- Memory and data wait are the largest of all ranks: one all-reduce of three numbers a step.
- Seconds are those of the step alone: evaluations and checkpoints do not slow tokens/s, they have figures of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trueshard.train.events import Callback

if TYPE_CHECKING:
    from trueshard.train.trainer import Trainer


class Measures(Callback):
    """Adds to each step's record; to be given first, so that the other callbacks see what it adds. Collective.

    - ``tokens_per_second``: of all ranks; ``tokens_per_second_per_rank``;
    - ``mfu``: model floating-point operations a second over the peak of all devices, 0 to 1;
    - ``memory_allocated``, ``memory_reserved``: bytes, of the rank that has most; on a CUDA device the peaks of torch's
      allocator since the step before, on a CPU the process's resident bytes as ``memory_allocated`` alone;
    - ``memory_planned``: bytes, of what was planned to be reserved.

    Args:
        flops_per_token: the model's floating-point operations for each of them, forward and backward.
        peak_flops: operations a second of one device.
        memory_planned: bytes of a rank.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        memory_planned: int | None = None,
    ) -> None:
        self._flops, self._peak = flops_per_token, peak_flops
        self._planned = memory_planned

    def on_start(self, trainer: Trainer) -> None:
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        rate = record["step_tokens"] / max(record["seconds"], 1e-9)
        record["tokens_per_second"] = rate
        record["tokens_per_second_per_rank"] = rate / trainer.ranks
        if self._flops is not None and self._peak is not None:
            record["mfu"] = rate * self._flops / (self._peak * trainer.ranks)
        own = memory_of(trainer.device) | {"data_wait": record["data_wait"]}
        record |= _largest(own, trainer.device)
        if self._planned is not None:
            record["memory_planned"] = self._planned


def memory_of(device: torch.device) -> dict[str, int]:
    """Bytes of this process: of a CUDA device the peaks since this was last asked."""
    if device.type == "cuda":
        found = {
            "memory_allocated": torch.cuda.max_memory_allocated(device),
            "memory_reserved": torch.cuda.max_memory_reserved(device),
        }
        torch.cuda.reset_peak_memory_stats(device)
        return found
    import psutil

    return {"memory_allocated": psutil.Process().memory_info().rss}


def _largest(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Each value of the rank that has most; whole numbers stay whole (float64 holds bytes exactly)."""
    if not dist.is_initialized():
        return values
    shared = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    found = zip(values.items(), shared.tolist(), strict=True)
    return {key: type(value)(most) for (key, value), most in found}
