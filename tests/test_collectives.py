"""Parts that are joined, and sums that are cut: their values, and how often they are copied."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from parity import Ranks
from trueshard.model.regions import rows_of
from trueshard.parallel.collectives import gather, scatter_sum

COPIES = "aten.clone", "aten.copy_", "aten.cat"


class _Copies(TorchDispatchMode):
    """Counts operators that copy elements."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := str(func.overloadpacket)) in COPIES:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def _joined_and_cut(rank: int, world_size: int, shape: tuple[int, ...], dim: int) -> dict[str, int]:
    """Gather, scatter, and their gradients, against the whole; return how often each copied."""
    group = dist.group.WORLD
    wholes = torch.arange(world_size * torch.Size(shape).numel(), dtype=torch.float64).view(world_size, *shape)
    mine = rows_of(shape[dim], rank, world_size)
    own = wholes[0].narrow(dim, *mine).contiguous().requires_grad_()
    with _Copies() as joining:
        joined = gather(own, dim, shape[dim], group, sums=True)
    assert joined.is_contiguous()
    assert torch.equal(joined, wholes[0])
    joined.backward(wholes[rank])
    assert own.grad is not None
    assert torch.equal(own.grad, wholes.sum(0).narrow(dim, *mine))
    x = wholes[rank].clone().requires_grad_()
    with _Copies() as of_gloo:  # which copies what it is given
        dist.reduce_scatter_tensor(torch.empty(1), torch.empty(world_size), group=group)
    with _Copies() as cutting:
        part = scatter_sum(x, dim, group)
    assert part.is_contiguous()
    assert torch.equal(part, wholes.sum(0).narrow(dim, *mine))
    part.backward(wholes[0].narrow(dim, *mine))
    assert x.grad is not None
    assert torch.equal(x.grad, wholes[0])
    return {"gather": joining.count.total(), "scatter": cutting.count.total() - of_gloo.count.total()}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_of_one_size_are_copied_once_or_never(dim: int, ranks2: Ranks, ranks3: Ranks) -> None:
    """Along the first dimension, and of one sample along the second, they lie joined as they arrive."""
    for ranks in (ranks2, ranks3):
        copies = min(1, abs(dim))
        assert ranks.run(_joined_and_cut, (6, 12, 18), dim) == [{"gather": copies, "scatter": copies}] * ranks.count
    assert ranks2.run(_joined_and_cut, (1, 6, 4), 1) == [{"gather": 0, "scatter": 0}] * 2


@pytest.mark.parametrize("size", [1, 4, 5])
def test_parts_of_several_sizes_are_joined_and_cut(size: int, ranks2: Ranks, ranks3: Ranks) -> None:
    """A rank may have none."""
    for ranks in (ranks2, ranks3):
        for shape, dim in (((size, 2), 0), ((2, size, 3), 1), ((2, size), -1)):
            counts = ranks.run(_joined_and_cut, shape, dim)
            assert max(count["gather"] for count in counts) <= 2  # its own part is made longer, and all are joined
