"""Compare ranks: the model they were given, whether a step failed, and the values they start from.

- Before anything is touched, ranks compare what they were given; a difference is an error on every rank.
- Values that differ become rank 0's, as in DistributedDataParallel, with a warning. Checksums are compared, so equal
  values cost no traffic.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard.distributed import device_of, gather_objects, is_simulated
from trueshard.errors import RankFailed
from trueshard.model.intent import Intent

_BLOCK = 1 << 22
_ODD = -7_046_029_254_386_353_131  # 2**64 / golden ratio, as a signed integer


def agree_on_structure(intent: Intent, facts: Sequence[tuple[str, Any]], mesh: DeviceMesh) -> None:
    """Raise ValueError on every rank if ranks differ in ``intent`` or ``facts``: (name, value with a stable repr)."""
    mine = [(what, repr(value)) for what, value in (*intent.facts, *facts)]
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(gather_objects(digest, mesh))) == 1:
        return
    everyone = gather_objects(mine, mesh)
    for rank, theirs in enumerate(everyone):
        for a, b in zip_longest(everyone[0], theirs, fillvalue=("nothing", "more")):
            if a != b:
                raise ValueError(
                    f"ranks were given different models: rank 0 has {' '.join(a)}, rank {rank} {' '.join(b)}"
                )


@contextlib.contextmanager
def together(mesh: DeviceMesh) -> Iterator[None]:
    """Raise on every rank of the mesh if the block raises on any. Collective."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
    messages = gather_objects(None if error is None else f"{type(error).__name__}: {error}", mesh)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RankFailed(f"shard() failed on rank {rank}, so it was undone on every rank: {message}")


@torch.no_grad()
def take_from_first_rank(tensors: Sequence[tuple[str, torch.Tensor]], mesh: DeviceMesh) -> list[str]:
    """Give ``tensors`` rank 0's values, in new memory, where ranks differ; return their names. Collective.

    They have the same names, shapes and dtypes on every rank; meta and DTensors are left alone.
    """
    if mesh.size() == 1 or is_simulated(mesh):
        return []
    real = [(name, t) for name, t in tensors if not t.is_meta and not isinstance(t, DTensor) and t.numel()]
    real = [(name, t) for name, t in real if type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)]
    device = device_of(mesh)
    sums = torch.tensor([_checksum(t) for _, t in real], dtype=torch.int64, device=device)
    differing: set[int] = set()
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        if group.size() == 1 or not real:
            continue
        theirs = [torch.empty_like(sums) for _ in range(group.size())]
        dist.all_gather(theirs, sums, group=group)
        unequal = torch.stack([their != theirs[0] for their in theirs]).any(0).nonzero().flatten().tolist()
        for i in unequal:
            tensor = real[i][1]
            value = tensor.detach().to(device, copy=True).contiguous()
            dist.broadcast(value, src=dist.get_global_rank(group, 0), group=group)
            # Not in place: whoever undoes a failed shard() puts the old memory back.
            tensor.data = value.to(tensor.device)
            sums[i] = theirs[0][i]
        differing.update(unequal)
    # Along the first dimension only some ranks see a difference: let all of them name it.
    differing_names: set[str] = set().union(*gather_objects([real[i][0] for i in sorted(differing)], mesh))
    return [name for name, _ in real if name in differing_names]


def warn_of_differing(what: str, differing: Sequence[str], made: str, *, stacklevel: int) -> None:
    """Warn that the tensors ``differing`` had other values on other ranks; ``made``: before what to seed alike."""
    shown = ", ".join(map(repr, differing[:5])) + (", …" if len(differing) > 5 else "")
    warnings.warn(
        f"{len(differing)} {what} differed between ranks and now have rank 0's values: {shown}. "
        f"Seed every rank alike before making {made} to silence this.",
        stacklevel=stacklevel,
    )


def _checksum(tensor: torch.Tensor) -> int:
    """Return a position-dependent checksum of the bytes of ``tensor``."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    length = raw.numel() // 8 * 8
    total = 0
    # Products and sums wrap around modulo 2**64, which is what a checksum wants.
    for words in (*raw[:length].view(torch.int64).split(_BLOCK), raw[length:].to(torch.int64)):
        weights = torch.arange(1, words.numel() + 1, device=words.device) * _ODD
        total = (total * 1_000_003 + int((words * weights).sum())) % (2**61 - 1)
    return total
