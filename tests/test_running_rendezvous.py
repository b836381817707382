"""Ranks agree on a part of a store in which the dead have left their addresses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from trueshard.train.running.rendezvous import agreed


def meet(shared: dist.Store, world: int) -> list[dist.Store]:
    """What each rank gets."""
    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(lambda rank: agreed(shared, rank, world, timeout=10), range(world)))


def test_ranks_of_one_time_share_a_store() -> None:
    stores = meet(dist.HashStore(), 3)
    stores[0].set("address", "here")
    assert [store.get("address") for store in stores] == [b"here"] * 3


def test_what_the_dead_have_left_is_not_seen() -> None:
    shared = dist.HashStore()
    meet(shared, 2)[0].set("address", "of the dead")
    first, second = meet(shared, 2)
    assert not second.check(["address"])
    first.set("address", "of the living")
    assert second.get("address") == b"of the living"


def test_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(dist.DistStoreError, match="waited 0 seconds for rank 1, 2 to join"):
        agreed(dist.HashStore(), 0, 3, timeout=0.1)
