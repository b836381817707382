"""Gradient norm and clipping on local shards: the unsharded value, in one small all-reduce a mesh.

- Ranks exchange a sum of powers; for the orders ``inf`` and ``-inf`` a maximum. A maximum loses NaN on some backends,
  so whether there is one travels along.
- torch's norm is that of the vector of each gradient's norm. For order 0, which counts, this is not that of all
  elements together, so ranks then exchange one number a gradient.
- No DTensor operation is called, which is where torch's own function spends most of its time.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from trueshard import _torch
from trueshard.optim.parts import Cut, Part, Ranks, flat, parts_of, reduce_over, wide

_ROW = 1024
"""Elements of which a CPU takes the norm at once."""
_COPIED = 1 << 20
"""Elements up to which gradients that lie apart are copied behind one another: a CPU's call costs more."""


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
    more meshes), replicated and plain gradients there is. Collective over those meshes: every rank gives the same
    parameters in the same order. As in torch, a parameter that is given twice counts twice.

    Args:
        parameters: parameters whose ``.grad`` is clipped; those without a gradient are skipped.
        max_norm: the largest norm allowed.
        norm_type: order p of the norm; ``inf`` for the largest element, ``-inf`` for the smallest.
        error_if_nonfinite: raise when the norm is NaN or infinite, before any gradient is changed.
        foreach: False: one operation a gradient; otherwise one a dtype.

    Returns:
        The total norm before clipping: a 0-dim tensor in the gradients' (promoted) dtype, the same on every rank.

    Raises:
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite; on every rank.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    given = list(parameters)
    if not given and isinstance(parameters, types.GeneratorType):
        warnings.warn("the generator of parameters is empty (used up?), so no gradient is clipped", stacklevel=3)
    grads = [grad for parameter in given if (grad := parameter.grad) is not None]
    if not grads:
        return torch.tensor(0.0)
    parts = parts_of(grads)
    total = total_norm(parts, float(norm_type), foreach)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(_not_finite(grads, _norms(parts, float(norm_type), foreach, each=True), total, norm_type))
    scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    if scale.device.type == "cpu" and scale.item() == 1.0:  # on an accelerator, looking would wait for it
        return total
    for part in parts:
        factor = scale.to(part.device)
        if foreach is False:
            for grad in part.shards:
                grad.mul_(factor)
        elif part.runs:
            _torch.foreach_mul_(part.runs, factor)
    return total


def _not_finite(grads: Sequence[torch.Tensor], norms: torch.Tensor, total: torch.Tensor, norm_type: float) -> str:
    bad = (~torch.isfinite(norms)).nonzero().flatten().tolist()
    shown = ", ".join(f"number {i} of shape {tuple(grads[i].shape)}" for i in bad[:5]) + (", …" if bad[5:] else "")
    where = f"not finite of {len(grads)} gradients: {shown}" if bad else "the norm of each gradient is finite"
    return (
        f"the total gradient norm of order {norm_type} is {total.item()}, so it cannot be clipped ({where}); skip this "
        "step, or set error_if_nonfinite=False to scale by it anyway"
    )


def total_norm(parts: Sequence[Part], order: float, foreach: bool | None = None) -> torch.Tensor:
    """The norm of all tensors as torch computes it on whole ones, the same on every rank. Collective over the meshes.

    Args:
        parts: of at least one tensor of floating point.
        order: p of the norm.
        foreach: False: one operation a tensor; otherwise one a dtype.

    Returns:
        0-dim, in the promoted dtype of the tensors, on the first one's device.
    """
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts)).to_real()
    return torch.linalg.vector_norm(_norms(parts, order, foreach, each=order == 0), order).to(dtype)


def _norms(parts: Sequence[Part], order: float, foreach: bool | None, *, each: bool) -> torch.Tensor:
    """1-D: the norms of the tensors that are cut alike, or of ``each``, in the order in which they were given."""
    device = parts[0].device
    by_cut: dict[Cut, list[Part]] = {}
    for part in parts:
        by_cut.setdefault(part.cut, []).append(part)
    found = []
    for cut, alike in by_cut.items():
        norms = _joined([_local_norms(part, order, foreach, each).to(device) for part in alike])
        norms = norms if each else torch.linalg.vector_norm(norms, order, keepdim=True)
        found.append(norms if cut is None else _across(norms, cut, order))
    norms = _joined(found)
    if not each or len(parts) == 1:
        return norms
    numbers = [number for alike in by_cut.values() for part in alike for number in part.numbers]
    return norms[torch.tensor(numbers, device=device).argsort()]


def _joined(vectors: list[torch.Tensor]) -> torch.Tensor:
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def _local_norms(part: Part, order: float, foreach: bool | None, each: bool) -> torch.Tensor:
    """Norms of this rank's shards, or of pieces of them; an empty one gets what does not change the norm of all."""
    # bfloat16 and float16 are too coarse to be squared and added over ranks; rounding comes at the end.
    dtype = torch.promote_types(part.dtype, torch.float32)
    separate = each or foreach is False
    shards = part.shards if separate else part.runs
    if not separate and shards and part.device.type == "cpu" and all(map(torch.Tensor.is_contiguous, shards)):
        vectors = [flat(shards)] if sum(map(torch.Tensor.numel, shards)) <= _COPIED else [s.view(-1) for s in shards]
        return _joined([norms for vector in vectors for norms in _by_rows(vector, order, dtype)])
    neutral = torch.full((1,), math.inf if order < 0 else 0.0, dtype=part.dtype, device=part.device)
    shards = [shard if shard.numel() else neutral for shard in shards] or [neutral]
    if foreach is False:
        return torch.stack([torch.linalg.vector_norm(shard, order, dtype=dtype) for shard in shards])
    return torch.stack(_torch.foreach_norm(shards, order, dtype=dtype))


def _by_rows(vector: torch.Tensor, order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norms of ``vector`` in pieces of ``_ROW``: a CPU adds up a long tensor in float32 and loses digits."""
    count = vector.numel() // _ROW * _ROW
    pieces = [vector[:count].view(-1, _ROW), vector[count:].view(1, -1)]
    return [torch.linalg.vector_norm(piece, order, dim=1, dtype=dtype) for piece in pieces if piece.numel()]


def _across(norms: torch.Tensor, cut: Ranks, order: float) -> torch.Tensor:
    """Norms of whole tensors from the ``norms`` of this rank's shards."""
    if not math.isinf(order):
        powers = norms.to(wide(norms.device))
        powers = reduce_over(powers if order == 0 else powers**order, cut, dist.ReduceOp.SUM)
        return powers if order == 0 else powers ** (1.0 / order)
    sign = math.copysign(1.0, order)
    missing = norms.isnan()
    both = torch.stack([(norms * sign).masked_fill(missing, -math.inf), missing.to(norms.dtype)])
    largest, missing = reduce_over(both, cut, dist.ReduceOp.MAX)
    return (largest * sign).masked_fill(missing > 0, math.nan)
