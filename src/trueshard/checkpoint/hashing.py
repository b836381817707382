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
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.process_group import RankGroup
from trueshard.model import names
from trueshard.model.regions import Region, extent, region_of
from trueshard.sharding.hooks import runtime_of

_CHUNK = 1 << 15
"""Elements hashed at once, so that copies of 8 bytes each stay in the cache."""
_MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STRIDE, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class StateHash(Mapping[str, str]):
    """Key of each tensor, as in a checkpoint (``model/<name>``, ``optimizer/<parameter>/<state>``) → its hash."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(sorted(hashes.items()))
        told = "\n".join(f"{key} {value}" for key, value in self._hashes.items())
        self.total: str = hashlib.sha256(told.encode()).hexdigest()[:16]
        """Hash of all of them: 16 hexadecimal digits."""

    def __getitem__(self, key: str) -> str:
        return self._hashes[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hashes)

    def __len__(self) -> int:
        return len(self._hashes)

    def __repr__(self) -> str:
        return f"StateHash({self.total}, {len(self)} tensors)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateHash) and self._hashes == other._hashes

    __hash__ = None  # type: ignore[assignment]


@torch.no_grad()
def state_hash(model: Any = None, optimizer: Any = None) -> StateHash:
    """Hash every tensor of a model and its optimizer: equal exactly if all bits are equal, however they are sharded.

    Collective. Reads every byte once; nothing is gathered but the hashes.

    Args:
        model: a module, sharded or not, or a dict of several.
        optimizer: an optimizer of their parameters, or a dict of several.
    """
    tensors = tensors_of(model, optimizer)
    group = RankGroup(state.parameters_of(model), stages=state.is_stage(model))
    return StateHash(hash_together(tensors, group, "the state was not hashed"))


def hash_together(tensors: Mapping[str, torch.Tensor], group: RankGroup, failed: str) -> dict[str, str]:
    """Return key → hash of the whole tensors, of which each rank gives its own. Collective."""
    return _joined(group.attempt(failed, lambda: _told(tensors)))


def are_exact(models: Mapping[str, Any]) -> bool:
    """True if a model was sharded with ``exact=True``: its checkpoints hold hashes."""
    runtimes = (runtime_of(names.unwrap(model)) for model in models.values())
    return any(runtime is not None and runtime.exact is not None for runtime in runtimes)


def differing(found: Mapping[str, str], saved: Mapping[str, str]) -> list[str]:
    """Return the keys that both have, with different hashes."""
    return [key for key, value in found.items() if saved.get(key, value) != value]


def tensors_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's tensors of a model and its optimizer, by key."""
    models, optimizers = state.by_prefix(model, optimizer)
    return state.collect(models, optimizers, {}, None)[0]


def _told(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int, bool]]:
    """Return key → (shape and dtype, hash of what this rank holds, True if parts of ranks add up)."""
    return {
        key: (f"{tuple(tensor.shape)} {tensor.dtype}", hash_here(tensor) if _counts(tensor) else 0, _is_cut(tensor))
        for key, tensor in tensors.items()
    }


def _joined(everyone: Sequence[Mapping[str, tuple[str, int, bool]]]) -> dict[str, str]:
    found: dict[str, tuple[str, int]] = {}
    for told in everyone:
        for key, (kind, part, is_cut) in told.items():
            if key not in found:
                found[key] = kind, part
            elif is_cut:
                found[key] = kind, (found[key][1] + part) & _MASK
    return {key: written(kind, value) for key, (kind, value) in found.items()}


def written(kind: str, value: int) -> str:
    """Return the hash of a tensor as text; ``kind``: its shape and dtype, which count, too."""
    return f"{(value ^ int.from_bytes(hashlib.sha256(kind.encode()).digest()[:8], 'big')) & _MASK:016x}"


def _is_cut(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def _counts(tensor: torch.Tensor) -> bool:
    """True if this rank is the one, of those that hold the same part of a tensor that is cut, whose part counts."""
    if not _is_cut(tensor):
        return True
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    copies = (dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
    return all(mesh.get_local_rank(dim) == 0 for dim in copies)


def hash_here(tensor: torch.Tensor) -> int:
    """Return the hash of this rank's part of ``tensor``, 0 to 2**64 - 1."""
    region = region_of(tensor)
    local = _torch.local(tensor).detach().resolve_conj().resolve_neg()
    if not local.numel():
        return 0
    bits = local.contiguous().reshape(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits).reshape(-1)
    width = bits.numel() // local.numel()
    bits = bits.view(_BITS[bits.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin, indices in _indices(region, tuple(tensor.shape), width, bits.device):
        total += _mixed(indices, bits[begin : begin + indices.numel()])
    return int(total) & _MASK


def _indices(
    region: Region, shape: tuple[int, ...], width: int, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place in this rank's memory, places in the whole tensor), in chunks; ``width``: numbers an element."""
    strides = [math.prod(shape[dim + 1 :]) * width for dim in range(len(shape))]
    whole_rows = all(runs == ((0, size),) for runs, size in zip(region[1:], shape[1:], strict=True))
    if whole_rows and (not region or len(region[0]) == 1):
        first = region[0][0][0] * strides[0] if region else 0
        count = math.prod(extent(region)) * width
        for begin in range(0, count, _CHUNK):
            stop = min(begin + _CHUNK, count)
            yield begin, torch.arange(first + begin, first + stop, device=device)
        return
    places = torch.zeros((), dtype=torch.int64, device=device)
    for runs, stride in zip(region, strides, strict=True):
        own = torch.cat([torch.arange(start, stop, device=device) for start, stop in runs])
        places = places.unsqueeze(-1) + own * stride
    places = (places.unsqueeze(-1) + torch.arange(width, device=device)).reshape(-1)
    for begin in range(0, places.numel(), _CHUNK):
        yield begin, places[begin : begin + _CHUNK]


def _mixed(indices: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return the sum of mix(index, bits) as int64, which wraps; 0-dim."""
    mixed = indices.mul(_STRIDE).add_(bits)
    mixed = mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_FIRST)
    mixed = mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_SECOND)
    return mixed.bitwise_xor_(_shifted(mixed, 31)).sum()


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right, filling with zeros: torch's integers are signed."""
    return values.bitwise_right_shift(count).bitwise_and_((1 << (64 - count)) - 1)


# Replicas


class ReplicasDiffer(RuntimeError):
    """Ranks that hold the same part of a tensor hold different bits."""

    def __init__(self, message: str, key: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.key = key
        """The first tensor that differs, as in ``StateHash``."""
        self.ranks = tuple(ranks)
        """Ranks that differ from most; all that hold the part, if there is no majority."""


@torch.no_grad()
def check_replicas(model: Any = None, optimizer: Any = None) -> None:
    """Compare what several ranks hold of a model and its optimizer, bit for bit: replicas, and whole tensors.

    Collective. Reads every byte of this rank once, and exchanges a few bytes; names and hashes only on a difference.

    Raises:
        ReplicasDiffer: on every rank; names the first tensor, and the ranks that differ from most.
    """
    tensors = tensors_of(model, optimizer)
    group = RankGroup(state.parameters_of(model), stages=state.is_stage(model))
    held = {key: (region_of(tensor), hash_here(tensor)) for key, tensor in tensors.items()}
    parts: dict[Any, int] = {}
    for key, (_, value) in held.items():
        place = _place(tensors[key])
        parts[place] = (parts.get(place, 0) + value) & _MASK
    failed = "the replicas were not compared"
    if _alike(group.attempt(failed, lambda: parts)):
        return
    everyone = group.attempt(failed, lambda: held)
    for key in dict.fromkeys(key for told in everyone for key in told):
        by_region: dict[Region, dict[int, list[int]]] = {}
        for rank, told in enumerate(everyone):
            if key in told:
                region, value = told[key]
                by_region.setdefault(region, {}).setdefault(value, []).append(rank)
        for region, holders in by_region.items():
            if len(holders) > 1:
                raise _differ(key, region, sorted(holders.values(), key=len))


def _place(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return this rank's place among those that cut ``tensor``: ranks of one place hold the same."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_local_rank(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()
    )


def _alike(everyone: Sequence[Mapping[Any, int]]) -> bool:
    """True if no two ranks tell different values of one place; False, too, where owners hold what others do not."""
    seen: dict[Any, int] = {}
    return all(seen.setdefault(place, value) == value for told in everyone for place, value in told.items())


def _differ(key: str, region: Region, holders: Sequence[Sequence[int]]) -> ReplicasDiffer:
    *few, most = holders
    place = "" if not region else f", rows {region[0][0][0]} to {region[0][-1][1] - 1}"
    if len(few[-1]) == len(most):
        ranks = sorted(rank for holder in holders for rank in holder)
        said = f"ranks {' and '.join(map(str, ranks))} hold different bits of {key!r}{place}, and no majority tells"
        return ReplicasDiffer(f"{said} which is right (three copies would)", key, ranks)
    ranks = sorted(rank for each in few for rank in each)
    who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
    return ReplicasDiffer(f"{who} other bits of {key!r}{place} than ranks {', '.join(map(str, most))}", key, ranks)
