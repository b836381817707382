"""Hashes of tensors that do not depend on how they are cut: computed from shards, and added up.

- A tensor's hash is the sum of mix(index, bits) over its elements, mod 2**64: ``index`` is its place in the whole
  tensor, ``mix`` the finaliser of splitmix64. Ranks add what they hold, in any order; a swap of two elements shows.
- Of replicas one counts; that they are equal is ``check_replicas``'s matter.
- It finds faults and differences, not forgeries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.process_group import RankGroup, has_turn
from trueshard.errors import ReplicasDiffer, own_errors
from trueshard.model import names
from trueshard.model.agreement import bits_of
from trueshard.model.regions import Region, extent, region_of
from trueshard.sharding.hooks import runtime_of

_CHUNKS = {"cpu": 1 << 15}
"""Elements hashed at once, so that copies of 8 bytes each stay in the cache."""
_CHUNK = 1 << 22
"""Elements elsewhere: the kernels take a GPU longer than launching them takes the host."""
_MASK = (1 << 64) - 1


# The constants of splitmix64, as torch's signed integers
_STRIDE, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class StateHash(dict[str, str]):
    """Key of each tensor, as in a checkpoint (``model/<name>``, ``optimizer/<parameter>/<state>``) → its hash."""

    @property
    def total(self) -> str:
        """Hash of all of them: 16 hexadecimal digits."""
        lines = "\n".join(f"{key} {value}" for key, value in sorted(self.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"StateHash({self.total}, {len(self)} tensors)"


@own_errors()
@torch.no_grad()
def state_hash(model: Any = None, optimizer: Any = None) -> StateHash:
    """Hash every tensor of a model and its optimizer: equal exactly if all bits are equal, however they are sharded.

    Collective. Reads every byte once; nothing is gathered but the hashes.

    Args:
        model: a module, sharded or not, or a dict of several.
        optimizer: an optimizer of their parameters, or a dict of several.
    """
    tensors, _ = state.collect(*state.by_prefix(model, optimizer), {}, None)
    return StateHash(sorted(hash_together(tensors, state.group_of(model), "the state was not hashed").items()))


def hash_together(tensors: Mapping[str, torch.Tensor], group: RankGroup, failed: str) -> dict[str, str]:
    """Return key → hash of the full tensors, of which each rank passes its own. Collective."""

    def hash_local() -> dict[str, tuple[str, int, bool]]:
        """Return key → (shape and dtype, hash of this rank's part, True if the ranks' parts add up)."""
        # Of replicas of a part, one counts.
        counted = {key: t for key, t in tensors.items() if not _is_cut(t) or has_turn(t, 0)}
        hashes = dict(zip(counted, hashes_here(list(counted.values())), strict=True))
        return {key: (f"{tuple(t.shape)} {t.dtype}", hashes.get(key, 0), _is_cut(t)) for key, t in tensors.items()}

    total: dict[str, tuple[str, int]] = {}
    for hashes in group.attempt(failed, hash_local):
        for key, (kind, part, is_cut) in hashes.items():
            if key not in total:
                total[key] = kind, part
            elif is_cut:
                total[key] = kind, (total[key][1] + part) & _MASK
    return {key: written(kind, value) for key, (kind, value) in total.items()}


def _is_cut(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def are_exact(models: Mapping[str, Any]) -> bool:
    """True if a model was sharded with ``exact=True``: its checkpoints hold hashes."""
    runtimes = (runtime_of(names.unwrap(model)) for model in models.values())
    return any(runtime is not None and runtime.exact is not None for runtime in runtimes)


def written(kind: str, value: int) -> str:
    """Return the hash of a tensor as text; ``kind``: its shape and dtype, which count, too."""
    return f"{(value ^ int.from_bytes(hashlib.sha256(kind.encode()).digest()[:8], 'big')) & _MASK:016x}"


def hash_here(tensor: torch.Tensor) -> int:
    """Return the hash of this rank's part of ``tensor``, 0 to 2**64 - 1."""
    (value,) = hashes_here([tensor])
    return value


def hashes_here(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the hash of this rank's part of each tensor, 0 to 2**64 - 1. Waits once for each device."""
    sums = list(map(_sum_here, tensors))
    result = [0] * len(sums)
    for device in dict.fromkeys(total.device for total in sums):
        places = [i for i, total in enumerate(sums) if total.device == device]
        for i, value in zip(places, torch.stack([sums[i] for i in places]).tolist(), strict=True):
            result[i] = value & _MASK
    return result


def _sum_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of this rank's part of ``tensor``: 0-dim int64, which wraps."""
    region = region_of(tensor)
    bits = bits_of(tensor)
    if not (count := _torch.local(tensor).numel()):
        return torch.zeros((), dtype=torch.int64, device=bits.device)
    width = bits.numel() // count
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin, indices in _indices(region, tuple(tensor.shape), width, bits.device):
        total += _mixed(indices, bits[begin : begin + indices.numel()])
    return total


def _indices(
    region: Region, shape: tuple[int, ...], width: int, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place in this rank's memory, places in the whole tensor), in chunks; ``width``: numbers per element."""
    chunk = _CHUNKS.get(device.type, _CHUNK)
    strides = [math.prod(shape[dim + 1 :]) * width for dim in range(len(shape))]
    whole_rows = all(runs == ((0, size),) for runs, size in zip(region[1:], shape[1:], strict=True))
    if whole_rows and (not region or len(region[0]) == 1):  # one range, which needs no table of places
        first = region[0][0][0] * strides[0] if region else 0
        count = math.prod(extent(region)) * width
        for begin in range(0, count, chunk):
            yield begin, torch.arange(first + begin, first + min(begin + chunk, count), device=device)
        return
    tables = [
        torch.cat([torch.arange(start, stop, device=device) for start, stop in runs]) * stride
        for runs, stride in zip(region, strides, strict=True)
    ]
    for begin in range(0, count := math.prod(extent(region)) * width, chunk):
        rest = torch.arange(begin, min(begin + chunk, count), device=device)
        places, rest = rest % width, rest // width
        for table in reversed(tables):
            places, rest = places + table[rest % len(table)], rest // len(table)
        yield begin, places


def _mixed(indices: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return the sum of mix(index, bits) as int64, which wraps; 0-dim."""

    def shifted(values: torch.Tensor, count: int) -> torch.Tensor:  # torch's integers are signed: fill with zeros
        return values.bitwise_right_shift(count).bitwise_and_((1 << (64 - count)) - 1)

    mixed = indices.mul(_STRIDE).add_(bits)
    mixed = mixed.bitwise_xor_(shifted(mixed, 30)).mul_(_FIRST)
    mixed = mixed.bitwise_xor_(shifted(mixed, 27)).mul_(_SECOND)
    return mixed.bitwise_xor_(shifted(mixed, 31)).sum()


# Replicas


@own_errors()
@torch.no_grad()
def check_replicas(model: Any = None, optimizer: Any = None) -> None:
    """Compare what several ranks hold of a model and its optimizer, bit for bit: replicas, and whole tensors.

    Collective. Reads every byte of this rank once, and exchanges a few bytes; names and hashes only on a difference.

    Raises:
        ReplicasDiffer: on every rank; names the first tensor, and the ranks that differ from most.
    """
    tensors, _ = state.collect(*state.by_prefix(model, optimizer), {}, None)
    group, failed = state.group_of(model), "the replicas were not compared"
    hashes = hashes_here(list(tensors.values()))
    held = {key: (region_of(t), value) for (key, t), value in zip(tensors.items(), hashes, strict=True)}
    # One sum for each place along the dimensions that cut: ranks at one place hold the same.
    sums: dict[tuple[int, ...], int] = {}
    for key, tensor in tensors.items():
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        place = tuple(tensor.device_mesh.get_local_rank(dim) for dim in cut) if isinstance(tensor, DTensor) else ()
        sums[place] = (sums.get(place, 0) + held[key][1]) & _MASK
    first: dict[tuple[int, ...], int] = {}
    # Unequal, too, where owners hold state that others do not: the names below tell.
    everywhere = [item for sums_there in group.attempt(failed, lambda: sums) for item in sums_there.items()]
    if all(first.setdefault(place, value) == value for place, value in everywhere):
        return
    everyone = group.attempt(failed, lambda: held)
    for key in dict.fromkeys(key for held_there in everyone for key in held_there):
        by_region: dict[Region, dict[int, list[int]]] = {}
        for rank, held_there in enumerate(everyone):
            if key in held_there:
                region, value = held_there[key]
                by_region.setdefault(region, {}).setdefault(value, []).append(rank)
        for region, holders in by_region.items():
            if len(holders) > 1:
                raise _differ(key, region, sorted(holders.values(), key=len))


def _differ(key: str, region: Region, holders: Sequence[Sequence[int]]) -> ReplicasDiffer:
    *few, most = holders
    place = "" if not region else f", rows {region[0][0][0]} to {region[0][-1][1] - 1}"
    if len(few[-1]) == len(most):
        ranks = sorted(rank for holder in holders for rank in holder)
        start = f"ranks {' and '.join(map(str, ranks))} hold different bits of {key!r}{place}, and no majority tells"
        return ReplicasDiffer(f"{start} which is right (three copies would)", key, ranks)
    ranks = sorted(rank for holder in few for rank in holder)
    who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
    return ReplicasDiffer(f"{who} other bits of {key!r}{place} than ranks {', '.join(map(str, most))}", key, ranks)
