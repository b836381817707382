"""Gradients after reduction: the user's hooks on parameters, and the parameters that every rank holds whole.

- A gradient hook means the gradient of the global batch, as on one device. FSDP2 drops hooks, and reduces after
  autograd has called its own; so hooks are called here, on the whole reduced gradient, whatever they do with it. That
  costs one all-gather of the hooked parameter.
- The dictionaries in which torch keeps hooks stay the user's own, so a handle made before sharding still removes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from trueshard import _torch


class GradientHooks:
    """The hooks that the user set on one parameter, called when its gradient is reduced.

    Args:
        original: the parameter before sharding; its hook dictionaries are taken over.
    """

    def __init__(self, original: torch.Tensor) -> None:
        self.before: dict[int, Any] | None = original._backward_hooks
        self.after: dict[int, Any] | None = getattr(original, "_post_accumulate_grad_hooks", None)
        self._earlier: torch.Tensor | None = None

    @staticmethod
    def on(tensor: torch.Tensor) -> bool:
        """Whether the user set any hook on ``tensor``."""
        return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))

    def set_aside(self, parameter: torch.Tensor) -> None:
        """Called in backward before reduction: hooks see this backward's gradient, not what was accumulated before."""
        if self.before and parameter.grad is not None:
            self._earlier, parameter.grad = parameter.grad, None

    def __call__(self, parameter: torch.Tensor) -> None:
        """Called when ``parameter.grad`` is reduced."""
        if self.before and parameter.grad is not None:
            parameter.grad = self._hooked(parameter.grad)
        if self._earlier is not None:
            if parameter.grad is None:
                parameter.grad = self._earlier
            else:
                with torch.no_grad():
                    _torch.local(self._earlier).add_(_torch.local(parameter.grad))
                parameter.grad = self._earlier
            self._earlier = None
        for hook in list((self.after or {}).values()):
            hook(parameter)

    def _hooked(self, grad: torch.Tensor) -> torch.Tensor:
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        for hook in list((self.before or {}).values()):
            with torch.no_grad():
                answer = hook(whole)
            whole = whole if answer is None else answer
        if not isinstance(grad, DTensor):
            return whole
        return distribute_tensor(whole, grad.device_mesh, grad.placements, src_data_rank=None)


class ReplicatedGradients:
    """Averages the gradients of parameters that FSDP2 does not shard, once a backward, in one collective a dtype.

    Args:
        parameters: (name, parameter, its hooks if it had any); plain tensors, whole on every rank.
        mesh: the ranks to average over.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor, GradientHooks | None]], mesh: DeviceMesh) -> None:
        self.parameters = list(parameters)
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]

    @torch.no_grad()
    def reduce(self) -> None:
        """Collective over the mesh: every rank calls it at the end of a synchronising backward."""
        trainable = [each for each in self.parameters if each[1].requires_grad]
        by_device: dict[torch.device, list[tuple[str, torch.Tensor, GradientHooks | None]]] = {}
        for each in trainable:
            by_device.setdefault(each[1].device, []).append(each)
        for device, members in by_device.items():
            self._average(device, [parameter for _, parameter, _ in members])
        for _, parameter, hooks in trainable:
            if hooks is not None:
                hooks(parameter)

    def _average(self, device: torch.device, parameters: list[torch.Tensor]) -> None:
        # Whether a rank has a gradient travels along: a parameter that no rank used must keep grad None.
        used = [0.0 if parameter.grad is None else 1.0 for parameter in parameters]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        parts = [torch.tensor(used, dtype=dtype, device=device)]
        for parameter in parameters:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append(grad.reshape(-1).to(dtype))
        flat = torch.cat(parts)
        ranks = 1
        for group in self._groups:
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
                ranks *= group.size()
        flat[len(used) :].div_(ranks)
        offset = len(used)
        for i, parameter in enumerate(parameters):
            piece = flat[offset : offset + parameter.numel()].view(parameter.shape).to(parameter.dtype)
            offset += parameter.numel()
            if flat[i] == 0:
                continue
            if parameter.grad is None:
                parameter.grad = piece.clone()
            else:
                parameter.grad.copy_(piece)
