"""Paths of a step: the operators that it runs, to tell if they are the same on tensors of another shape.

Many factorise, normalise or quantize from some size on, and the user's own tensors are too large to be stepped when an
optimizer is tried. So the steps of a stand-in are noted, operator by operator, and taken again with fake tensors of the
user's shape, which have no memory; numbers that are read from tensors are those of the stand-in. As long as both run
the same operators, what was found of the stand-in holds for the user's shape.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from trueshard import _torch

_READS = [torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.allclose.default]
"""Operators whose result is a number, which fake tensors have not."""


class Parted(BaseException):
    """A step with another shape runs another operator; no optimizer that catches errors shall catch it."""


class Path(_torch.DispatchMode):
    """Inside, note the operators that run; or, made by ``follow``, raise ``Parted`` where others run."""

    def __init__(self, first: Path | None = None) -> None:
        super().__init__()
        self.first = first
        self._operators: list[Any] = []
        self._answers: list[Any] = []
        self.numbers: list[Any] = []
        """Numbers that operators were given, other than sizes: rates and such."""

    def follow(self) -> Path:
        """Return a path that must run the operators of this one; it may end earlier."""
        return Path(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch.device_asked(func, args) is not None:
            return func(*args, **kwargs)
        kept, numbers = _arguments(func)
        operator = (func, *(str(args[i]) for i in kept if i < len(args)))
        number = len(self._operators)
        if self.first is not None and self.first._operators[number : number + 1] != [operator]:
            raise Parted
        self._operators.append(operator)
        given = [*(args[i] for i in numbers if i < len(args)), *kwargs.values()]
        self.numbers += [value for value in given if isinstance(value, (int, float))]
        if self.first is not None and func in _READS:
            answer = self.first._answers[len(self._answers)]
        else:
            answer = func(*args, **kwargs)
        if func in _READS:
            self._answers.append(answer)
        return answer


@functools.cache
def _arguments(func: Any) -> tuple[list[int], list[int]]:
    """Return the positions of an operator's dimensions, and of its numbers that are no sizes."""
    arguments = list(enumerate(_torch.schema_of(func).arguments))
    dims = [i for i, argument in arguments if argument.name.startswith(("dim", "keepdim"))]
    return dims, [i for i, argument in arguments if "nt" not in str(argument.type).replace("Opt", "")]
