"""Ranks meet before they gather on somebody's call, so that a call on some ranks alone ends by its own name.

A collective that some ranks begin alone pairs with whatever the others do next: values of another tensor, or an error
of the transport. So ranks first say what they are about to do, in a group of their own over the CPU, where nothing
else can pair with it; who is alone there waits as long as for any collective. Steps of training do not meet: of those
there is no call that one would make on some ranks alone, and they would pay for it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch
from trueshard.distributed import gloo_group, is_simulated
from trueshard.sharding.stall_watch import time_limit, user_line


def meet(what: str, mesh: DeviceMesh, dims: Collection[int]) -> None:
    """Return when each rank along some dimensions of a mesh is about to do ``what``.

    Raises:
        RuntimeError: one does something else, or has not come within the process group's time limit.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None or is_simulated(mesh) or all(mesh.size(dim) == 1 for dim in dims):
        return
    along = tuple(slice(None) if dim in dims else here for dim, here in enumerate(coordinate))
    ranks = sorted(mesh.mesh[along].flatten().tolist())
    digest = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=7).digest(), "little")
    try:
        with _torch.unwatched():  # what counts memory and traffic of a model's operators has nothing of this
            both = torch.tensor([digest, -digest], device="cpu")  # their maxima are opposite if all digests are one
            group = gloo_group("meeting", ranks, time_limit(dist.group.WORLD))
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise RuntimeError(_words(what, ranks, f"not all came: {str(error).splitlines()[0]}")) from error
    if both[0] != -both[1]:
        raise RuntimeError(_words(what, ranks, "some do something else"))


def _words(what: str, ranks: list[int], problem: str) -> str:
    line, numbers = user_line(sys._getframe()), ", ".join(map(str, ranks))
    return (
        f"{what}{f' at {line}' if line else ''} is collective, of ranks {numbers} with a part each, and {problem}; "
        "call it on all ranks, outside `if rank == 0`"
    )
