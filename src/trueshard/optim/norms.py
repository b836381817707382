"""Norms of each parameter, of its gradient, and of what a step did to it: numbers that do not depend on the ranks.

- The update is measured, not derived: new values less old ones, whatever the optimizer computed. So shards of what may
  change are copied for the time of the step. Frozen parameters are not.
- Sums of squares are float64 from the first element on, and exchanged in one all-reduce a mesh after the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.optim.shards import Ranks, all_reduce_over, group_shards, sharded_over, widest_float


@dataclass(frozen=True)
class Norms:
    """L2 norms of whole tensors, as if nothing were sharded."""

    gradient: float | None
    """Before the step, as the optimizer found it; None: there was no gradient."""
    update: float
    """Of the new values less the old ones; 0.0 for what did not move."""
    parameter: float
    """After the step."""


class MeasuredNorms(Mapping[str, Norms]):
    """Parameter name → ``Norms``, in the model's order; a tied parameter once, under its first name.

    Raises:
        RuntimeError: read before the block has ended, or after it raised.
        KeyError: no parameter has that name, or it is the second name of a tie; the message says which.
    """

    def __init__(self) -> None:
        self._found: dict[str, Norms] | None = None
        self._ties: dict[str, str] = {}
        self._why = "norms are known when the block of measure_norms() has ended; read them after it"

    def _known(self) -> dict[str, Norms]:
        if self._found is None:
            raise RuntimeError(self._why)
        return self._found

    def __getitem__(self, name: str) -> Norms:
        found = self._known()
        if name in found:
            return found[name]
        if name in self._ties:
            raise KeyError(f"{name!r} is tied to {self._ties[name]!r}; ask for that")
        raise KeyError(f"no parameter is called {name!r}.{names.nearest(name, found)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __repr__(self) -> str:
        return f"MeasuredNorms({'not known' if self._found is None else self._found})"


@contextlib.contextmanager
def measure_norms(model: nn.Module) -> Iterator[MeasuredNorms]:
    """Measure what the step inside does to each parameter::

        with trueshard.measure_norms(model) as norms:
            optimizer.step()
        for name, each in norms.items():
            print(name, each.gradient, each.update / each.parameter)

    The numbers are those of the unsharded model, the same on every rank. Collective over the model's meshes: every rank
    enters and leaves. Holds a copy of this rank's shards of trainable parameters until the block ends.

    Args:
        model: sharded or not.

    Raises:
        ValueError: a parameter is on the meta device, so it has no values.
    """
    measured = MeasuredNorms()
    before = _Before(model, measured._ties)
    try:
        yield measured
    except BaseException:
        before.copies.clear()
        measured._why = "the block of measure_norms() raised, so nothing was measured"
        raise
    measured._found = before.measure()


class _Before:
    """What is known before the step; second names of ties go to ``ties``."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, ties: dict[str, str]) -> None:
        # Between a forward and its backward the modules hold gathered parameters; optimizers step the sharded ones.
        sharded = {id(gathered): shard for _, shard, gathered in _torch.gathered_parameters(model.modules())}
        first: dict[torch.Tensor, str] = {}
        for name, _, _, held in names.named_tensors(model, "parameters"):
            parameter = sharded.get(id(held), held)
            if parameter.is_meta:
                raise ValueError(f"{name!r} is on the meta device and has no values to measure; load or initialise it")
            if first.setdefault(parameter, name) != name:
                ties[name] = first[parameter]
        self.names, self.parameters = list(first.values()), list(first)
        self.gradients = _squares([parameter.grad for parameter in self.parameters])
        had = [float(parameter.grad is not None) for parameter in self.parameters]
        self.had = torch.tensor(had, dtype=self.gradients.dtype)
        self.copies = {
            i: _torch.local(parameter).clone()
            for i, parameter in enumerate(self.parameters)
            # torch's optimizers step what has a gradient, trainable or not.
            if parameter.requires_grad or parameter.grad is not None
        }

    @torch.no_grad()
    def measure(self) -> dict[str, Norms]:
        """Return the norms by name. Collective."""
        parameters = _squares(self.parameters)
        updates = torch.zeros_like(parameters)
        for i in list(self.copies):
            old = self.copies.pop(i)
            change = old.to(torch.promote_types(old.dtype, torch.float32)).sub_(_torch.local(self.parameters[i]))
            updates[i] = _squares([change])[0]
        squares = torch.stack([self.gradients, updates, parameters, self.had.to(parameters.device)])
        alike: dict[Ranks | None, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            alike.setdefault(sharded_over(parameter), []).append(i)
        for ranks, members in alike.items():
            if ranks is not None:
                squares[:, members] = all_reduce_over(ranks, squares[:, members], dist.ReduceOp.SUM)
        found = zip(self.names, *squares.sqrt().tolist(), strict=True)
        return {name: Norms(g if had else None, u, p) for name, g, u, p, had in found}


def _squares(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return [len(tensors)]: the sum of squares of this rank's shard of each, on the first one's device; 0 for None."""
    present = [(i, _numbers(_torch.local(tensor))) for i, tensor in enumerate(tensors) if tensor is not None]
    device = present[0][1].device if present else torch.device("cpu")
    squares = torch.zeros(len(tensors), dtype=widest_float(device), device=device)
    for group in group_shards([shard for _, shard in present]):
        norms = torch.stack(_torch.foreach_norm(group.shards, 2.0, dtype=widest_float(group.device)))
        places = torch.tensor([present[index][0] for index in group.indices], device=device)
        squares[places] = norms.to(device, squares.dtype).square()
    return squares


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense floating-point tensor with the norm of ``tensor``: it may be sparse, complex or of integers."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() else tensor.to(widest_float(tensor.device))
