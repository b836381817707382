"""What the Trainer asks of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

Batch = Any
"""A microbatch: tensors in mappings, lists and tuples."""


@runtime_checkable
class Loss(Protocol):
    """A loss that says what it is a mean over.

    It may also have ``unit``, what one term is ("token" if it is left out: then an evaluation has a perplexity), and
    ``tokens(batch)``, how many tokens the model reads of a microbatch (left out: the terms), for tokens a second.
    """

    def count(self, batch: Batch) -> int:
        """How many terms the sum over a microbatch has: its target tokens."""

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The sum of the terms of a microbatch: 0-dim, float32 or wider."""


class Mean:
    """A function (model, batch) → mean loss: every microbatch of every rank has the same weight."""

    unit = "microbatch"

    def __init__(self, function: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
        self._function = function

    def count(self, batch: Batch) -> int:
        """One, whatever is in it."""
        return 1

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._function(model, batch)
