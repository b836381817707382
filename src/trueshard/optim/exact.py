"""Sums that do not depend on their order: terms rounded to a common grid, then added in float64.

- Addition of floating-point numbers is exact, and so associative, where every partial sum is a multiple of one quantum
  and at most 2**53 of them. So a term is rounded to a multiple of the quantum first, whoever holds it, and may then be
  added anywhere, in any order: on a rank, over microbatches, by a collective.
- Nothing wraps. Beyond 2**53 quanta a sum is an ordinary sum of float64, which depends on the order; so it is checked.
- NaN and infinity stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from trueshard.model import registry
from trueshard.optim.shards import ShardGroup, all_reduce_over

DIGITS = 53
"""Bits of float64 in which sums are exact."""
LOSS_QUANTUM = 2.0**-24
"""Grid of a microbatch's summed loss: sums are exact up to 2**29."""
_CHUNKS = {"cpu": 1 << 16}
"""Elements that are squared at once, so that float64 copies stay in the cache."""
_CHUNK = 1 << 22
"""Elements elsewhere: the kernels take a GPU longer than launching them takes the host. The sums are exact, so they
have the same bits."""
_EXPONENT = 0x7FF << 52
"""Bits of a float64 that hold its exponent; alone, those of the largest power of two that is at most a number."""


def are_exact(parameters: Sequence[torch.Tensor]) -> bool:
    """True if the gradient of one of ``parameters`` is an exact sum, and is to be measured exactly."""
    return any(id(parameter) in model.exact_names for model in registry.models() for parameter in parameters)


def to_grid(values: torch.Tensor, quantum: float) -> torch.Tensor:
    """Return ``values`` rounded to multiples of ``quantum``, a power of two, in their own dtype.

    No value gains digits by this, so a dtype that holds the value holds the rounded one.
    """
    if values.dtype in (torch.float16, torch.bfloat16):
        return to_grid(values.float(), quantum).to(values.dtype)
    return values.mul(1 / quantum).round_().mul_(quantum)


def loss_on_grid(loss: torch.Tensor) -> torch.Tensor:
    """Return a summed loss, 0-dim, in float64, rounded so that losses may be added in any order."""
    return to_grid(loss.detach().double(), LOSS_QUANTUM)


def below(value: float) -> float:
    """Return the largest power of two that is at most ``value``, which is positive."""
    return 2.0 ** (math.frexp(value)[1] - 1)


def largest_of(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value, 0-dim, NaN if there is one."""
    if not values.numel():
        return values.new_zeros(())
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values, math.inf)  # one kernel; on a CPU many times slower than what follows
    least, most = torch.aminmax(values)
    return torch.maximum(-least, most)


# Norms


@torch.no_grad()
def norm(groups: Sequence[ShardGroup], order: float, count: int) -> torch.Tensor:
    """Return the norm of order ``order`` > 0 of all ``groups`` together, the same bits however they are cut: float64.

    Each element's power is taken in float64, and added in two parts, on two grids that follow from the largest element
    and from ``count``, the elements of all whole tensors: no part is coarser than 2**(2 * log2(count) - 104) of the
    largest power. Collective over the meshes of the groups, twice.
    """
    device = groups[0].device
    peaks = torch.zeros(2, dtype=torch.float64, device=device)  # largest; 1.0 if there is NaN, which a maximum may lose
    for group in groups:
        local = torch.zeros_like(peaks)
        if group.pieces:
            of_pieces = torch.stack([largest_of(piece).to(local) for piece in group.pieces])
            local = torch.stack([of_pieces.nan_to_num(0.0, math.inf).amax(), of_pieces.isnan().any().to(local)])
        if group.ranks is not None:
            local = all_reduce_over(group.ranks, local, dist.ReduceOp.MAX)
        peaks = torch.maximum(peaks, local)
    largest, missing = peaks.unbind()
    # A power of two, so that dividing by it rounds nothing. On the device, since reading a value would wait for it.
    scale = largest.clone().view(torch.int64).bitwise_and_(_EXPONENT).view(torch.float64)
    scale = torch.where(scale > 0, scale, 1.0)
    total = scale * _sum_of_powers(groups, order, scale, count) ** (1.0 / order)
    total = torch.where((largest == 0) | torch.isinf(largest), largest, total)
    return torch.where(missing > 0, math.nan, total)


def _sum_of_powers(groups: Sequence[ShardGroup], order: float, scale: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum of abs(element / ``scale``) ** ``order``, 0-dim; no element is twice ``scale`` or more."""
    bits = math.ceil(math.log2(max(count, 2)))
    coarse = 2.0 ** (math.ceil(order) + bits - DIGITS + 1)
    grids = coarse, coarse * 2.0 ** (bits - DIGITS + 2)
    total = torch.zeros(2, dtype=torch.float64, device=groups[0].device)
    for group in groups:
        sums = torch.zeros_like(total)
        for piece in group.pieces:
            for part in piece.detach().reshape(-1).split(_CHUNKS.get(piece.device.type, _CHUNK)):
                sums += _sums(part.double().div_(scale.to(part.device)), order, grids).to(sums)
        total += sums if group.ranks is None else all_reduce_over(group.ranks, sums, dist.ReduceOp.SUM)
    return total.sum()


def _sums(values: torch.Tensor, order: float, grids: tuple[float, float]) -> torch.Tensor:
    """Return the sums of abs(``values``) ** ``order`` on each of two grids, the second of what the first leaves: [2].

    ``values`` are written to.
    """
    powers = values.square_() if order == 2 else values.abs_().pow_(order)

    def on_grid(quantum: float) -> torch.Tensor:
        shift = 1.5 * 2.0**52 * quantum  # adding it leaves no digit below the quantum
        return (powers + shift).sub_(shift)

    rounded = on_grid(grids[0])
    powers -= rounded
    return torch.stack([rounded.sum(), on_grid(grids[1]).sum()])
