"""Gradients of the microbatches of a step: added up whole on each rank, or as shards.

``"whole"``: a backward leaves what it computed on the gathered parameters, in the reduce dtype; the last one of a step
reduces the sum. ``"sharded"``: each backward reduces, and the sum is a shard:

- FSDP2 adds to ``.grad``, in the stored dtype. Where gradients are reduced in a wider one (bfloat16 parameters, exact
  sums), that would round each microbatch; so what was reduced is kept here, and added to the last reduction before
  FSDP2 rounds it.
- Of several copies (HSDP), FSDP2 keeps the sum over the ranks of one, in the reduce dtype, and the last backward adds
  up over copies.

Both are flat tensors of all parameters of a unit, so their layout must stay: a unit reduces zeros for what a microbatch
did not use (``Usage``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.options import SHARDED, GradientSums
from trueshard.sharding.gradients import Usage


class Accumulation:
    """Units of one sharded model that add up gradients as shards, and the sums that FSDP2 does not keep."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self.is_on = False
        """True while backwards do not end a step's gradients: the user's setting, not a state."""
        self.word: GradientSums | None = None
        """The user's word for all units, in place of the plan's; None: the plan's."""
        self._planned: set[ShardedModule] = set()
        """Units that add up shards by the plan."""
        self._parameters: dict[ShardedModule, list[nn.Parameter]] = {}
        """Unit → its sharded parameters; without units of which one rank has the whole."""
        self._widens: set[ShardedModule] = set()
        """Units whose reduce dtype holds more than the stored one, and which are no copies."""
        self._sharded: set[ShardedModule] = set()
        """Units that add up shards now."""
        self._kept: dict[ShardedModule, torch.Tensor] = {}
        """Unit → flat sum of what was reduced in this step, in the reduce dtype, where its shards rest."""

    def add(self, unit: ShardedModule, parameters: list[nn.Parameter], word: GradientSums, reduce: torch.dtype) -> None:
        """Take a unit with its sharded parameters, the plan's word and the dtype in which it is reduced."""
        self._parameters[unit] = parameters
        if word == SHARDED:
            self._planned.add(unit)
        stored = {parameter.dtype for parameter in parameters if parameter.requires_grad}
        if not _torch.adds_copies_once(unit) and any(torch.promote_types(reduce, dtype) != dtype for dtype in stored):
            self._widens.add(unit)

    def widens(self, unit: ShardedModule) -> bool:
        """Return True if sums of a unit may have to be kept in its reduce dtype."""
        return unit in self._widens

    def set(self, is_on: bool, hooked: Collection[ShardedModule]) -> None:
        """Set whether backwards add up without ending the step; ``hooked``: units that reduce, and end, in each.

        Called behind torch's own setters, which know one word for all units.
        """
        for unit in self._sharded:
            unit.set_requires_all_reduce(True, recurse=False)
        self.is_on = is_on
        planned = self._planned if self.word is None else set(self._parameters) if self.word == SHARDED else set()
        self._sharded = {unit for unit in planned if unit not in hooked and self._may_reduce(unit)} if is_on else set()
        self.usage.fill(self._sharded)
        for unit in (*hooked, *self._sharded):
            type(unit).set_requires_gradient_sync(unit, True, recurse=False)  # the root's own would come back here
        for unit in self._sharded:
            unit.set_requires_all_reduce(False, recurse=False)

    def _may_reduce(self, unit: ShardedModule) -> bool:
        """Return False if FSDP2 would call a hook of the user's with the gradient that is kept elsewhere."""
        return unit not in self._widens or not any(_torch.gradient_hooks(p)[1] for p in self._parameters[unit])

    # What FSDP2 is told of a unit: ``_torch.Reductions``

    def fills(self, unit: ShardedModule) -> bool:
        return self.usage.fills(unit)

    def reduces(self, unit: ShardedModule, used: list[nn.Parameter]) -> None:
        self.usage.reduces(unit, used)

    def keeps(self, unit: ShardedModule) -> bool:
        return unit in self._sharded and unit in self._widens

    def take(self, unit: ShardedModule, reduced: torch.Tensor) -> bool:
        """Return True if what was ``reduced`` is kept for the step's last reduction; add what is kept, if this is it.

        reduced: (elements,), of all trainable parameters of the unit, in the reduce dtype; on the stream of reductions.
        """
        if self.keeps(unit):
            resting = _torch.local(self._parameters[unit][0]).device
            if unit in self._kept:
                self._kept[unit].add_(reduced.to(resting))
            else:
                self._kept[unit] = reduced.to(resting, copy=True)  # FSDP2 goes on to divide this one in place
            return True
        if (kept := self._kept.pop(unit, None)) is not None:
            reduced.add_(kept.to(reduced.device))
        return False

    # Sums that wait

    def _waiting(self) -> Iterable[tuple[ShardedModule, torch.Tensor]]:
        for unit in self._parameters:
            for waiting in (self._kept.get(unit), _torch.sum_of_copy(unit)):
                if waiting is not None:
                    yield unit, waiting

    def has_waiting(self) -> bool:
        """Return True if a sum waits for the last reduction of a step."""
        return any(True for _ in self._waiting())

    def drop(self, of: Collection[int] | None = None) -> None:
        """Drop sums that wait; ``of``: those of parameters with these ids."""
        for unit, waiting in list(self._waiting()):
            places = _torch.places_in_sum(unit)
            if of is None or all(id(parameter) in of for parameter, _ in places):
                self._kept.pop(unit, None)
                _torch.drop_sum_of_copy(unit)
                continue
            parts = waiting.split([elements for _, elements in places])
            for (parameter, _), part in zip(places, parts, strict=True):
                if id(parameter) in of:
                    part.zero_()
