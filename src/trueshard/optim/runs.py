"""Parameters whose shards follow one another in memory are stepped as one flat tensor.

An element-wise update does not care where one parameter ends and the next begins, and a step on one tensor costs the
host as much as a step on one of hundreds. FSDP2 reduces the gradients of a unit into one buffer; ``shard()`` puts the
parameters of a unit behind one another in the same order; state that was made for the flat tensor is shown as a DTensor
for each parameter, a view of it. Where any of this does not hold in some step, its parameters are stepped one by one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.optim.parts import flat, runs_of
from trueshard.optim.rebind import as_rows, by_shape, shard_like
from trueshard.optim.shards import State, leaf_over, local_gradient

COPIED = 16 << 20
"""Bytes up to which gradients that lie apart are copied behind one another for a step: those of small parameters of
several units."""


class Run:
    """Neighbours in memory: all of one dtype, each contiguous.

    Args:
        members: in the order of their memory.
    """

    def __init__(self, members: Sequence[DTensor]) -> None:
        self.members = list(members)
        self.locals = [_torch.local(member) for member in members]
        counts = [local.numel() for local in self.locals]
        self._ends = list(itertools.accumulate(counts))
        self._starts = [end - count for end, count in zip(self._ends, counts, strict=True)]
        first = self.locals[0]
        self._specs = _torch.specs_of(members)
        self.leaf: torch.Tensor = leaf_over(first.as_strided((self._ends[-1],), (1,)), members[0])
        self._entries: dict[str, Any] | None = None
        """The leaf's state."""
        self._shown: list[dict[str, Any]] = []
        """The same as its members show it, each in its own dict."""
        self._values: list[Any] = []
        """Every value in ``_shown``, to see whether one was replaced."""
        self._counts: dict[str, torch.Tensor] = {}
        """By key of a 0-dim tensor: one element a member, of which the first is the leaf's own."""
        self._versions: dict[str, int] = {}
        self._lent: dict[str, Any] = {}
        """What the leaf's state was when it was last spread over the members."""
        self._grad: torch.Tensor | None = None

    def ready(self, state: State) -> bool:
        """Whether all members can be stepped as one now: gradients and state allow it, or there are no gradients."""
        self._grad = None
        grads: list[Any] = [member.grad for member in self.members]
        if all(grad is None for grad in grads):
            return self._joined(state)
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            return False
        # FSDP2 gives each gradient its parameter's own record; asking all at once costs least.
        if all(map(operator.is_, _torch.specs_of(grads), self._specs)):
            shards = _torch.shards_of(grads)
        else:
            shards = [local_gradient(member) for member in self.members]
        alike = all(shard.dtype == self.leaf.dtype for shard in shards)
        if not alike or not all(map(torch.Tensor.is_contiguous, shards)):
            return False
        pieces = runs_of(shards)  # one for each unit
        if (len(pieces) > 1 and self.leaf.nbytes > COPIED) or not self._joined(state):
            return False
        self._grad = flat(pieces)
        return True

    def lend(self, state: State) -> Any:
        """As a stand-in; ``ready`` was asked before."""
        self.leaf.grad = self._grad
        return self._entries

    def take_back(self) -> None:
        """As a stand-in."""
        self.leaf.grad = self._grad = None
        increment_version(self.locals)  # they do not see what is written through the flat tensor

    def keep(self, state: State, entries: Any) -> None:
        """As a stand-in."""
        if entries is None:
            return
        if self._entries is None:
            self._entries, self._shown = entries, [{} for _ in self.members]
            for member, shown in zip(self.members, self._shown, strict=True):
                state[member] = shown
        changed = False
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0 and key in self._counts:
                counts = self._counts[key]
                if _torch.storage_identity(value) == _torch.storage_identity(counts):
                    counts.fill_(value)
                    self._versions[key] = _torch.version(counts)
                    continue
            if key not in self._lent or self._lent[key] is not value:
                self._spread(key, value)
                changed = True
        if changed:
            self._remember()

    def _spread(self, key: str, value: Any) -> None:
        """Show each member its part of the leaf's ``value``."""
        assert self._entries is not None
        parts: Sequence[Any]
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            counts = value.detach().expand(len(self.members)).clone()
            self._counts[key], self._versions[key] = counts, _torch.version(counts)
            parts = counts.unbind()
            self._entries[key] = counts[0]
        elif isinstance(value, torch.Tensor):
            parts = [
                as_rows(value[start:end].view(local.shape), member)
                for start, end, local, member in zip(self._starts, self._ends, self.locals, self.members, strict=True)
            ]
        else:
            parts = [value] * len(self.members)
        for shown, part in zip(self._shown, parts, strict=True):
            shown[key] = part

    def _remember(self) -> None:
        assert self._entries is not None
        self._lent = dict(self._entries)
        self._values = [value for shown in self._shown for value in shown.values()]

    # Whether the members' state is still the leaf's

    def _joined(self, state: State) -> bool:
        found: list[Any] = list(map(state.get, self.members))
        if all(entries is None for entries in found):
            self._entries = None
            return True
        if self._entries is not None and all(map(operator.is_, found, self._shown)):
            values = list(itertools.chain.from_iterable(map(dict.values, self._shown)))
            if len(values) == len(self._values) and all(map(operator.is_, values, self._values)):
                return all(self._still_equal(key) for key in self._counts)
        if any(type(entries) is not dict or entries.keys() != found[0].keys() for entries in found):
            return False
        return self._join(found)

    def _still_equal(self, key: str) -> bool:
        counts = self._counts[key]
        if _torch.version(counts) != self._versions[key]:
            if not bool((counts == counts[0]).all()):
                return False
            self._versions[key] = _torch.version(counts)
        return True

    def _join(self, found: list[dict[str, Any]]) -> bool:
        """Copy the members' state behind one another: it came from a checkpoint, or from before sharding."""
        joined: dict[str, Any] = {}
        for key in found[0]:
            parts = list(self._parts(key, [entries[key] for entries in found]))
            if isinstance(parts[0], torch.Tensor):
                if any(not isinstance(part, torch.Tensor) or part.dtype != parts[0].dtype for part in parts):
                    return False
                if all(part.ndim == 0 for part in parts):
                    if any(bool(part != parts[0]) for part in parts):
                        return False
                    joined[key] = parts[0].detach().clone()
                elif all(part.shape == local.shape for part, local in zip(parts, self.locals, strict=True)):
                    joined[key] = torch.cat([part.reshape(-1) for part in parts])
                else:
                    return False
            elif any(type(part) is not type(parts[0]) or part != parts[0] for part in parts):
                return False
            else:
                joined[key] = parts[0]
        self._entries, self._shown, self._counts = joined, found, {}
        for key, value in list(joined.items()):
            self._spread(key, value)
        self._remember()
        return True

    def _parts(self, key: str, values: list[Any]) -> Iterator[Any]:
        for member, value in zip(self.members, values, strict=True):
            if isinstance(value, DTensor):
                yield _torch.local(value)
            elif isinstance(value, torch.Tensor) and value.ndim and by_shape((key,), value, member):
                yield _torch.local(shard_like(value, member))  # a state dict from one process
            else:
                yield value


class Runs:
    """The runs of one optimizer's groups, found once for a list of parameters and their memory."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[Any], list[Any], list[Run], list[Any]]] = {}

    def of(self, group: int, parameters: Sequence[torch.Tensor]) -> tuple[list[Run], list[torch.Tensor]]:
        """The runs among ``parameters`` of a group, and those that are in none."""
        memory = _torch.shards_of(parameters)
        known = self._known.get(group)
        if (
            known is not None
            and len(known[0]) == len(parameters)
            and all(map(operator.is_, parameters, known[0]))
            and all(map(operator.is_, memory, known[1]))
        ):
            return known[2], known[3]
        runs, loose = _find(parameters)
        self._known[group] = list(parameters), memory, runs, loose
        return runs, loose


def _find(parameters: Sequence[torch.Tensor]) -> tuple[list[Run], list[torch.Tensor]]:
    chains: list[list[DTensor]] = []
    loose: list[torch.Tensor] = []
    able: list[DTensor] = []
    for parameter in parameters:
        local = _torch.local(parameter)
        if isinstance(parameter, DTensor) and _torch.is_plain(local) and local.numel() and local.is_contiguous():
            able.append(parameter)
        else:
            loose.append(parameter)
    starts = _torch.addresses(map(_torch.local, able))
    for _, parameter in sorted(zip(starts, able, strict=True), key=operator.itemgetter(0)):
        if chains and _follows(chains[-1][-1], parameter):
            chains[-1].append(parameter)
        else:
            chains.append([parameter])
    loose += [chain[0] for chain in chains if len(chain) == 1]
    return [Run(chain) for chain in chains if len(chain) > 1], loose


def _follows(before: DTensor, after: DTensor) -> bool:
    one, two = _torch.local(before), _torch.local(after)
    return (
        before.requires_grad == after.requires_grad
        and one.dtype == two.dtype
        and _torch.storage_identity(one) == _torch.storage_identity(two)
        and one.storage_offset() + one.numel() == two.storage_offset()
    )
