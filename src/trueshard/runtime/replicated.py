"""Parameters that FSDP2 cannot shard, held whole by every rank.

- To the user such a parameter is a DTensor like all others (placed ``Replicate``), so that optimizers, clipping and
  averaging see one kind of tensor. To the forward it is a plain leaf over the same memory, as a gathered one is:
  reading the attribute inside a pass, or a recomputation in backward, gives the leaf.
- Gradients of the leaves are averaged over ranks once a backward, in one collective a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from trueshard import _torch
from trueshard.distributed import all_reduce
from trueshard.model.intent import attributes_of
from trueshard.model.names import Held
from trueshard.runtime.gradients import GradientHooks, add_gradient, call_after_gradient

_KEY = "_trueshard_whole"


class WholeParameter:
    """One replicated parameter, over the memory of the original; the forward sees it in the compute dtype."""

    def __init__(self, original: Held, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
        self.places, self.compute = original.places, compute
        self.original: torch.Tensor | None = None
        """What the user assigned, if that was after ``shard()``."""
        self.hooks = GradientHooks(original.tensor) if GradientHooks.on(original.tensor) else None
        self._attributes = attributes_of(original.tensor)
        self.computing: Callable[[], bool] = lambda: False
        self.used: Callable[[], Any] = lambda: None
        held = self.parameter.detach()  # not the original itself: a copy may have been given memory since
        shown = DTensor.from_local(held, mesh, [Replicate()] * mesh.ndim, run_check=False)
        parameter = nn.Parameter(shown, requires_grad=original.tensor.requires_grad)
        for place in self.places:
            self._put(*place, parameter)
        self._memory: torch.Tensor | None = None
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
                call_after_gradient(self.leaf, self._tell_used)

    def _tell_used(self, _: torch.Tensor) -> None:
        self.used()

    def gathered(self) -> torch.Tensor:
        """Return the plain leaf, in the compute dtype, for the forward."""
        self.refresh()
        cast = self.compute is not None and self.leaf.is_floating_point() and self.leaf.dtype != self.compute
        return self.leaf.to(self.compute) if cast else self.leaf

    def deliver(self, grad: torch.Tensor) -> None:
        """Add the averaged ``grad`` of this backward to the parameter's, through the user's hooks."""
        self.leaf.grad = None
        parameter = self.parameter
        assert isinstance(parameter, DTensor)
        # Those from before sharding, then those set on the parameter since: autograd calls neither.
        every = [hooks for hooks in (self.hooks, GradientHooks(parameter)) if hooks is not None]
        for hooks in every:
            grad = hooks.transform(grad)
        add_gradient(parameter, DTensor.from_local(grad, parameter.device_mesh, parameter.placements, run_check=False))
        for hooks in every:
            hooks.accumulated(parameter)


class HoldsWhole(nn.Module):
    """Mixin for the class of a module that holds a replicated parameter."""

    def __getattr__(self, name: str) -> Any:
        whole = self.__dict__.get(_KEY, {}).get(name)
        if whole is not None and whole.computing():
            return whole.gathered()
        return super().__getattr__(name)


class ReplicatedGradients:
    """Averages the gradients of replicated parameters over ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.parameters: list[WholeParameter] = []
        """In the same order on every rank."""
        self.mesh = mesh

    def forget_removed(self) -> None:
        for whole in self.parameters:
            for module, attribute in list(whole.places):
                if _torch.own_parameters(module).get(attribute) is None:
                    whole.leave(module, attribute)
        self.parameters = [whole for whole in self.parameters if whole.places]

    @torch.no_grad()
    def reduce(self, *, only_hooked: bool = False) -> None:
        """Average at the end of a backward; ``only_hooked``: those with a hook, which means the global gradient."""
        by_device: dict[torch.device, list[WholeParameter]] = {}
        for whole in self.parameters:
            whole.refresh()
            hooked = whole.hooks is not None or GradientHooks.on(whole.parameter)
            if whole.parameter.requires_grad and (hooked or not only_hooked):
                by_device.setdefault(whole.leaf.device, []).append(whole)
        for device, members in by_device.items():
            self._reduce_on(device, members)

    def forget(self, of: Collection[int] | None = None) -> None:
        """Drop gradients that are not reduced yet; ``of``: those of parameters with these ids."""
        for whole in self.parameters:
            if of is None or id(whole.parameter) in of:
                whole.leaf.grad = None

    def has_unreduced(self) -> bool:
        return any(whole.leaf.grad is not None for whole in self.parameters)

    def _reduce_on(self, device: torch.device, members: list[WholeParameter]) -> None:
        # A flag per parameter says whether a rank has a gradient: one that no rank used keeps its gradient None.
        grads = [whole.leaf.grad for whole in members]
        wide = any(whole.leaf.dtype in (torch.float64, torch.complex128) for whole in members)
        dtype = torch.float64 if wide else torch.float32
        used = torch.tensor([float(grad is not None) for grad in grads], dtype=dtype, device=device)
        parts = [
            _real(torch.zeros_like(whole.leaf) if grad is None else grad).reshape(-1).to(dtype)
            for whole, grad in zip(members, grads, strict=True)
        ]
        flat = all_reduce(torch.cat([used, *parts]), self.mesh)
        flags = flat[: len(members)].tolist()
        pieces = flat[len(members) :].div_(self.mesh.size()).split([part.numel() for part in parts])
        for flag, piece, whole in zip(flags, pieces, members, strict=True):
            if flag:
                whole.deliver(_shaped_as(whole.leaf, piece))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, a complex one as its real and imaginary parts."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _shaped_as(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``values``, which are what ``_real`` gave, in the shape and dtype of ``like``."""
    if like.is_complex():
        return torch.view_as_complex(values.reshape(*like.shape, 2)).to(like.dtype, copy=True)
    return values.reshape(like.shape).to(like.dtype, copy=True)
