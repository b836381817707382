"""Rows of sharded tensors: what is computed over all of them, and written to some.

DTensor computes with a rank's own rows where it can, and on a gathered copy where it cannot. The first is wrong where
ranks have different numbers of rows, or parts of what is no sum; the second loses what is written to the copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trueshard._torch.operators import Ours, cut_like, gathered, handle, without_handler
from trueshard._torch.patches import Undo, replace, together
from trueshard._torch.tensors import dtensor_from, local, map_only, storage_identity

_aten = torch.ops.aten

_LOSSES = ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
_DISTANCES = [*_LOSSES, *(f"{name}_backward" for name in _LOSSES), "binary_cross_entropy_with_logits"]
_EXTREMES = ["max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "linalg_vector_norm"]
_ADDED = ("sum", "avg")
_SUMS = ["sum", "mean", "mm", "mv", "dot", "bmm", "addmm", "addmv", "cumsum", "var", "std", "nansum"]


def reduce_over_the_whole(ours: Ours, agree: Callable[[DTensor], Any]) -> Undo:
    """Let distances, extremes, norms and truths of sharded tensors be those of the whole, and so their gradients.

    DTensor takes the mean of a distance as the mean of the ranks' means, and divides its gradient by the rank's number
    of elements; asks a rank without rows for its maximum; and adds up what are parts of norms, of extremes or of truths
    as if they were parts of a sum. ``agree`` is called before ranks exchange a truth.
    """

    def is_sharded(value: Any) -> bool:
        return ours(value) and not _is_replicated(value)

    def is_absent(value: Any) -> bool:
        return ours(value) and any(
            isinstance(placement, Shard) and _ranks_with_rows(value.size(placement.dim), ranks) < ranks
            for ranks, placement in zip(value.device_mesh.shape, value.placements, strict=True)
        )

    def is_other_part(value: Any) -> bool:
        # A part of a norm is of a subclass, whose reduce_op says sum: of its powers.
        return ours(value) and any(
            isinstance(placement, Partial) and (type(placement) is not Partial or placement.reduce_op not in _ADDED)
            for placement in value.placements
        )

    def joined(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = without_handler(operator, args, kwargs)
        is_norm = operator is _aten.linalg_vector_norm.default
        if _is_replicated(result) or (is_norm and result.dim() == 0):
            return result  # norms of many tensors are joined before ranks add them up
        if result.dim() == 0:
            agree(result)
        return _replicated(result)

    def over_every_dimension(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value, dims, *others = args
        return without_handler(operator, (value, dims or list(range(value.dim())), *others), kwargs)

    return together(
        # No dimension means all of them to torch, and to DTensor that ranks have nothing to add up.
        handle([_aten.sum.dim_IntList, _aten.mean.dim], over_every_dimension, is_sharded, missing=False),
        handle(_overloads(_SUMS), _on_whole_tensors, is_other_part, missing=False),
        handle(_overloads(["any", "all", "amax", "amin", "linalg_vector_norm"]), joined, is_sharded, missing=False),
        handle(_overloads(_EXTREMES), _on_whole_tensors, is_absent, missing=False),
        handle(_overloads(_DISTANCES), _on_whole_tensors, is_sharded, missing=False),
        handle([_aten.allclose.default], _on_whole_tensors, ours, missing=False),  # DTensor has it of no kind
    )


def _overloads(names: Iterable[str]) -> list[Any]:
    packets = [getattr(_aten, name) for name in names]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [operator for operator in overloads if not operator._schema.is_mutable]


def _is_replicated(value: DTensor) -> bool:
    return all(placement.is_replicate() for placement in value.placements)


def _replicated(value: DTensor) -> DTensor:
    return _same_on_every_rank(gathered(value), value)


def _same_on_every_rank(full: torch.Tensor, like: DTensor) -> DTensor:
    return dtensor_from(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


def _ranks_with_rows(rows: int, ranks: int) -> int:
    """Return how many of ``ranks`` have rows where rows are cut as ``torch.chunk`` cuts."""
    return math.ceil(rows / math.ceil(rows / ranks)) if rows else 0


def _on_whole_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on gathered tensors; a gradient, of the shape of an argument, is cut as that is."""
    first = next(arg for arg in args if isinstance(arg, DTensor))

    def full(value: torch.Tensor) -> torch.Tensor:
        values = gathered(value) if isinstance(value, DTensor) else value
        # DTensor has no rule for what gives no tensor.
        return values if operator is _aten.allclose.default else _same_on_every_rank(values, first)

    full_args, full_kwargs = map_only(torch.Tensor, full, (args, kwargs))
    result = operator(*full_args, **full_kwargs)
    if operator._schema.name.endswith("_backward"):
        return cut_like(local(result), args[1])
    return result


def view_what_is_cut(ours: Ours) -> Undo:
    """Let views across a sharded dimension that DTensor refuses (``p.view(-1)`` of uneven rows) be of a gathered copy.

    As views that it allows are; see ``write_through_views``.
    """

    def viewed(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return without_handler(operator, args, kwargs)
        except RuntimeError:
            return operator(_replicated(args[0]), *args[1:], **kwargs)

    def is_sharded(value: Any) -> bool:
        return ours(value) and not _is_replicated(value)

    operators = [_aten.view.default, _aten._unsafe_view.default, _aten.unbind.int]
    return handle(operators, viewed, is_sharded, missing=False)


def write_through_views(ours: Ours) -> Undo:
    """Let an in-place operator on a view of a sharded tensor (``p[:2].zero_()``) reach its shards.

    Where a view crosses the sharded dimension, DTensor takes it of a gathered copy. Autograd calls it a view of the
    whole all the same, so nothing is refused, and the write is lost with the copy.
    """

    def is_lost(value: Any) -> bool:
        return isinstance(value, DTensor) and _is_copied_view(value) and ours(value._base)

    undo = handle(_in_place_operators(), _write_to_base, is_lost, missing=False)
    inner: Any = vars(DTensor).get("data", torch.Tensor.data)

    def data(self: DTensor) -> torch.Tensor:
        if not is_lost(self):
            return cast(torch.Tensor, inner.__get__(self))
        with torch.no_grad():  # the data of a view has no base, so that a write to it could not be followed
            return self.view_as(self)

    return together(undo, replace(DTensor, "data", property(data, inner.__set__)))


@functools.cache
def _in_place_operators() -> tuple[Any, ...]:
    """Return every operator of torch that writes to its first argument."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    packets = [getattr(_aten, name[6:]) for name in sorted(names) if name.endswith("_") and not name.endswith("__")]
    operators = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return tuple(operator for operator in operators if _writes_to_first(operator._schema))


def _writes_to_first(schema: Any) -> bool:
    alias = schema.arguments[0].alias_info if schema.arguments else None
    return alias is not None and alias.is_write


def _is_copied_view(value: DTensor) -> bool:
    """True if autograd calls ``value`` a view of a DTensor of which it holds a copy."""
    base = value._base
    if not isinstance(base, DTensor) or _is_replicated(base):
        return False
    return storage_identity(local(value)) != storage_identity(local(base))


@torch.no_grad()
def _write_to_base(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an in-place operator on views made anew of whole tensors; then cut those for the shards, and for the views."""
    wholes: dict[int, tuple[DTensor, torch.Tensor]] = {}

    def base_of(value: DTensor) -> DTensor:
        return cast(DTensor, value._base) if _is_copied_view(value) else value

    def viewed(value: DTensor) -> torch.Tensor:
        base = base_of(value)
        _, full = wholes.setdefault(id(base), (base, gathered(base)))
        return full if base is value else cast(torch.Tensor, value._view_func_unsafe(full))

    result = operator(*map_only(DTensor, viewed, args), **map_only(DTensor, viewed, kwargs))
    written = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    for target in (tensor for tensor in written if isinstance(tensor, DTensor)):
        base = base_of(target)
        for tensor, values in ((base, wholes[id(base)][1]), (target, viewed(target))):
            local(tensor).copy_(local(cut_like(values, tensor)))
    return None if result is None else args[0]  # an operator over a list returns none
