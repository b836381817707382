"""Ranks meet before they gather on somebody's call, so that a call on some ranks alone ends by its own name.

A collective that some ranks begin alone pairs with whatever the others do next: values of another tensor, or an error
of the transport. So ranks first say what they are about to do, in the store that they were started with, where nothing
else can pair with it; who is alone there waits as long as for any collective. Steps of training do not meet: of those
there is no call that one would make on some ranks alone, and they would pay for it.
"""

from __future__ import annotations

import hashlib
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch
from trueshard.distributed import is_simulated
from trueshard.errors import TrueShardRuntimeError
from trueshard.sharding.stall_watch import time_limit, user_line

_PAUSES = 0.0005, 0.05
"""Seconds between two looks whether all ranks are there: the first, and the longest, to which they double."""
_meetings: weakref.WeakKeyDictionary[Any, Counter[Any]] = weakref.WeakKeyDictionary()
"""Default process group → what tells ranks of a mesh → number of meetings so far. It belongs to the mesh, as the
sequence numbers of its process groups do, and to no model: which models a rank still holds depends on when Python frees
them."""


def meet_to_gather(what: str, mesh: DeviceMesh, dims: Collection[int]) -> None:
    """Return when each rank along some dimensions of a mesh is about to do ``what``.

    Raises:
        RuntimeError: one does something else, or has not come within the process group's time limit.
    """
    line = user_line(sys._getframe())
    start = f"{what}{f' at {line}' if line else ''} is collective, of ranks with a part each, and "
    meet(what, mesh, dims, lambda problem: f"{start}{problem}; call it on all ranks, outside `if rank == 0`")


def meet(text: str, mesh: DeviceMesh, dims: Collection[int], message: Callable[[str], str]) -> None:
    """Return when each rank along some dimensions of a mesh is here with the same text.

    Raises:
        RuntimeError: ``message`` of the problem: some have another text, or have not come within the time limit.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None or is_simulated(mesh) or all(mesh.size(dim) == 1 for dim in dims):
        return
    along = tuple(slice(None) if dim in dims else here for dim, here in enumerate(coordinate))
    ranks, mine = mesh.mesh[along].flatten().tolist(), dist.get_rank()
    # Two models over the same ranks may run in threads, each on groups of its own. Ranks of a mesh of one dimension
    # share its group, and so its name.
    key = tuple(ranks), mesh.mesh_dim_names, mesh.get_group().group_name if mesh.ndim == 1 else ""
    world, store = dist.group.WORLD, _torch.store()
    counts = _meetings.setdefault(world, Counter())
    counts[key] += 1
    places = [f"trueshard/meet/{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}/{counts[key] - n}" for n in (0, 1)]
    here, done = places[0], f"{places[0]}/done"
    # However many ranks there are, each makes a few requests: the last one says that all are here.
    store.set(f"{here}/{mine}", "")
    first = store.compare_set(f"{here}/text", "", text).decode()
    if first != text:
        store.set(done, f"rank {mine} does something else: {text}")
        raise TrueShardRuntimeError(message(f"others do something else: {first}"))
    if store.add(f"{here}/count", 1) == len(ranks):
        store.set(done, "all")
        for name in ("text", "count", "done"):  # whoever is here has left the meeting before it
            store.delete_key(f"{places[1]}/{name}")
    deadline, pause = time.monotonic() + time_limit(world).total_seconds(), _PAUSES[0]
    # Not store.wait(): it would hold the one connection to the store, and so the meetings of other threads.
    while not store.check([done]):
        if time.monotonic() > deadline:
            missing = [rank for rank in ranks if not store.check([f"{here}/{rank}"])]
            raise TrueShardRuntimeError(message(f"ranks {missing} have not come"))
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    if (problem := store.get(done).decode()) != "all":
        raise TrueShardRuntimeError(message(problem))
    store.delete_key(f"{places[1]}/{mine}")
