"""Norms of whole tensors from local shards, the same whatever the ranks: of gradients, to clip them, and of a step.

- Ranks exchange a sum of powers; for the orders ``inf`` and ``-inf`` a maximum. A maximum loses NaN on some backends,
  so whether there is one travels along. One small all-reduce a mesh.
- torch's norm is that of the vector of each gradient's norm. For order 0, which counts, this is not that of all
  elements together, so ranks then exchange one number a gradient.
- No DTensor operation is called, which is where torch's own function spends most of its time.
- What a step did to each parameter is measured, not derived: new values less old ones, whatever the optimizer computed.
  So shards of what may change are copied for the time of the step. Frozen parameters are not. Sums of squares are
  float64 from the first element on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch
from trueshard.distributed import device_of, gather_parts
from trueshard.errors import TrueShardRuntimeError, TrueShardValueError, own_errors, warn_user
from trueshard.model import names
from trueshard.optim import exact
from trueshard.optim.shards import (
    Ranks,
    ShardGroup,
    all_reduce_over,
    concatenate,
    group_shards,
    sharded_over,
    widest_float,
)
from trueshard.optim.ties import check_stages, tie_of

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROW = 1024
"""Elements of which a CPU takes the norm at once."""
_COPIED = 1 << 20
"""Elements up to which gradients that lie apart are copied behind one another: a CPU's call costs more."""


@own_errors()
@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    over: DeviceMesh | None = None,
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
        over: where each rank has the parameters of one stage of a pipeline, the 1-D mesh over the stages: the norm is
            that of the whole model. One more small collective. A parameter of ``tie_over`` counts once.

    Returns:
        The total norm before clipping: a 0-dim tensor in the gradients' (promoted) dtype, the same on every rank.

    Raises:
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite; on every rank.
        TypeError, ValueError: ``over`` is no 1-D mesh.
    """
    if over is not None:
        check_stages("over", over)
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    members = list(parameters)
    if not members and isinstance(parameters, types.GeneratorType):
        warn_user("the generator of parameters is empty (used up?), so no gradient is clipped")
    grads = [grad for parameter in members if (grad := parameter.grad) is not None]
    if not grads and over is None:
        return torch.tensor(0.0)
    groups, order = group_shards(grads), float(norm_type)
    # torch's norm is that of the vector of each gradient's norm, rounded to the gradients' dtype.
    if over is None and 0 < order < math.inf and exact.are_exact(members):
        total = exact.norm(groups, order, sum(grad.numel() for grad in grads)).to(_promoted(groups))
    elif over is None:
        total = _total(groups, order, foreach).to(_promoted(groups))
    else:
        counted = [p.grad for p in members if p.grad is not None and ((tie := tie_of(p)) is None or tie.is_first)]
        total = _over_stages(group_shards(counted), order, foreach, over)
    if error_if_nonfinite and not torch.isfinite(total):
        norms = _norms(groups, order, foreach, one_by_one=True) if groups else total.new_zeros(0)
        raise TrueShardRuntimeError(_not_finite(grads, norms, total, norm_type))
    scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    if scale.device.type == "cpu" and scale.item() == 1.0:  # on an accelerator, looking would wait for it
        return total
    for group in groups:
        _scale(group, scale.to(group.device), foreach)
    return total


def _scale(group: ShardGroup, factor: torch.Tensor, foreach: bool | None) -> None:
    if foreach is False:
        for shard in group.shards:
            shard.mul_(factor)
    elif group.pieces:
        _torch.foreach_mul_(group.pieces, factor)


def _not_finite(grads: Sequence[torch.Tensor], norms: torch.Tensor, total: torch.Tensor, norm_type: float) -> str:
    bad = (~torch.isfinite(norms)).nonzero().flatten().tolist()
    shown = ", ".join(f"number {i} of shape {tuple(grads[i].shape)}" for i in bad[:5]) + (", …" if bad[5:] else "")
    where = f"not finite of {len(grads)} gradients: {shown}" if bad else "the norm of each gradient is finite"
    return (
        f"the total gradient norm of order {norm_type} is {total.item()}, so it cannot be clipped ({where}); skip this "
        "step, or set error_if_nonfinite=False to scale by it anyway"
    )


def _promoted(groups: Sequence[ShardGroup]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (group.dtype for group in groups)).to_real()


def _total(groups: Sequence[ShardGroup], order: float, foreach: bool | None) -> torch.Tensor:
    """Return the norm of all ``groups`` together, not rounded yet. Collective over their meshes."""
    return torch.linalg.vector_norm(_norms(groups, order, foreach, one_by_one=order == 0), order)


def _over_stages(groups: Sequence[ShardGroup], order: float, foreach: bool | None, stages: DeviceMesh) -> torch.Tensor:
    """Return the norm of what all ``stages`` have together, each its own ``groups``. Collective."""
    device = device_of(stages)
    message = torch.zeros(2, dtype=widest_float(device), device=device)  # norm; dtype, 0 where there is no gradient
    if groups:
        message[0] = _total(groups, order, foreach)
        message[1] = 1 + _FLOATS.index(_promoted(groups))
    norms, kinds = gather_parts(message, stages.get_group()).unbind(1)
    dtypes = [_FLOATS[int(kind) - 1] for kind in kinds.tolist() if kind]
    if not dtypes:
        return torch.tensor(0.0)
    norms = norms[kinds > 0]
    total = norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)
    return total.to(functools.reduce(torch.promote_types, dtypes))


def _norms(groups: Sequence[ShardGroup], order: float, foreach: bool | None, *, one_by_one: bool) -> torch.Tensor:
    """Return the norm of all that is sharded over the same ranks, or of each tensor as given: 1-D. Collective."""
    device = groups[0].device
    by_ranks: dict[Ranks | None, list[ShardGroup]] = {}
    for group in groups:
        by_ranks.setdefault(group.ranks, []).append(group)
    results = []
    for ranks, members in by_ranks.items():
        norms = torch.cat([_local_norms(group, order, foreach, one_by_one).to(device) for group in members])
        norms = norms if one_by_one else torch.linalg.vector_norm(norms, order, keepdim=True)
        results.append(norms if ranks is None else _across(ranks, norms, order))
    norms = torch.cat(results)
    if not one_by_one or len(groups) == 1:
        return norms
    indices = [index for members in by_ranks.values() for group in members for index in group.indices]
    return norms[torch.tensor(indices, device=device).argsort()]


def _local_norms(group: ShardGroup, order: float, foreach: bool | None, one_by_one: bool) -> torch.Tensor:
    """Return norms of this rank's shards, or of pieces of them; of an empty one, what does not change the total."""
    # bfloat16 and float16 are too coarse to be squared and added over ranks; rounding comes at the end.
    dtype = torch.promote_types(group.dtype, torch.float32)
    separate = one_by_one or foreach is False
    shards = group.shards if separate else group.pieces
    if not separate and shards and group.device.type == "cpu" and all(map(torch.Tensor.is_contiguous, shards)):
        small = sum(map(torch.Tensor.numel, shards)) <= _COPIED
        vectors = [concatenate(shards)] if small else [shard.view(-1) for shard in shards]
        return torch.cat([norms for vector in vectors for norms in _by_rows(vector, order, dtype)])
    neutral = torch.full((1,), math.inf if order < 0 else 0.0, dtype=group.dtype, device=group.device)
    shards = [shard if shard.numel() else neutral for shard in shards] or [neutral]
    if foreach is False:
        return torch.stack([torch.linalg.vector_norm(shard, order, dtype=dtype) for shard in shards])
    return torch.stack(_torch.foreach_norm(shards, order, dtype=dtype))


def _by_rows(vector: torch.Tensor, order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norms of ``vector`` in pieces of ``_ROW``: a CPU adds up a long tensor in float32 and loses digits."""
    count = vector.numel() // _ROW * _ROW
    pieces = [vector[:count].view(-1, _ROW), vector[count:].view(1, -1)]
    return [torch.linalg.vector_norm(piece, order, dim=1, dtype=dtype) for piece in pieces if piece.numel()]


def _across(ranks: Ranks, norms: torch.Tensor, order: float) -> torch.Tensor:
    """Return norms of whole tensors from the ``norms`` of this rank's shards."""
    if not math.isinf(order):
        powers = norms.to(widest_float(norms.device))
        powers = all_reduce_over(ranks, powers if order == 0 else powers**order, dist.ReduceOp.SUM)
        return powers if order == 0 else powers ** (1.0 / order)
    sign = math.copysign(1.0, order)
    missing = norms.isnan()
    both = torch.stack([(norms * sign).masked_fill(missing, -math.inf), missing.to(norms.dtype)])
    largest, missing = all_reduce_over(ranks, both, dist.ReduceOp.MAX)
    return (largest * sign).masked_fill(missing > 0, math.nan)


# Norms of each parameter, of its gradient, and of what a step did to it


@dataclass(frozen=True)
class Norms:
    """L2 norms of whole tensors, as if nothing were sharded."""

    gradient: float | None
    """Norm of the gradient that the optimizer found; None: there was no gradient."""
    update: float
    """Norm of the difference, new values less old ones; 0.0 for what did not move."""
    parameter: float
    """Norm of the values after the step."""


class MeasuredNorms(Mapping[str, Norms]):
    """Parameter name → ``Norms``, in the model's order; a tied parameter once, under its first name.

    Raises:
        RuntimeError: read before the block has ended, or after it raised.
        KeyError: no parameter has that name, or it is the second name of a tie; the message says which.
    """

    def __init__(self) -> None:
        self._norms: dict[str, Norms] | None = None
        """None until the block has ended."""
        self._ties: dict[str, str] = {}
        self._why = "norms are known when the block of measure_norms() has ended; read them after it"

    def _measured(self) -> dict[str, Norms]:
        if self._norms is None:
            raise TrueShardRuntimeError(self._why)
        return self._norms

    def __getitem__(self, name: str) -> Norms:
        norms = self._measured()
        if name in norms:
            return norms[name]
        if name in self._ties:
            raise KeyError(f"{name!r} is tied to {self._ties[name]!r}; ask for that")
        raise KeyError(f"no parameter is called {name!r}.{names.nearest(name, norms)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._measured())

    def __len__(self) -> int:
        return len(self._measured())

    def __repr__(self) -> str:
        return f"MeasuredNorms({'not known' if self._norms is None else self._norms})"


@contextlib.contextmanager
def measure_norms(model: nn.Module) -> Iterator[MeasuredNorms]:
    """Measure what the step inside does to each parameter::

        with trueshard.measure_norms(model) as norms:
            optimizer.step()
        for name, each in norms.items():
            print(name, each.gradient, each.update / each.parameter)

    The numbers are those of the unsharded model, the same on every rank. Collective over the model's meshes: every rank
    enters and leaves. Holds a copy of this rank's shards of trainable parameters until the block ends.

    Args:
        model: sharded or not.

    Raises:
        ValueError: a parameter is on the meta device, so it has no values.
    """
    measured = MeasuredNorms()
    # Between a forward and its backward the modules hold gathered parameters; optimizers step the sharded ones.
    sharded = {id(gathered): shard for _, shard, gathered in _torch.gathered_parameters(model.modules())}
    named: dict[torch.Tensor, str] = {}
    for name, _, _, held in names.named_tensors(model, "parameters"):
        parameter = sharded.get(id(held), held)
        if parameter.is_meta:
            raise TrueShardValueError(
                f"{name!r} is on the meta device and has no values to measure; load or initialise it"
            )
        if named.setdefault(parameter, name) != name:
            measured._ties[name] = named[parameter]
    gradients = _squares([parameter.grad for parameter in named])
    had = torch.tensor([float(parameter.grad is not None) for parameter in named], dtype=gradients.dtype)
    copies = {
        i: _torch.local(parameter).detach().clone()
        for i, parameter in enumerate(named)
        # torch's optimizers step what has a gradient, trainable or not.
        if parameter.requires_grad or parameter.grad is not None
    }
    try:
        yield measured
    except BaseException:
        copies.clear()
        measured._why = "the block of measure_norms() raised, so nothing was measured"
        raise
    parameters = list(named)
    after = _squares(parameters)
    updates = torch.zeros_like(after)
    for i in list(copies):
        old = copies.pop(i)
        change = old.to(torch.promote_types(old.dtype, torch.float32)).sub_(_torch.local(parameters[i]).detach())
        updates[i] = _squares([change])[0]
    squares = torch.stack([gradients, updates, after, had.to(after.device)])
    by_ranks: dict[Ranks | None, list[int]] = {}
    for i, parameter in enumerate(parameters):
        by_ranks.setdefault(sharded_over(parameter), []).append(i)
    for ranks, members in by_ranks.items():
        if ranks is not None:
            squares[:, members] = all_reduce_over(ranks, squares[:, members], dist.ReduceOp.SUM)
    rows = zip(named.values(), *squares.sqrt().tolist(), strict=True)
    measured._norms = {name: Norms(g if had else None, u, p) for name, g, u, p, had in rows}


@torch.no_grad()
def _squares(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return [len(tensors)]: the sum of squares of this rank's shard of each, on the first one's device; 0 for None."""
    present = [(i, _numbers(_torch.local(tensor))) for i, tensor in enumerate(tensors) if tensor is not None]
    device = present[0][1].device if present else torch.device("cpu")
    squares = torch.zeros(len(tensors), dtype=widest_float(device), device=device)
    for group in group_shards([shard for _, shard in present]):
        norms = torch.stack(_torch.foreach_norm(group.shards, 2.0, dtype=widest_float(group.device)))
        places = torch.tensor([present[index][0] for index in group.indices], device=device)
        squares[places] = norms.to(device, squares.dtype).square()
    return squares


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense floating-point tensor with the norm of ``tensor``: it may be sparse, complex or of integers."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() else tensor.to(widest_float(tensor.device))
