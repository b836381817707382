"""Reductions of gradients by FSDP2's units: which units, what is beside them, and what waits unreduced.

A gradient lies on a gathered parameter until its unit reduces it in ``post_backward``; then a shard is in ``.grad``. Of
copies (HSDP), a flat sum may wait in between. FSDP2 shows setters for when, and nothing of what lies where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor

from trueshard._torch.fsdp import ShardedModule, _groups, _parameters_below


class Reductions(Protocol):
    """Answers to ``follow_accumulation``, which asks of each unit when that is about to reduce its gradients."""

    def fills(self, unit: ShardedModule) -> bool:
        """Return True if the unit reduces zeros for parameters that this rank has no gradient of."""

    def reduces(self, unit: ShardedModule, used: list[nn.Parameter]) -> None:
        """Take note of the sharded parameters that this rank has a gradient of, of a unit that fills."""

    def keeps(self, unit: ShardedModule) -> bool:
        """Return True if what is reduced now is kept elsewhere, and is not to appear in ``.grad``."""


def follow_accumulation(units: Iterable[ShardedModule], reductions: Reductions) -> None:
    """Let a unit accumulate and reduce whichever of its parameters the microbatches used, in any dtype.

    A backward that does not reduce leaves gradients in the reduce dtype. There, torch also asks a unit that was never
    gathered. And it refuses what the last microbatch uses first: that gradient has the compute dtype.

    Gradients that are parts of a sum over another axis (``Partial``) torch would add up in the compute dtype. In the
    reduce dtype, as those of microbatches, they are added up in it.
    """
    for unit in units:
        for group in _groups(unit):
            group.post_backward = functools.partial(_post_backward, group, unit, reductions, group.post_backward)


def _post_backward(
    group: Any, unit: ShardedModule, reductions: Reductions, post_backward: Callable[..., None], *unused: Any
) -> None:
    parameters = [parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]
    if not parameters or not group.reduce_grads:
        if parameters:
            post_backward(*unused)
        return
    waiting = [p for p in parameters if getattr(p, "unsharded_accumulated_grad", None) is None]
    if reductions.fills(unit):
        without = {p for p in waiting if p._unsharded_param.grad is None}
        reductions.reduces(unit, [p.sharded_param for p in parameters if p not in without])
        for gathered in (p._unsharded_param for p in parameters if p in without):
            if gathered.requires_grad:
                gathered.grad = torch.zeros_like(gathered)
    if len(waiting) < len(parameters) or any(map(_is_part_of_sum, waiting)):
        for parameter in waiting:
            parameter.to_accumulated_grad_if_needed()
    if not reductions.keeps(unit):
        post_backward(*unused)
        return
    earlier = [(parameter.sharded_param, parameter.sharded_param.grad) for parameter in parameters]
    for sharded, _ in earlier:
        sharded.grad = None
    post_backward(*unused)
    for sharded, grad in earlier:
        sharded.grad = grad


def reduce_at_end(module: ShardedModule) -> None:
    """Let a unit reduce and free its parameters at the end of backward, not when its own forward has been undone.

    FSDP2 frees and reduces behind each backward of the unit's forward. What else reads a parameter (an operation before
    that forward) comes later: it would read freed memory, and its gradient would stay unreduced.
    """
    for group in _groups(module):
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)


def _is_part_of_sum(parameter: Any) -> bool:
    grad = parameter._unsharded_param.grad
    return isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements)


def adds_copies_once(unit: ShardedModule) -> bool:
    """True if several copies of a unit add up their gradients (HSDP), and ``set_requires_all_reduce`` can defer it.

    Until then FSDP2 keeps the sum of each copy, in the reduce dtype, beside the parameters.
    """
    return any(isinstance(group.mesh_info, HSDPMeshInfo) for group in _groups(unit))


def sum_of_copy(unit: ShardedModule) -> torch.Tensor | None:
    """Return the flat sum of a copy's gradients that waits for ``set_requires_all_reduce(True)``, if any."""
    sums = (group._partial_reduce_output for group in _groups(unit))
    return next((kept for kept in sums if kept is not None), None)


def drop_sum_of_copy(unit: ShardedModule) -> None:
    """Drop what ``sum_of_copy`` returns."""
    for group in _groups(unit):
        group._partial_reduce_output = None


def places_in_sum(unit: ShardedModule) -> list[tuple[nn.Parameter, int]]:
    """Return (sharded parameter, elements) of what FSDP2 reduces together, in its order, padding included."""
    return [
        (parameter.sharded_param, parameter.padded_sharded_param_size.numel())
        for group in _groups(unit)
        for parameter in group.fsdp_params
        if parameter.sharded_param.requires_grad
    ]


def drop_unreduced(root: nn.Module, of: Collection[int] | None = None) -> None:
    """Drop gradients that lie on gathered parameters; ``of``: those of sharded parameters with these ids.

    A backward that was cut short leaves them there, and the next one would add to them.
    """
    for parameter in _parameters_below(root):
        if of is None or id(parameter.sharded_param) in of:
            if "unsharded_accumulated_grad" in parameter.__dict__:  # from 2.15 on they are in ``.grad`` alone
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def has_unreduced(root: nn.Module) -> bool:
    """True if a gradient lies on a gathered parameter."""
    return any(
        getattr(parameter, "unsharded_accumulated_grad", None) is not None
        or (hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None)
        for parameter in _parameters_below(root)
    )
