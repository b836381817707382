"""Gradient norm and clipping on local shards: the unsharded value, in one small all-reduce a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from trueshard import _torch


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients in place so that their total norm is at most ``max_norm``.

    The same answer as ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, whatever mixture of sharded (on one or
    more meshes) and plain gradients there is. Collective over those meshes.

    Args:
        parameters: parameters whose ``.grad`` is clipped; those without a gradient are skipped.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm; ``inf`` for the maximum.
        error_if_nonfinite: raise when the norm is NaN or infinite, before any gradient is changed.
        foreach: as in torch.

    Returns:
        The total norm before clipping: a 0-dim tensor, the same on every rank.

    Raises:
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = total_norm(grads, float(norm_type), foreach)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total gradient norm of order {norm_type} is {total.item()}, so it cannot be clipped")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in map(_torch.local, grads):
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), members in by_kind.items():
        if foreach is False:
            for grad in members:
                grad.mul_(scale.to(device))
        else:
            torch._foreach_mul_(members, scale.to(device))
    return total


def total_norm(grads: list[torch.Tensor], norm_type: float, foreach: bool | None = None) -> torch.Tensor:
    """The p-norm of all gradients as one vector, as on the unsharded model: a 0-dim tensor. Collective."""
    if not grads:
        return torch.tensor(0.0)
    device = _torch.local(grads[0]).device
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for grad in grads:
        parts.setdefault(_groups(grad), []).append(_torch.local(grad))
    infinite = math.isinf(norm_type)
    totals = []
    for groups, members in parts.items():
        norms = _norms([grad for grad in members if grad.numel()], norm_type, foreach)
        # An empty shard still takes part in the collective; it adds nothing.
        norm = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type) if norms else None
        value = torch.zeros((), device=device) if norm is None else norm
        if groups:
            value = value if infinite else value.double() ** norm_type
            wide = value.to(torch.float32 if value.device.type == "mps" else torch.float64)
            for group in groups:
                wide = _reduce(wide, group, infinite)
            value = (wide if infinite else wide ** (1.0 / norm_type)).to(torch.float32 if norm is None else norm.dtype)
        totals.append(value)
    return totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), norm_type)


def _norms(grads: list[torch.Tensor], norm_type: float, foreach: bool | None) -> list[torch.Tensor]:
    if foreach is False:
        return [torch.linalg.vector_norm(grad, norm_type) for grad in grads]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    return [norm for members in by_kind.values() for norm in torch._foreach_norm(members, norm_type)]


def _groups(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which ``grad`` is cut into parts (none for a plain or replicated one)."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(grad.placements)
        if isinstance(placement, Shard) and mesh.size(dim) > 1
    )


def _reduce(value: torch.Tensor, group: dist.ProcessGroup, infinite: bool) -> torch.Tensor:
    dist.all_reduce(value, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return value
