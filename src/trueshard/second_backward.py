"""Double backward: the graph of a first backward holds gathered parameters, which FSDP2 would free under it.

With ``create_graph=True`` they stay until the backward that follows has ended, whatever the reshard policy is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trueshard import _torch
from trueshard._torch import ShardedModule


class SecondBackward:
    """Keeps parameters gathered from a backward with ``create_graph=True`` to the end of the next.

    Args:
        root: the sharded model.
        free: frees what is gathered.
    """

    def __init__(self, root: ShardedModule, free: Callable[[], None]) -> None:
        self._root, self._free = root, free
        self._handles: list[Any] = []
        """Of the hooks that notice the second backward; empty outside a double backward."""
        self._ending = False

    def keep(self) -> None:
        """``create_graph=True``: the graph of this backward holds gathered parameters, so they stay until the next."""
        if self._handles:
            return
        self._root.set_reshard_after_backward(False)
        for _, _, gathered in _torch.gathered_parameters(self._root):
            if gathered.requires_grad:
                self._handles.append(gathered.register_post_accumulate_grad_hook(self._accumulated))

    def _accumulated(self, _: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) leaves gradients that have a graph themselves, and ranks cannot average "
                "those: use torch.autograd.grad(outputs, inputs, create_graph=True), then backward() on what follows"
            )
        if not self._ending:
            self._ending = True
            _torch.at_end_of_backward(self.free)

    def free(self) -> None:
        """The double backward is over, or was given up."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._handles, self._ending = [], False
            self._root.set_reshard_after_backward(True)
            self._free()
