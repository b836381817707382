"""Numbers summed over ranks, with at most one wait for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from trueshard.distributed import all_reduce_on_hosts


def over_ranks(
    values: Iterable[float | torch.Tensor],
    device: torch.device,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    alike: Iterable[float | torch.Tensor] = (),
) -> list[float]:
    """Return each value reduced over ranks, in float64, which holds bytes exactly; then those that are ``alike``.

    Collective. Waits for the device once, or not at all if no value lies there.
    """
    values, alike = list(values), list(alike)
    on_device = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in [*values, *alike])

    def joined(some: list[float | torch.Tensor]) -> torch.Tensor:
        # A number goes to the device as an argument of a kernel: a copy of it would wait.
        numbers = [v if isinstance(v, torch.Tensor) and v.device.type != "cpu" else float(v) for v in some]
        where: dict[str, Any] = {"dtype": torch.float64, "device": device if on_device else "cpu"}
        tensors = [v.detach().double() if isinstance(v, torch.Tensor) else torch.full((), v, **where) for v in numbers]
        return torch.stack(tensors) if tensors else torch.zeros(0, **where)

    shared = joined(values)
    if dist.is_initialized():
        if on_device:
            dist.all_reduce(shared, op)
        else:
            world: Any = dist.group.WORLD
            all_reduce_on_hosts(shared, world, device, op)
    reduced: list[float] = torch.cat([shared, joined(alike)]).tolist()
    return reduced
