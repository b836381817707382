"""The user's hooks on the gradients of parameters.

- A gradient hook means the gradient of the global batch, as on one device. FSDP2 drops hooks, and reduces after
  autograd has called its own; so hooks are called here, on the whole reduced gradient, whatever they do with it. That
  costs one all-gather of the hooked parameter.
- The dictionaries in which torch keeps hooks stay the user's own, so a handle made before sharding still removes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from trueshard import _torch


@torch.no_grad()
def add_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """``parameter.grad += grad``, placed alike, on local shards."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        _torch.local(parameter.grad).add_(_torch.local(grad))


class GradientHooks:
    """The hooks that the user set on one parameter.

    Args:
        original: the parameter on which they are set; its hook dictionaries are taken over.
        gathers: whether the whole gradient is gathered for them. Ranks gather together, so they must agree.
    """

    def __init__(self, original: torch.Tensor, gathers: bool = False) -> None:
        self.before: dict[int, Any] | None = original._backward_hooks
        self.after: dict[int, Any] | None = getattr(original, "_post_accumulate_grad_hooks", None)
        self.gathers = gathers
        self._earlier: torch.Tensor | None = None

    @staticmethod
    def on(tensor: torch.Tensor) -> bool:
        """Whether any hook is set on ``tensor``."""
        return bool(tensor._backward_hooks) or _torch.has_accumulation_hooks(tensor)

    def transform(self, whole: torch.Tensor) -> torch.Tensor:
        """The whole gradient as the hooks of ``register_hook`` leave it."""
        for hook in list((self.before or {}).values()):
            with torch.no_grad():
                answer = hook(whole)
            whole = whole if answer is None else answer
        return whole

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Call the hooks of ``register_post_accumulate_grad_hook``."""
        for hook in list((self.after or {}).values()):
            hook(parameter)

    def set_aside(self, parameter: torch.Tensor) -> None:
        """Called in backward before reduction: hooks see this backward's gradient, not what was accumulated before."""
        if self.gathers and parameter.grad is not None:
            self._earlier, parameter.grad = parameter.grad, None

    def __call__(self, parameter: torch.Tensor) -> None:
        """Called by FSDP2 when it has put the reduced gradient into the sharded ``parameter``."""
        grad = parameter.grad
        if self.gathers and isinstance(grad, DTensor):
            whole = self.transform(grad.full_tensor())
            parameter.grad = distribute_tensor(whole, grad.device_mesh, grad.placements, src_data_rank=None)
        self.put_back(parameter)
        self.accumulated(parameter)

    def put_back(self, parameter: torch.Tensor) -> None:
        """Add this backward's gradient, if there is one, to what was set aside."""
        if self._earlier is not None:
            grad, parameter.grad, self._earlier = parameter.grad, self._earlier, None
            if grad is not None:
                add_gradient(parameter, grad)
