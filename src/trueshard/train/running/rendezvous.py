"""A store of their own for ranks that torchrun has started, also when it has started them again.

- torchrun (2.13) hands the workers that it starts again the store of those before them, in which the addresses of the
  dead still stand; groups then connect to ports that nobody listens on. Its count of restarts does not tell the two
  apart: it is each node's own.
- So the ranks agree on a prefix first. Each asks under a name that only it knows; rank 0 answers every name with the
  prefix, until all ranks of its own time have confirmed it. What the dead have asked is answered too, and never read.
"""

from __future__ import annotations

import datetime
import time
import uuid
from collections.abc import Mapping

import torch.distributed as dist

POLL = 0.02
"""Seconds between two looks of rank 0."""


def fresh_store(environment: Mapping[str, str], timeout: float) -> dist.Store | None:
    """The store for a process group of this worker's time; None where the launcher's own is good.

    Args:
        environment: a worker's, with torch's variables.
        timeout: seconds to wait for the other ranks.

    Raises:
        torch.distributed.DistStoreError: not all ranks came in time.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    limit = datetime.timedelta(seconds=timeout)
    shared = dist.TCPStore(address, port, is_master=False, timeout=limit)
    return agreed(shared, int(environment["RANK"]), int(environment["WORLD_SIZE"]), timeout)


def agreed(shared: dist.Store, rank: int, world: int, timeout: float) -> dist.Store:
    """A part of a store that may hold what earlier ranks have left, the same on all ranks of now."""
    meeting = dist.PrefixStore("trueshard", shared)
    own = uuid.uuid4().hex
    meeting.set(f"asks/{rank}", own)
    if rank:
        prefix = meeting.get(f"answer/{own}").decode()
        meeting.set(f"confirmed/{prefix}/{rank}", own)
        return dist.PrefixStore(prefix, meeting)
    deadline = time.monotonic() + timeout
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if meeting.check([f"asks/{other}"]):
                meeting.set(f"answer/{meeting.get(f'asks/{other}').decode()}", own)
        missing = {other for other in missing if not meeting.check([f"confirmed/{own}/{other}"])}
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise dist.DistStoreError(f"waited {timeout:.0f} seconds for rank {ranks} to join")
        time.sleep(POLL if missing else 0)
    return dist.PrefixStore(own, meeting)
