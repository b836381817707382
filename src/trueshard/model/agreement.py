"""Compare ranks: the model they were given, whether a step failed, and the values they start from.

- Before anything is touched, ranks compare what they were given; a difference is an error on every rank.
- Values that differ become rank 0's, as in DistributedDataParallel, with a warning. Checksums are compared, so equal
  values cost no traffic.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.distributed import device_of, gather_objects, gather_parts, is_simulated
from trueshard.errors import RankFailed, warn_user
from trueshard.model.intent import Intent

_WIDTH = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7_046_029_254_386_353_131  # 2**64 / golden ratio, as a signed integer


def agree_on_structure(intent: Intent, facts: Sequence[tuple[str, Any]], mesh: DeviceMesh) -> None:
    """Raise ValueError on every rank if ranks differ in ``intent`` or ``facts``: (name, value with a stable repr)."""
    digest = hashlib.sha256(repr((intent.tensors, intent.optimizers, facts)).encode()).hexdigest()
    if len(set(gather_objects(digest, mesh))) == 1:
        return
    everyone = gather_objects([(what, repr(value)) for what, value in (*intent.facts, *facts)], mesh)
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
    if not real:
        return []
    sums = torch.stack([checksum(t).to(device) for _, t in real])
    differing: set[int] = set()
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        if group.size() == 1:
            continue
        theirs = gather_parts(sums, group)
        unequal = (theirs != theirs[0]).any(0).nonzero().flatten().tolist()
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


def warn_of_differing(what: str, differing: Sequence[str], made: str) -> None:
    """Warn that the tensors ``differing`` had other values on other ranks; ``made``: before what to seed alike."""
    shown = ", ".join(map(repr, differing[:5])) + (", …" if len(differing) > 5 else "")
    warn_user(
        f"{len(differing)} {what} differed between ranks and now have rank 0's values: {shown}. "
        f"Seed every rank alike before making {made} to silence this."
    )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of this rank's part of ``tensor``, 1-D, as integers of its elements' size."""
    numbers = _torch.local(tensor.detach()).resolve_conj().resolve_neg().contiguous().reshape(-1)
    numbers = torch.view_as_real(numbers).reshape(-1) if numbers.is_complex() else numbers
    return numbers.view(_INTEGERS[numbers.itemsize])


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the bits of this rank's part and their places, 0-dim int64, without waiting for it.

    Sums of rows and of columns are weighted by their places, so that no copy of 8 bytes an element is made. Products
    and sums wrap around modulo 2**64.
    """
    bits = bits_of(tensor)
    whole = len(bits) // _WIDTH * _WIDTH
    table, rest = bits[:whole].view(-1, _WIDTH), bits[whole:].to(torch.int64)
    weights = weights_of_places(max(_WIDTH, len(table)), bits.device)
    columns = (table.sum(0, dtype=torch.int64) * weights[:_WIDTH]).sum()
    rows = (table.sum(1, dtype=torch.int64) * weights[: len(table)]).sum()
    return (columns + rows * 3 + (rest * weights[: len(rest)]).sum() * 5) * 2 + 1


def weights_of_places(count: int, device: torch.device) -> torch.Tensor:
    """Return odd multiples of the places 1 to ``count``, by which a sum depends on the order: (count,), int64."""
    return torch.arange(1, count + 1, device=device) * _ODD
