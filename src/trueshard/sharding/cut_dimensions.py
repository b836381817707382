"""Choose along which dimension FSDP2 cuts each parameter.

FSDP2 cuts rows (dimension 0), and pads them to a multiple of the ranks: 16 experts over 64 ranks become 64 rows, in
memory, in optimizer state and in each gather. It can cut another dimension, if the ranks divide it. That pads nothing,
but costs a copy of the parameter in each gather and each reduction, since ranks then hold no whole rows.

So a parameter is cut along the first dimension that divides where its rows would be padded by ``WORTH`` of its bytes.
That follows from shapes and numbers of ranks alone: it is the same on every rank, and chosen anew for other ranks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.model.names import Held, Index
from trueshard.parallel.tensor import by_name, placement_of
from trueshard.plans import Plan

WORTH = 1 / 8
"""Part of a parameter's bytes that padding must be to be avoided. A copy reads and writes all of them. Memory is 7
times as fast as links in a node, 67 times as those between nodes (H100): a copy costs as much as sending 30% or 3%."""
LEAST = 512
"""Bytes of padding on all ranks together that are worth a copy: the smallest block of torch's allocator."""


def with_cut_dimensions(index: Index, plan: Plan) -> Plan:
    """Return a plan, whose axes are resolved, with ``cut_dimensions`` and ``padding`` for its ranks."""
    styles = by_name(index, plan, plan.styles) if plan.tensor > 1 else {}
    apart = set(plan.modules_apart)
    replicated = {parameter.name for parameter in plan.replicated}
    dimensions: dict[str, int] = {}
    padding = 0
    for held in index.parameters:
        if held.name in replicated:
            continue
        ranks, shape, shared = plan.ranks[-1], list(held.tensor.shape), None
        if held.name.rpartition(".")[0] in apart:
            ranks = ranks * plan.tensor // plan.experts  # those that have the same experts
            shape[0], shared = shape[0] // plan.experts, 0
        elif plan.tensor > 1 and (shared := _shared_dimension(held, styles)) is not None:
            shape[shared] = -(-shape[shared] // plan.tensor)
        dim, padded = _cut_dimension(held.tensor, shape, shared, ranks)
        padding += padded
        if dim:
            dimensions[held.name] = dim
    return dataclasses.replace(plan, cut_dimensions=dimensions, padding=padding)


def _shared_dimension(held: Held, styles: dict[str, str]) -> int | None:
    """Return the dimension of which ranks of the tensor axis have a part each; None: they have all of the parameter."""
    tensor = held.tensor
    placement: Any = tensor.placements[0] if isinstance(tensor, DTensor) else placement_of(held, 0, styles)
    return None if placement.is_replicate() else int(placement.dim) % tensor.ndim


def _cut_dimension(parameter: torch.Tensor, shape: list[int], shared: int | None, ranks: int) -> tuple[int, int]:
    """Return the dimension, and the bytes of padding on all ranks that remain.

    ``shape``: of what ``ranks`` have together; ``shared``: the dimension of which others have the rest.
    """
    row = math.prod(shape[1:]) * parameter.itemsize
    padding = -shape[0] % ranks * row
    if padding < max(LEAST, WORTH * shape[0] * row) or hasattr(_torch.local(parameter), "fsdp_pre_all_gather"):
        return 0, padding  # what gathers in a way of its own (float8) is made for rows
    even = (dim for dim in range(1, len(shape)) if dim != shared and shape[dim] % ranks == 0)
    dim = next(even, 0)
    return dim, 0 if dim else padding
