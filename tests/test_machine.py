"""What is asked of this machine and this process beside torch."""

from __future__ import annotations

import gc

import pytest

from trueshard.machine import earlier_objects_frozen, garbage_collection_paused


@pytest.mark.parametrize("is_frozen", [False, True])
def test_many_objects_that_were_made_without_collections_are_looked_through_by_a_full_one_alone(
    is_frozen: bool,
) -> None:
    gc.unfreeze()  # what other tests have frozen may end in the middle of this one
    gc.collect()
    if is_frozen:
        gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with garbage_collection_paused():
            assert not gc.isenabled()
            made: list[list[int]] = [[] for _ in range(200_000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() == frozen
        oldest = {id(one) for one in gc.get_objects(generation=2)}
        assert (id(made[0]) in oldest) == (frozen == 0)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_earlier_objects_are_frozen_inside_alone_and_what_the_user_froze_stays_so(is_frozen: bool) -> None:
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        assert (before > 0) == is_frozen
        with earlier_objects_frozen():
            assert gc.get_freeze_count() == before if is_frozen else gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()
