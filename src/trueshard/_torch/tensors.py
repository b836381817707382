"""Plain tensors: which share memory, and which stand in nested containers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

#: What torch itself keeps in a parameter's ``__dict__``: ``nn.Parameter``'s mark, and ``fully_shard``'s (2.13 on).
PARAMETER_ATTRIBUTES = frozenset({"_is_param", "_fsdp_orig_uid"})

#: What knows every registered container of tensors has no public name.
leaves_of = _pytree.tree_leaves
map_only = _pytree.tree_map_only


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers; ``torch.utils._pytree`` is what knows the registered ones."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly if they share memory; addresses do not tell (meta tensors' are all 0)."""
    return int(tensor.untyped_storage()._cdata)
