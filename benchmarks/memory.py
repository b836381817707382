"""The memory under this process's tensors."""

from __future__ import annotations

import gc

import torch
from torch.distributed.tensor import DTensor


def held() -> int:
    """Bytes under all tensors that are alive, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        # A DTensor has no memory of its own: its local tensor is found by itself.
        if issubclass(type(each), torch.Tensor) and not isinstance(each, DTensor):
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
