"""Collectives inside a forward, with their gradients: the axes of tensor and context compute by them.

``total``: the size over all ranks of the dimension that they share, of which each has its part: by torch.chunk's rule,
or in ``exchange`` by that of ``part_of``, which leaves no rank without.

The backward of each is another of them, so gradients can be differentiated themselves (``create_graph=True``): where a
tensor is the same on every rank, so is its gradient, of whatever order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trueshard.distributed import gather_parts
from trueshard.model.regions import rows_of

Group = dist.ProcessGroup


class LastInput:
    """The tensor that modules of one model were given last in a pass, and what ``sum_gradients`` made of it.

    ``[Note: Graph of a pass]`` The graph of these tensors leads back to the model, through nodes of C++ in which Python
    finds no cycle. So they are let go of where the pass ends: else a pass without a backward keeps the model for ever.
    """

    def __init__(self) -> None:
        self.pair: tuple[torch.Tensor, torch.Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> LastInput:
        return LastInput()

    def forget(self) -> None:
        """Let go of both; called at the end of a pass, and by backward, which may compute a part of a pass again."""
        self.pair = None


def sum_gradients(x: torch.Tensor, group: Group, last: LastInput | None = None) -> torch.Tensor:
    """Return ``x``, the same on every rank; its gradient is the sum of what ranks have.

    ``last``: if several modules are given one tensor in turn (queries, keys and values), it gets their gradients added
    up first, and sums them over ranks once.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if last is None or torch.compiler.is_compiling():
        return _SumGradients.apply(x, group, None)
    if last.pair is None or last.pair[0] is not x:
        last.pair = x, _SumGradients.apply(x, group, last)
    return last.pair[1]


def sum_parts(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of ``x`` over ranks, the same on every rank; each rank's gradient is that of the sum."""
    return _SumParts.apply(x, group) if torch.is_grad_enabled() else _summed(x, group)


def gather(x: torch.Tensor, dim: int, total: int, group: Group, *, sums: bool = False) -> torch.Tensor:
    """Return the parts of all ranks, joined along ``dim``, on every rank.

    ``sums``: ranks compute different things from it, so the gradient of a part is the sum of what they have; else each
    has all of the gradient.
    """
    return _Gather.apply(x, dim, total, group, sums) if torch.is_grad_enabled() else _gathered(x, dim, total, group)


def own_part(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Return this rank's part along ``dim`` of ``x``, the same on every rank; the gradient is gathered."""
    return _Part.apply(x, dim, group, False) if torch.is_grad_enabled() else _own(x, dim, group)


def scatter_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum of ``x`` over ranks."""
    return _Part.apply(x, dim, group, True) if torch.is_grad_enabled() else _scattered(x, dim, group)


def part_of(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (start, length) of a rank's part of ``total``; lengths differ by at most one."""
    start = total * rank // ranks
    return start, total * (rank + 1) // ranks - start


def exchange(x: torch.Tensor, cut: int, join: int, total: int, group: Group) -> torch.Tensor:
    """Return this rank's part along ``cut`` of what ranks hold parts of along ``join``, whole there: an all-to-all.

    Args:
        x: whole along ``cut``, this rank's part along ``join``.
        total: size along ``join`` over all ranks.
    """
    result: torch.Tensor = _Exchange.apply(x, cut, join, total, group)
    return result


def exchange_rows(x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> torch.Tensor:
    """Send ``sent[i]`` rows of ``x``, in order, to each rank i; return those received, ``received[i]`` from each.

    A row's gradient comes back the way that the row went.
    """
    return _ExchangeRows.apply(x, sent, received, group)


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x``, whose gradient is multiplied by ``factor``."""
    return x if factor == 1 else _ScaleGradient.apply(x, factor)


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, last: LastInput | None) -> torch.Tensor:
        ctx.group, ctx.last = group, last
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.last is not None:
            ctx.last.forget()
        return sum_parts(grad, ctx.group), None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return sum_gradients(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, total: int, group: Group, sums: bool) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.sums = dim, group, sums
        return _gathered(x, dim, total, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cut = scatter_sum if ctx.sums else own_part
        return cut(grad, ctx.dim, ctx.group), None, None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group, sums: bool) -> torch.Tensor:
        ctx.dim, ctx.total, ctx.group, ctx.sums = dim, x.shape[dim], group, sums
        return (_scattered if sums else _own)(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return gather(grad, ctx.dim, ctx.total, ctx.group, sums=ctx.sums), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: int, join: int, total: int, group: Group) -> torch.Tensor:
        ctx.cut, ctx.join, ctx.total, ctx.group = cut, join, x.shape[cut], group
        return _exchanged(x, cut, join, total, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return exchange(grad, ctx.join, ctx.cut, ctx.total, ctx.group), None, None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return exchange_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def _summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def _own(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Return this rank's part in memory of its own: of one sample, a view would keep the whole sequence."""
    return x.narrow(dim, *rows_of(x.shape[dim], group.rank(), group.size())).clone(
        memory_format=torch.contiguous_format
    )


def _gathered(x: torch.Tensor, dim: int, total: int, group: Group) -> torch.Tensor:
    """Gather parts, each sent as large as the largest; one copy joins them where they do not lie joined already."""
    dim, ranks = dim % x.ndim, group.size()
    largest = rows_of(total, 0, ranks)[1]
    parts = gather_parts(_extended(x, dim, largest), group)
    if total == largest * ranks:
        return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    sizes = [rows_of(total, rank, ranks)[1] for rank in range(ranks)]
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def _scattered(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Reduce and scatter; what is sent to each rank is of the size of the largest part, as in ``_gathered``."""
    dim, ranks = dim % x.ndim, group.size()
    total, largest = x.shape[dim], rows_of(x.shape[dim], 0, ranks)[1]
    pieces = _extended(x, dim, largest * ranks).unflatten(dim, (ranks, largest)).movedim(dim, 0).contiguous()
    part = pieces.new_empty(pieces.shape[1:])
    dist.reduce_scatter_tensor(part, pieces.flatten(0, 1), group=group)
    return part.narrow(dim, 0, rows_of(total, group.rank(), ranks)[1]).contiguous()


def _extended(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return ``x`` with zeros behind it along ``dim``, up to ``size``."""
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _exchanged(x: torch.Tensor, cut: int, join: int, total: int, group: Group) -> torch.Tensor:
    """Send pieces and join those received: one copy before and one after, where ranks divide both dimensions."""
    rank, ranks = group.rank(), group.size()
    if x.shape[cut] % ranks == 0 == total % ranks:
        pieces = x.unflatten(cut, (ranks, -1)).movedim(cut, 0).contiguous()
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
        del pieces  # before the result is allocated
        return received.movedim(0, join).flatten(join, join + 1).contiguous()
    shape = list(x.shape)
    shape[cut] = part_of(x.shape[cut], rank, ranks)[1]
    shapes = [[*shape[:join], part_of(total, other, ranks)[1], *shape[join + 1 :]] for other in range(ranks)]
    sent = x.split([part_of(x.shape[cut], other, ranks)[1] for other in range(ranks)], cut)
    into, out_of = [math.prod(piece) for piece in shapes], [piece.numel() for piece in sent]
    received = x.new_empty(sum(into))
    dist.all_to_all_single(received, torch.cat([piece.flatten() for piece in sent]), into, out_of, group=group)
    parts = zip(received.split(into), shapes, strict=True)
    return torch.cat([part.view(shape) for part, shape in parts], join)
