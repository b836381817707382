"""Disturb a recorded run by the rounding that sharding changes: how far that moves a tensor gives its tolerance.

- Parameters begin a rounding error away, and gradients are changed by as much before they are clipped.
- Ranks add up rows of a batch in parts. So a module that holds parameters and no modules computes its rows in two
  halves, and the gradients of its parameters are sums of two parts, each rounded to their dtype. In 16 bits that is no
  single rounding error: on CPUs torch's layer norm rounds after each row that it adds, and where terms cancel, what was
  rounded is far larger than what is left. An error in proportion to the result misses both.
- ``shard(exact=True)`` rounds each microbatch's gradient to a grid of fixed steps, except where it is the only one of a
  step. Where attention looks everywhere alike, gradients of queries and keys are near zero: some thousand steps. That
  rounding is in proportion to the grid, not to the gradient, so it is applied here as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.verification import compare
from trueshard.verification.compare import FLOORS


class Disturbance:
    """Disturbs the run of one model on this process, the same way each time that it has the same seed."""

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self._model, self._random = model, torch.Generator().manual_seed(seed)
        for module in _torch.every_module(model):
            if _may_be_row_wise(module):
                module.forward = functools.partial(_in_halves, module, module.forward)

    def parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            compare.shake(parameter, torch.promote_types(parameter.dtype, torch.float32), self._random)

    @torch.no_grad()
    def gradients(self, parameters: Iterable[tuple[str, torch.Tensor]], computed: Collection[str]) -> None:
        """Change gradients, of parameters by name; ``computed``: dtypes of what modules returned, in words."""
        dtypes = [dtype for dtype in FLOORS if str(dtype).removeprefix("torch.") in computed]
        lowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        errors = compare.SHAKE if lowest.itemsize > 2 else 1.0  # of ranks' sums: more would hide what is wrong
        hooks = sys.modules.get("trueshard.sharding.hooks")  # a recording needs torch alone
        runtime = None if hooks is None else hooks.runtime_of(self._model)
        sums = None if runtime is None else runtime.exact
        for name, parameter in parameters:
            if parameter.grad is None:
                continue
            compare.shake(parameter.grad, lowest, self._random, errors)
            if sums is not None and sums.knows([parameter]):
                part = _torch.local(parameter.grad)
                part.copy_(sys.modules["trueshard.optim.exact"].to_grid(part, sums.quantum(name)))


def _may_be_row_wise(module: nn.Module) -> bool:
    """Return whether a module holds parameters and nothing else, of which a second call could change something."""
    own = any(parameter is not None for parameter in _torch.own_parameters(module).values())
    holds_more = any(True for _ in (*module.children(), *module.buffers(recurse=False)))
    return own and not holds_more and not isinstance(module, torch.jit.ScriptModule)


def _in_halves(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what ``forward`` does of both halves of the rows, or of all, if rows do not count each for itself."""
    result = forward(*args, **kwargs)
    tensors = _torch.tensors_in((args, kwargs))
    count = tensors[0].size(0) if tensors and tensors[0].ndim else 0
    if count < 2 or not (isinstance(result, torch.Tensor) and result.requires_grad and result.size(0) == count):
        return result
    attributes, devices = dict(module.__dict__), [result.device] if result.is_cuda else []
    halves = []
    try:
        with torch.random.fork_rng(devices):
            for rows in (slice(0, count // 2), slice(count // 2, None)):
                part = functools.partial(_rows, count, rows)
                halves.append(forward(*_torch.mapped(part, args), **_torch.mapped(part, kwargs)))
        joined = torch.cat(halves)
    except Exception:  # of the module's own code, which need not know of other numbers of rows
        return result
    finally:
        module.__dict__.update(attributes)
    if joined.shape != result.shape or joined.dtype != result.dtype:
        return result
    apart = compare.distance(joined.detach(), result.detach())[1]
    return joined if apart <= FLOORS.get(result.dtype, 0.0) else result


def _rows(count: int, rows: slice, leaf: Any) -> Any:
    return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.size(0) == count else leaf
