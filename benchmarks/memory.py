"""The memory under this process's tensors."""

from __future__ import annotations

import gc

import torch
from torch.distributed.tensor import DTensor


def held() -> int:
    """Bytes under all tensors that are alive, each once."""
    gc.collect()
    spans: set[tuple[int, int]] = set()
    for item in gc.get_objects():
        # A DTensor has no memory of its own: its local tensor is found by itself.
        if issubclass(type(item), torch.Tensor) and not isinstance(item, DTensor):
            storage = item.untyped_storage()
            spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total = reached = 0
    for begin, end in sorted(spans):  # a storage may be a part of another
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
