"""Which indices of a whole tensor a rank holds: against torch's own cutting, on 2 × 2 and on 3 ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parity import Pool, Ranks
from trueshard import _torch
from trueshard.model.regions import common, extent, has_whole_rows, inside, put, region_of, take

KINDS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "packed rows": _torch.packed(0, 2),
    "packed columns": _torch.packed(1, 2),
    "common": Replicate(),
}


@pytest.mark.parametrize(("count", "tensor_ranks"), [(4, 2), (4, 4), (4, 1), (3, 3)])
def test_regions_are_where_torch_puts_the_parts(count: int, tensor_ranks: int, pool: Pool) -> None:
    Ranks(count, pool).run(cut, tensor_ranks)


def cut(rank: int, world_size: int, tensor_ranks: int) -> None:
    """Of each kind and shape: this rank's part, the parts that all regions say, and the whole put together again."""
    mesh = init_device_mesh("cpu", (world_size // tensor_ranks, tensor_ranks), mesh_dim_names=("shard", "tensor"))
    for (name, placement), shape in itertools.product(KINDS.items(), [(16, 8), (12, 12), (13, 10), (5, 7, 3), (4, 2)]):
        if "packed" in name and shape[placement.dim] % (2 * tensor_ranks):
            continue
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        module = nn.Module()
        placed = distribute_tensor(whole, mesh["tensor"], [placement], src_data_rank=None)
        module.weight = nn.Parameter(placed)
        fully_shard(module, mesh=mesh["shard"])
        weight = module.weight
        assert isinstance(weight, DTensor)
        region = region_of(weight)
        local = weight.to_local()
        mine = take(whole, region)
        assert extent(region) == tuple(mine.shape)
        assert torch.equal(mine, local) or mine.numel() == local.numel() == 0, (name, shape, region)
        assert has_whole_rows(weight) == ("columns" not in name or tensor_ranks == 1)
        again = torch.full_like(whole, -1)
        for each in (region_of(weight, place) for place in itertools.product(*map(range, weight.device_mesh.shape))):
            put(again, each, take(whole, each))
            both = common(region, each)
            assert torch.equal(take(mine, inside(region, both)), take(whole, both))
        assert torch.equal(again, whole), (name, shape)
