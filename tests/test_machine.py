"""What is asked of this machine and this process beside torch."""

from __future__ import annotations

import gc

import pytest

from trueshard.machine import garbage_collection_paused


@pytest.mark.parametrize("is_frozen", [False, True])
def test_many_objects_that_were_made_without_collections_are_looked_through_by_a_full_one_alone(
    is_frozen: bool,
) -> None:
    gc.collect()
    before = gc.get_freeze_count()
    if is_frozen:
        gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with garbage_collection_paused():
            assert not gc.isenabled()
            made: list[list[int]] = [[] for _ in range(200_000)]
        assert gc.isenabled()
        assert (gc.get_freeze_count() > 0) == (frozen > 0)  # of those that other tests froze, some may have ended
        oldest = {id(one) for one in gc.get_objects(generation=2)}
        assert (id(made[0]) in oldest) == (frozen == 0)
    finally:
        if is_frozen and not before:
            gc.unfreeze()
