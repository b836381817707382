"""Parameters that every rank holds whole: those that FSDP2 cannot shard, and those that a sharded model is given later.

- To the user such a parameter is a DTensor like all others (placed ``Replicate``), so that optimizers, clipping and
  averaging see one kind of tensor. To the forward it is a plain leaf over the same memory, as a gathered one is:
  reading the attribute inside a pass, or a recomputation in backward, gives the leaf.
- Gradients of the leaves are averaged over ranks once a backward, in one collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from trueshard import _torch
from trueshard.distributed import all_reduce, device_of
from trueshard.model import names
from trueshard.model.intent import attributes_of
from trueshard.model.names import Held
from trueshard.sharding.gradients import GradientHooks, add_gradient, call_after_gradient

_KEY = "_trueshard_whole"
"""Attribute of a module that holds its whole parameters by their attributes."""


class WholeParameter:
    """One replicated parameter, over the memory of the original; the forward sees it in the compute dtype.

    ``used``: a bound method, called when a backward reaches the parameter.
    """

    def __init__(self, original: Held, mesh: DeviceMesh, compute: torch.dtype | None, used: Callable[..., Any]) -> None:
        self.places, self.compute, self._used = original.places, compute, used
        self.original: torch.Tensor | None = None
        """Parameter that the user assigned after ``shard()``, who may assign it again, as a tie; else None."""
        self.hooks = GradientHooks(original.tensor) if GradientHooks.on(original.tensor) else None
        self._attributes = attributes_of(original.tensor)
        self.computing: Callable[[], bool] = lambda: False
        """True where reading the attribute is to give the leaf, not the DTensor."""
        held = self.parameter.detach()  # not the original itself: a copy may have been given memory since
        shown = _torch.dtensor_from(held, mesh, [Replicate()] * mesh.ndim)
        parameter = nn.Parameter(shown, requires_grad=original.tensor.requires_grad)
        for place in self.places:
            self._put(*place, parameter)
        self._memory: torch.Tensor | None = None
        """The DTensor's local tensor when the leaf was made over it."""
        self.summed: torch.Tensor | None = None
        """Sum of gradients of backwards that did not reduce, in float64; None without exact sums."""
        self.refresh()

    @property
    def parameter(self) -> nn.Parameter:
        """The DTensor that the user sees."""
        module, attribute = self.places[0]
        parameter = _torch.own_parameters(module)[attribute]
        assert parameter is not None
        return parameter

    def put(self, module: nn.Module, attribute: str) -> None:
        """Give the parameter another place: a tie."""
        self._put(module, attribute, self.parameter)
        self.places.append((module, attribute))

    def _put(self, module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
        _torch.own_parameters(module)[attribute] = parameter
        module.__dict__.setdefault(_KEY, {})[attribute] = self

    def leave(self, module: nn.Module, attribute: str) -> None:
        """Forget a place that something else is assigned to."""
        if (module, attribute) in self.places:
            self.places.remove((module, attribute))
            del module.__dict__[_KEY][attribute]

    def refresh(self) -> None:
        """Follow changes of the parameter: ``requires_grad_()``, ``to_empty()``, an assigned state dict."""
        if (memory := _torch.local(self.parameter)) is not self._memory:
            self._memory = memory
            self.leaf = nn.Parameter(memory.detach(), requires_grad=False)
            self.leaf.__dict__.update(self._attributes)
        # torch takes gradient hooks on trainable tensors only.
        if (trainable := self.parameter.requires_grad) != self.leaf.requires_grad:
            self.leaf.requires_grad_(trainable)
            if trainable and not _torch.gradient_hooks(self.leaf)[1]:
                call_after_gradient(self.leaf, self._used)

    def gathered(self) -> torch.Tensor:
        """Return the plain leaf, in the compute dtype, for the forward."""
        self.refresh()
        cast = self.compute is not None and self.leaf.is_floating_point() and self.leaf.dtype != self.compute
        return self.leaf.to(self.compute) if cast else self.leaf

    @torch.no_grad()
    def sum_apart(self) -> None:
        """Add the leaf's gradient to an exact sum, which float32 would round, after a backward that did not reduce."""
        if self.leaf.grad is not None:
            added = self.leaf.grad.double()
            self.summed = added if self.summed is None else self.summed.add_(added)
            self.leaf.grad = None

    def has_unreduced(self) -> bool:
        return self.leaf.grad is not None or self.summed is not None

    def drop_unreduced(self) -> None:
        self.leaf.grad = self.summed = None

    def deliver(self, grad: torch.Tensor) -> None:
        """Add the averaged ``grad`` of this backward to the parameter's, through the user's hooks."""
        self.drop_unreduced()
        parameter = self.parameter
        assert isinstance(parameter, DTensor)
        # Those from before sharding, then those set on the parameter since: autograd calls neither.
        every = [hooks for hooks in (self.hooks, GradientHooks(parameter)) if hooks is not None]
        for hooks in every:
            grad = hooks.transform(grad)
        add_gradient(parameter, _torch.dtensor_from(grad, parameter.device_mesh, parameter.placements))
        for hooks in every:
            hooks.accumulated(parameter)


class HoldsWhole(nn.Module):
    """Mixin for the class of a module that holds a replicated parameter."""

    def __getattr__(self, name: str) -> Any:
        whole = self.__dict__.get(_KEY, {}).get(name)
        if whole is not None and whole.computing():
            return whole.gathered()
        return super().__getattr__(name)


def release_whole(module: nn.Module) -> None:
    """Make the copy of a module that holds a replicated parameter an ordinary module again."""
    module.__dict__.pop(_KEY, None)
    if isinstance(module, HoldsWhole):
        names.take_out(module)


@torch.no_grad()
def average_gradients(
    parameters: Iterable[WholeParameter],
    mesh: DeviceMesh,
    *,
    only_hooked: bool = False,
    exactly: Callable[[torch.Tensor], Any] | None = None,
) -> None:
    """Average at the end of a backward; ``only_hooked``: those with a hook, which means the global gradient.

    ``exactly``: add up in float64 what was rounded to a grid; the function scales the sum, in place. Collective;
    ``parameters`` are in the same order on every rank.
    """
    members = []
    for whole in parameters:
        whole.refresh()
        hooked = whole.hooks is not None or GradientHooks.on(whole.parameter)
        if whole.parameter.requires_grad and (hooked or not only_hooked):
            members.append(whole)
    if not members:
        return
    for whole in members if exactly is not None else ():
        whole.sum_apart()
    grads = [whole.leaf.grad if exactly is None else whole.summed for whole in members]
    start = torch.float32 if exactly is None else torch.float64
    # Wide enough for all; with one that is complex, all are sent as complex.
    dtype = functools.reduce(torch.promote_types, (whole.leaf.dtype for whole in members), start)
    device = device_of(mesh)
    # A flag per parameter says whether a rank has a gradient: one that no rank used keeps its gradient None.
    used = torch.tensor([float(grad is not None) for grad in grads], dtype=dtype, device=device)
    parts = [
        (torch.zeros_like(whole.leaf) if grad is None else grad).reshape(-1).to(device, dtype)
        for whole, grad in zip(members, grads, strict=True)
    ]
    flat = all_reduce(torch.cat([used, *parts]), mesh)
    flags, summed = flat[: len(members)].tolist(), flat[len(members) :]
    if exactly is None:
        summed.div_(mesh.size())
    else:
        exactly(summed)
    pieces = summed.split([part.numel() for part in parts])
    for flag, piece, whole in zip(flags, pieces, members, strict=True):
        if flag:
            value = piece if whole.leaf.is_complex() else piece.real
            whole.deliver(value.reshape(whole.leaf.shape).to(whole.leaf, copy=True))
