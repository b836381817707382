"""Parameters that FSDP2 cannot shard: every rank holds them whole.

- To the user such a parameter is a DTensor like all others (placed ``Replicate``), so that optimizers, clipping and
  averaging see one kind of tensor. To the forward it is a plain leaf over the same memory, as a gathered one is.
- Which of the two an attribute gives depends on who reads it: inside a pass, or a recomputation in backward, the leaf.
- Gradients of the leaves are averaged over ranks once a backward, in one collective a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from trueshard import _torch
from trueshard.distributed import groups_of
from trueshard.gradients import GradientHooks, add_gradient

_KEY = "_trueshard_whole"


class WholeParameter:
    """One parameter that every rank holds whole.

    Args:
        name: its first name.
        places: every (module, attribute) that holds it.
        original: the parameter before sharding; its memory goes on.
        mesh: the ranks.
        compute: dtype in which the forward sees it; None: as stored.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[tuple[nn.Module, str]],
        original: nn.Parameter,
        mesh: DeviceMesh,
        compute: torch.dtype | None,
    ) -> None:
        self.name, self.places, self.compute = name, list(places), compute
        self.hooks = GradientHooks(original) if GradientHooks.on(original) else None
        self.attributes: dict[str, Any] = {}
        self.computing: Callable[[], bool] = lambda: False
        self.used: Callable[[], Any] = lambda: None
        module, attribute = self.places[0]
        held = module._parameters[attribute]  # not the original itself, where a copy was given memory since
        assert held is not None
        shown = DTensor.from_local(held.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        parameter = nn.Parameter(shown, requires_grad=original.requires_grad)
        for module, attribute in self.places:
            module._parameters[attribute] = parameter
            module.__dict__.setdefault(_KEY, {})[attribute] = self
        self._make_leaf()

    @property
    def parameter(self) -> nn.Parameter:
        """What the user sees: a DTensor."""
        module, attribute = self.places[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def _make_leaf(self) -> None:
        self._memory = _torch.local(self.parameter)
        self.leaf = nn.Parameter(self._memory.detach(), requires_grad=False)
        self.leaf.__dict__.update(self.attributes)
        self._follow()

    def _follow(self) -> None:
        """``requires_grad`` as the user set it; torch takes gradient hooks on trainable tensors only."""
        if (trainable := self.parameter.requires_grad) != self.leaf.requires_grad:
            self.leaf.requires_grad_(trainable)
            if trainable and not _torch.has_accumulation_hooks(self.leaf):
                self.leaf.register_post_accumulate_grad_hook(lambda _: self.used())

    def refresh(self) -> None:
        """Follow what was done to the parameter: ``requires_grad_()``, ``to_empty()``, an assigned state dict."""
        if _torch.local(self.parameter) is not self._memory:
            self._make_leaf()
        self._follow()

    def gathered(self) -> torch.Tensor:
        """What the forward sees: the plain leaf, in the compute dtype."""
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
    """Mixed into the class of a module that holds such a parameter."""

    def __getattr__(self, name: str) -> Any:
        whole = self.__dict__.get(_KEY, {}).get(name)
        if whole is not None and whole.computing():
            return whole.gathered()
        return super().__getattr__(name)


class ReplicatedGradients:
    """Averages the gradients of whole parameters over ranks.

    Args:
        parameters: in the model's order, the same on every rank.
        mesh: the ranks to average over.
    """

    def __init__(self, parameters: Sequence[WholeParameter], mesh: DeviceMesh) -> None:
        self.parameters = list(parameters)
        self.mesh = mesh

    @torch.no_grad()
    def reduce(self, *, only_hooked: bool = False) -> None:
        """Collective over the mesh: every rank calls it at the end of a backward.

        Args:
            only_hooked: while gradients accumulate without communication; a hook means the global gradient.
        """
        by_device: dict[torch.device, list[WholeParameter]] = {}
        for whole in self.parameters:
            whole.refresh()
            hooked = whole.hooks is not None or GradientHooks.on(whole.parameter)
            if whole.parameter.requires_grad and (hooked or not only_hooked):
                by_device.setdefault(whole.leaf.device, []).append(whole)
        for device, members in by_device.items():
            for whole, grad in zip(members, self._average(device, members), strict=True):
                if grad is not None:
                    whole.deliver(grad)

    def forget(self) -> None:
        """Drop what a backward that was cut short left."""
        for whole in self.parameters:
            whole.leaf.grad = None

    def _average(self, device: torch.device, members: list[WholeParameter]) -> list[torch.Tensor | None]:
        # Whether a rank has a gradient travels along: a parameter that no rank used must keep its gradient None.
        grads = [whole.leaf.grad for whole in members]
        wide = any(whole.leaf.dtype == torch.float64 for whole in members)
        dtype = torch.float64 if wide else torch.float32
        used = torch.tensor([float(grad is not None) for grad in grads], dtype=dtype, device=device)
        parts = [
            (torch.zeros_like(whole.leaf) if grad is None else grad).reshape(-1).to(dtype)
            for whole, grad in zip(members, grads, strict=True)
        ]
        flat = torch.cat([used, *parts])
        for group in groups_of(self.mesh):
            dist.all_reduce(flat, group=group)
        flags = flat[: len(members)].tolist()
        pieces = flat[len(members) :].div_(self.mesh.size()).split([part.numel() for part in parts])
        return [
            piece.reshape(whole.leaf.shape).to(whole.leaf.dtype, copy=True) if flag else None
            for flag, piece, whole in zip(flags, pieces, members, strict=True)
        ]
