"""How far two tensors are apart, and how far they may be.

- Training on N ranks adds up in another order than on one process. What that does to each tensor is measured: the
  reference runs twice, the second time with its parameters and gradients changed by ``SHAKE`` rounding errors.
- A tensor may be ``FACTOR`` times as far apart as those two runs were, and in any case ``FLOORS`` of its size. Sizes
  are root sums of squares: where an optimizer divides by what is nearly zero, single elements jump by rounding alone,
  and how far the worst one goes is luck; together they are steady, and one wrong row still shows.
- Parameters are held against how far they have moved, not against their size: with a small learning rate an update
  that is wrong altogether is small beside the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

SHAKE = 8.0
"""Rounding errors by which the second run is changed: so many that what jumps at a rounding (an optimizer that computes
in bfloat16) does."""
FACTOR = 4.0
"""How far two runs over other orders of sums are apart, at most, over how far the shaken one is."""
FLOORS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""By the dtype that was computed in: some hundred roundings of float32 (of float64 too, whose loss may be in float32),
one of the short ones."""
ROUNDING_ALONE = 0.7
"""A tensor of which rounding errors change so much is nothing but rounding: it cannot be compared."""


@dataclass(frozen=True)
class Apart:
    """What a comparison found."""

    kind: str
    """``"losses"``, ``"gradient norm"``, ``"gradients"``, ``"parameters"``, ``"buffers"`` or ``"state"``."""
    step: int
    name: str
    largest: float
    """The largest difference of an element."""
    relative: float
    """The root sum of squares of all differences, over that of what it is held against."""
    tolerance: float
    """For ``relative``."""
    words: str = ""
    """What is wrong where it is not a number."""

    @property
    def held(self) -> bool:
        """Whether it is within the tolerance."""
        return not self.words and self.relative <= self.tolerance


def distance(found: torch.Tensor, expected: torch.Tensor, beside: torch.Tensor | None = None) -> tuple[float, float]:
    """The largest difference of an element, and the size of all differences over that of what is expected.

    Args:
        found, expected: of one shape. NaN equals NaN, and infinities of one sign are equal.
        beside: the size is that of ``expected - beside``, and what ``expected``'s own dtype rounds does not count: how
            far a parameter has moved from here. None: the size is that of ``expected``.

    Returns:
        Both 0 where all is equal; infinite where only one is NaN, or something differs that is held against zero.
    """
    if found.shape != expected.shape:
        return math.inf, math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, two = found.to(wide), expected.to(wide)
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return 0.0, 0.0
    apart = torch.where(same, 0.0, (one - two).abs())
    largest = float(apart.max())
    if not math.isfinite(largest):
        return math.inf, math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        return largest, math.inf
    left, size = float(apart.norm()), _size(two if beside is None else two - beside.to(wide))
    if beside is not None and size:
        left = max(0.0, left - 2 * torch.finfo(expected.dtype).eps * _size(two))
    return largest, (left / size if size else math.inf)


def number_distance(found: float, expected: float) -> tuple[float, float]:
    """``distance`` of two numbers."""
    return distance(torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


def _size(tensor: torch.Tensor) -> float:
    sizes = tensor.abs()
    return float(sizes[sizes.isfinite()].norm())


class Tolerances:
    """How far apart tensors may be.

    Args:
        noise: by kind, step and name, how far the two runs of the reference were apart.
        floor: in any case.
        floors: of parameters whose optimizer computes in a short dtype, by name.
    """

    def __init__(
        self, noise: dict[tuple[str, int, str], float], floor: float, floors: Mapping[str, float] | None = None
    ) -> None:
        self._noise, self.floor, self._floors = noise, floor, floors or {}
        self._typical: dict[tuple[str, int], float] = {}
        for kind, step in {key[:2] for key in noise}:
            sizes = sorted(size for key, size in noise.items() if key[:2] == (kind, step))
            self._typical[kind, step] = sizes[len(sizes) // 2]

    def of(self, kind: str, step: int, name: str) -> float:
        """For a tensor: by its own noise, or what is usual among its kind if that is more.

        Of the norm of all gradients, one number that may meet by chance: by what is usual among those.
        """
        usual = self._typical.get(("gradients" if kind == "gradient norm" else kind, step), 0.0)
        own = max((self._noise.get((kind, earlier, name), 0.0) for earlier in range(1, step + 1)), default=0.0)
        floor = max(self.floor, self._floors.get(name, 0.0) if kind == "parameters" else 0.0)
        return max(floor, FACTOR * own, FACTOR * usual)

    def rounding_alone(self, kind: str, step: int) -> list[str]:
        """Names of what cannot be compared."""
        return [name for (k, s, name), size in self._noise.items() if (k, s) == (kind, step) and size > ROUNDING_ALONE]


def floors_of(short: Mapping[int, torch.dtype], parameters: Mapping[int, Sequence[str]]) -> dict[str, float]:
    """For parameters by name, where the optimizer of that number computes in a dtype of 16 bits.

    Whether such a computation (Muon's Newton-Schulz in bfloat16) rounds one way or the other moves an update by a few
    roundings, or not at all: a second run may miss what a third one does.
    """
    return {name: 3 * FLOORS[dtype] for number, dtype in short.items() for name in parameters.get(number, ())}


def floor_of(dtypes: list[torch.dtype]) -> float:
    """For what is computed in ``dtypes``: that of the shortest."""
    return max((FLOORS.get(dtype, 1e-5) for dtype in dtypes), default=1e-5)
