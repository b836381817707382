"""An exponential moving average of the weights, sharded like them.

- Of trainable parameters alone: what is frozen is its own average, and buffers are the model's own.
- In float32, or float64 for such parameters: in bfloat16, with 8 bits, a step of (1 - 0.999) of a difference is lost.
- An update is three operations, each element rounded by each of them: so its bits do not depend on how tensors are cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.errors import own_errors
from trueshard.model import names


class Average:
    """Keep an average of the weights of a sharded model (or, in a single process, any model)::

        average = trueshard.Average(model, decay=0.999)
        for step in range(1, steps + 1):
            ...
            optimizer.step()
            average.update(step)
        with average.swapped():
            evaluate(model)
        trueshard.save("last", model=model, optimizer=optimizer, average=average)

    ``trueshard.load(…, average=average)`` reads a shard a rank, at any number of ranks.

    Args:
        model: on its device, sharded.
        decay: weight of the average in each update: average = decay × average + (1 - decay) × weights.
        start: step whose weights the average begins with; 0: those before training.
        every: steps between updates.
        evaluate: a `Trainer` evaluates the average in place of the weights.

    Raises:
        ValueError: ``decay`` is not from 0 to below 1, or ``every`` is below 1.
    """

    @own_errors()
    def __init__(
        self, model: nn.Module, *, decay: float = 0.999, start: int = 0, every: int = 1, evaluate: bool = False
    ) -> None:
        if not 0 <= decay < 1 or every < 1:
            raise ValueError(f"decay={decay}, every={every}: decay is from 0 to below 1, every from 1 on")
        self.decay, self.start, self.every, self.evaluate = decay, start, every, evaluate
        self.updates = 0
        """Updates so far; 0: the average has not begun."""
        first: dict[int, tuple[str, torch.Tensor]] = {}  # a tied parameter once, by its first name
        for name, _, _, parameter in names.named_tensors(names.unwrap(model), "parameters"):
            first.setdefault(id(parameter), (name, parameter))
        self._parameters = {name: p for name, p in first.values() if p.requires_grad and p.is_floating_point()}
        self._averages = {name: _zeros_like(p) for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after ``step`` optimizer steps, if it is time. No rank waits for another."""
        if step < self.start or (self.updates and (step - self.start) % self.every):
            return
        for name, average in self._averages.items():
            mean, weights = _torch.local(average), _torch.local(self._parameters[name])
            if self.updates:
                mean.sub_(weights).mul_(self.decay).add_(weights)
            else:
                mean.copy_(weights)
        self.updates += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model have the average inside; nothing happens if that has not begun.

        The weights lie in the average's memory meanwhile; those of a narrower dtype, which would be rounded, in a copy
        of their shards.
        """
        kept: dict[str, torch.Tensor | None] = {}
        try:
            for name in self._averages if self.updates else ():
                kept[name] = self._exchange(name)
            yield
        finally:
            for name, weights in kept.items():
                self._exchange(name, weights)

    @torch.no_grad()
    def _exchange(self, name: str, kept: torch.Tensor | None = None) -> torch.Tensor | None:
        """Exchange a parameter's shard and its average; return what the average has no room for, or put it back."""
        weights, average = _torch.local(self._parameters[name]).detach(), _torch.local(self._averages[name])
        before = weights.clone()
        weights.copy_(average if kept is None else kept)
        if weights.dtype == average.dtype:
            average.copy_(before)
            return None
        return before

    def shards(self) -> Mapping[str, torch.Tensor]:
        """Return the average of each parameter by its name, sharded like it; ``load`` fills them in place."""
        return self._averages

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the averages if there are any."""
        return {"updates": self.updates, "weights": dict(self._averages) if self.updates else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, but for the averages, which ``load`` has read into ``shards``."""
        self.updates = state["updates"]


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros of float32 or wider, sharded like a parameter."""
    local = _torch.local(parameter).detach()
    zeros = torch.zeros_like(local, dtype=torch.promote_types(parameter.dtype, torch.float32))
    if not isinstance(parameter, DTensor):
        return zeros
    return _torch.dtensor_over(zeros, parameter, parameter.shape, parameter.stride())
