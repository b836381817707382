"""Find where a sharded run leaves the reference: the first module whose inputs agree and whose output does not.

- Looked at is the step at which the report's first difference is, in runs of their own: hooks see what goes into each
  module and comes out of it, forward and backward, of each microbatch, which are the same on whichever rank.
- The reference leaves these tensors on disk. Then it computes the same in float64 and with parameters a rounding error
  away: how far these take a tensor is what it may be apart (``Tolerances``), module by module.
- A rank compares its own microbatches as they pass, one tensor at a time. Of ranks that share matrices, a tensor that
  is a part of the reference's is passed over.
- An input is handed on as a view of itself: of what several modules read, each has a gradient of its own then.
- What recomputation runs again in backward is not looked at: the graph, and its hooks, are the first pass's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from trueshard import _torch
from trueshard.model.names import named_modules
from trueshard.verification import compare
from trueshard.verification.compare import Comparison, TensorStore, Tolerances

FORWARD = ("input", "output")
BACKWARD = ("output gradient", "input gradient")


@dataclass(frozen=True)
class Place:
    """A tensor that passes a module's border."""

    part: int
    microbatch: int
    module: str
    call: int
    """Calls of the module in that microbatch before this one."""
    side: str  # of ``FORWARD`` or ``BACKWARD``
    index: int
    """Place among the tensors of that side."""

    @property
    def key(self) -> str:
        """Return all but the side, as text."""
        return json.dumps([self.part, self.microbatch, self.module, self.call, self.index])


Passed = list[tuple[Place, Comparison]]
"""Tensors that pass borders, in their order."""
Sink = Callable[[Place, torch.Tensor], None]


class Apart(NamedTuple):
    """A tensor that is further from the reference's than it may be."""

    order: int
    """Number of tensors that its rank has seen before."""
    place: Place
    comparison: Comparison

    @staticmethod
    def of(passed: Passed) -> list[Apart]:
        return [Apart(order, *pair) for order, pair in enumerate(passed) if not pair[1].held]


@dataclass(frozen=True)
class Located:
    """The place at which a sharded run leaves the reference first."""

    module: str
    """Name of the module; "" for the model itself, or for what is no module."""
    where: str
    """``"forward"``, ``"backward"``, ``"loss"``, ``"gradient"`` (summed over ranks and microbatches) or
    ``"optimizer"``."""
    step: int
    rank: int | None
    """Rank that differs first; None: no single one."""
    words: str
    """Description: what agrees, what does not, and what the tolerance follows from."""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        name = self.module or ("the model" if self.where in ("forward", "backward") else "")
        place = ", ".join(filter(None, (name, self.where)))
        return f"First: {place}, step {self.step}{rank}: {self.words}"


class Recorder:
    """Shows ``sink`` the ``content`` of tensors that pass a model's modules, in their order, while ``watching``."""

    def __init__(self, model: nn.Module, sink: Sink, content: Any = _torch.local) -> None:
        self._model, self._sink, self._content = model, sink, content
        self._part = self._microbatch = 0
        self._is_forward = False
        self._unit: torch.Tensor | None = None
        """Gradient of the microbatch's loss: each run scales its loss in a way of its own."""
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Recorder]:
        handles = []
        for name, module in named_modules(self._model):
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            # Registered after those of FSDP2, so that they see what the module is called with, and returns.
            handles += [module.register_forward_pre_hook(before, with_kwargs=True)]
            handles += [module.register_forward_hook(after)]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, part: int, microbatch: int) -> None:
        """Begin a microbatch's forward."""
        self._part, self._microbatch, self._is_forward, self._unit = part, microbatch, True, None
        self._calls.clear()
        self._open.clear()

    def end_forward(self, loss: torch.Tensor | None) -> None:
        """Begin its backward, which starts at ``loss``, before it is scaled; None: gradients stay as they are."""
        self._is_forward = False
        if loss is None:
            self._unit = torch.ones((), dtype=torch.float64)
        else:
            loss.register_hook(self._take_unit)

    def _take_unit(self, gradient: torch.Tensor) -> None:
        self._unit = gradient.detach()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._is_forward:
            return None
        call = self._calls[name]
        self._calls[name] += 1
        self._open.append((name, call))
        indices = iter(range(len(_torch.tensors_in((args, kwargs)))))

        def passed(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            place = Place(self._part, self._microbatch, name, call, "input", next(indices))
            self._see(place, leaf)
            if not (leaf.requires_grad and torch.is_grad_enabled()):
                return leaf
            view = leaf.view_as(leaf)
            self._see_gradient(place, "input gradient", view)
            return view

        return _torch.mapped(passed, tuple(args)), _torch.mapped(passed, dict(kwargs))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_forward or not self._open or self._open[-1][0] != name:
            return
        _, call = self._open.pop()
        for index, tensor in enumerate(_torch.tensors_in(output)):
            place = Place(self._part, self._microbatch, name, call, "output", index)
            self._see(place, tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                self._see_gradient(place, "output gradient", tensor)

    def _see(self, place: Place, tensor: torch.Tensor) -> None:
        self._sink(place, self._content(tensor.detach()))

    def _see_gradient(self, place: Place, side: str, tensor: torch.Tensor) -> None:
        place = replace(place, side=side)

        def see(gradient: torch.Tensor | None) -> None:
            if gradient is not None and self._unit is not None:
                self._see(place, self._content(gradient.detach()).double() / self._unit.double())

        _torch.call_with_gradient(tensor, see)


class Measure:
    """Compares tensors with those on disk, those of other shapes left out; without ``tolerances`` no bit may differ."""

    def __init__(self, store: TensorStore, step: int, tolerances: Tolerances | None = None) -> None:
        self._store, self._step, self._tolerances = store, step, tolerances
        self._names = {side: set(store.names(side, step)) for side in (*FORWARD, *BACKWARD)}
        self.passed: Passed = []
        self.passed_over = 0
        """Tensors of another shape."""

    def __call__(self, place: Place, tensor: torch.Tensor) -> None:
        if place.key not in self._names[place.side]:
            return
        expected, actual = self._store.read(place.side, self._step, place.key), tensor.cpu()
        if expected.shape != actual.shape:
            self.passed_over += 1
            return
        key, tolerances = (place.side, self._step, place.key), self._tolerances
        tolerance = 0.0 if tolerances is None else tolerances.of(*key)
        self.passed.append((place, Comparison(*key, *compare.distance(actual, expected), tolerance)))

    @property
    def noise(self) -> dict[tuple[str, int, str], float]:
        """Distance by side, step and place."""
        return {(one.kind, one.step, one.name): one.relative for _, one in self.passed}


def locate(
    by_rank: Sequence[Sequence[Apart]],
    gradients: Sequence[Comparison],
    step: int,
    source: str,
    passed_over: int = 0,
) -> Located | None:
    """Return where the sharded run leaves the reference first, or None if all that was seen agrees.

    ``gradients``: the summed ones, with the factor between both; ``source``: of the tolerances, in words;
    ``passed_over``: how many tensors were not compared.
    """
    for where, sides in (("forward", FORWARD), ("backward", BACKWARD)):
        firsts = _firsts(by_rank, sides)
        if not firsts:
            continue
        rank, (_, place, first) = firsts[0]
        begins = place.side in ("input", "output gradient")  # what comes to the module is wrong before it does anything
        parent = place.module.rpartition(".")[0]
        size = f"{first.relative:.2g} of the scale" if math.isfinite(first.relative) else "not finite, or not zero"
        size = first.words or size
        others = ", ".join(str(other) for other, _ in firsts[1:])
        more = f"; rank{'s' if len(firsts) > 2 else ''} {others} likewise" if others else ""
        if not begins:
            agrees = "its input agrees" if where == "forward" else "its output's gradient agrees"
            words, module = f"{size}; {agrees}", place.module
        elif place.module:
            what, module = f"the {place.side} of {place.module}", parent
            words = f"{what}: {size}, and all before it agrees: the code of the module itself"
        else:
            what = "the batch" if where == "forward" else "the loss, outside of the model"
            words, module, where = f"{what}: {size}", "", "batch" if where == "forward" else "loss"
        allowed = f"allowed {first.tolerance:.1g}{source}" if first.tolerance else "not a bit may differ"
        return Located(module, where, step, rank, f"{words}{more} ({allowed})")
    worst = max((one for one in gradients if not one.held), key=lambda one: one.excess, default=None)
    if worst is None:
        return None
    parts = f" ({passed_over:,} tensors that are parts were not compared)" if passed_over else ""
    times = f", {worst.factor:.3g} times what it should be" if abs(worst.factor - 1) > worst.tolerance else ""
    words = (
        f"that of {worst.name!r} is {worst.relative:.2g} of the scale apart{times}; what goes through its module "
        f"forward and backward agrees on every rank{parts}: look at hooks on the parameter, and at its sum over ranks"
    )
    return Located(worst.name.rpartition(".")[0], "gradient", step, None, words)


def _firsts(by_rank: Sequence[Sequence[Apart]], sides: Sequence[str]) -> list[tuple[int, Apart]]:
    """Return (rank, what is apart first), for the ranks on which that is the same side of the same module."""
    firsts = [(rank, one) for rank, some in enumerate(by_rank) for one in some if one.place.side in sides]
    _, first = min(firsts, key=lambda pair: pair[1].order, default=(0, None))
    if first is None:
        return []
    if first.place.side == "output gradient":  # the tensor may be what modules around this one return, too
        rank = next(rank for rank, one in firsts if one is first)
        for other, one in firsts:
            inside = not one.place.module or first.place.module.startswith(f"{one.place.module}.")
            if other == rank and one.order == first.order + 1 and one.place.side == first.place.side and inside:
                first = one
    alike: dict[int, Apart] = {}
    for rank, one in firsts:
        if (one.order, one.place.module, one.place.side) == (first.order, first.place.module, first.place.side):
            alike.setdefault(rank, one)
    return list(alike.items())
