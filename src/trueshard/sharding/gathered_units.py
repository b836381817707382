"""Record of which units of a model are gathered, and whether gathered and sharded values are still the same.

``[Note: Versions]`` FSDP2 believes that parameters change in an optimizer's step alone, between a backward, which frees
them, and a forward, which gathers them anew. Three things break that: a unit may stay gathered over a step (the root
does, after a forward without gradients), the user may write to shards (``load_state_dict``), and to gathered parameters
(an initialiser in a forward). torch counts writes to each tensor, so the counters are compared: before a pass, what was
written to gathered parameters goes to the shards, and units whose shards were written to are freed. A step counts as a
write on every rank: one with no rows of what is trained writes nothing, and would neither free nor gather with others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.optim.rebind import shard_like


class GatheredUnits:
    """``units``: a unit's first module → its sharded parameters, filled when this is made."""

    def __init__(self, units: Mapping[ShardedModule, Sequence[torch.Tensor]]) -> None:
        self._units = units
        self.now = _torch.gathered_units(units)
        """Function that returns the units that are gathered now."""
        self._steps = 0
        """Steps of optimizers that hold parameters of these units."""
        self._before: set[ShardedModule] = set()
        """Units that were gathered when the outermost pass began: they wait for the backward of an earlier pass."""
        self._at_end: list[ShardedModule] = []
        """Units that the last pass with gradients left gathered for its backward."""
        self._versions: dict[ShardedModule, int] = {}
        """Unit → version of its shards when they were gathered."""
        self._gathered_versions: dict[torch.Tensor, int] = {}
        """Gathered parameter → its version at the end of the last pass with gradients."""

    def version(self) -> int:
        """Return a number that grows when any shard is written to."""
        return sum(map(self._version, self._units))

    def _version(self, module: ShardedModule) -> int:
        return self._steps + sum(map(_torch.version, self._units[module]))

    def stepped(self) -> None:
        """Take notice of an optimizer's step."""
        self._steps += 1

    def follow_writes(self) -> None:
        """Bring shards and gathered parameters to one value, before a pass: see [Note: Versions]."""
        gathered = self.now()
        self.follow_trainability()
        self._write_back(gathered)
        for module in gathered:
            if self._versions.get(module) != self._version(module):
                module.reshard()

    def follow_trainability(self) -> None:
        """Give shards the ``requires_grad`` that the user has set on gathered parameters; backward frees these."""
        for _, sharded, gathered in _torch.gathered_parameters(self.now()):
            if gathered.requires_grad != sharded.requires_grad:
                sharded.requires_grad_(gathered.requires_grad)

    def _write_back(self, modules: list[ShardedModule]) -> None:
        """Copy to the shards what was written to gathered parameters since the last pass."""
        for _, sharded, gathered in _torch.gathered_parameters(modules):
            version = _torch.version(gathered)
            if self._gathered_versions.get(gathered, version) != version:
                assert isinstance(sharded, DTensor)
                with torch.no_grad():
                    _torch.local(sharded).copy_(_torch.local(shard_like(gathered, sharded)))

    def begin(self) -> None:
        """Begin an outermost pass."""
        self._before = set(self.now())

    def end(self) -> None:
        """End a pass, nested or not."""
        gathered = self.now()
        for module in gathered:
            self._versions[module] = self._version(module)
        if torch.is_grad_enabled():
            self._at_end = gathered
            for _, _, parameter in _torch.gathered_parameters(gathered):
                self._gathered_versions[parameter] = _torch.version(parameter)

    def free(self, kept: Collection[nn.Module] = ()) -> None:
        """Free the gathered parameters of all units but ``kept``."""
        for module in self._units:
            if module not in kept:
                module.reshard()

    def free_after_pass(self) -> None:
        """Free, after an outermost pass without gradients, all units that were not gathered before it."""
        self.free(self._before)

    def gather_for_backward(self) -> None:
        """Gather again what a pass left gathered, if ``state_dict()`` or the backward of another pass freed it."""
        for module in self._at_end:
            module.unshard()

    def make_buffers(self) -> None:
        """Gather each unit once: buffers that FSDP2 made in inference mode could never be trained with."""
        gathered = self.now()
        with torch.inference_mode(False):
            for module in self._units:
                if module not in gathered:
                    module.unshard()
                    module.reshard()
