"""Keeps what a run goes through, on disk, for others to be held against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from trueshard import _torch
from trueshard.verification import states
from trueshard.verification.job import Tensors
from trueshard.verification.subject import Made


class Steps:
    """Sees nothing of the optimizers' steps."""

    def stepping(self, number: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Recorder(Steps):
    """Keeps every tensor of every step."""

    def __init__(self, store: Tensors) -> None:
        self.store = store
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.short: dict[int, torch.dtype] = {}
        """Of optimizers, by number, the dtype of 16 bits in which they compute what is not stored in it."""

    def begin(self, made: Made) -> None:
        """Keep what the run begins with."""
        self._keep("parameters", 0, states.parameters_of(made.model))
        self._keep("buffers", 0, states.buffers_of(made.model))

    def gradients(self, step: int, made: Made) -> None:
        self._keep("gradients", step, states.gradients_of(made.model))

    @contextlib.contextmanager
    def stepping(self, number: int) -> Iterator[None]:
        with ShortDtypes() as seen:
            yield
        if seen.dtypes:
            self.short[number] = seen.dtypes[0]

    def stepped(self, step: int, made: Made, loss: float, norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self._keep("parameters", step, states.parameters_of(made.model))
        self._keep("buffers", step, states.buffers_of(made.model))
        self._keep("state", step, states.state_of(made.model, made.optimizers))

    def _keep(self, kind: str, step: int, tensors: states.Named) -> None:
        for name, value in states.gathered(tensors):
            tensor = value if isinstance(value, torch.Tensor) else plain_tensor(value)
            if tensor is not None:
                self.store.write(kind, step, name, tensor)


class ShortDtypes(_torch.DispatchMode):
    """Sees in which dtypes of 16 bits something computes that is given wider ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.dtype for each in _torch.tensors_in((args, kwargs)) if each.is_floating_point()}
        made = {each.dtype for each in _torch.tensors_in(result) if each.is_floating_point()}
        self.dtypes += [each for each in made - given if each.itemsize == 2 and given]
        return result


def plain_tensor(value: Any) -> torch.Tensor | None:
    """A number in an optimizer's state as a tensor; None of what is no number."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, (bool, int, float)) else None
