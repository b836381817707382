"""What cannot be sharded without changing what it means, refused by name before anything is touched."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from trueshard import _torch, names
from trueshard.intent import Intent, Originals
from trueshard.units import has_forward


def refuse(root: nn.Module, intent: Intent, originals: Originals) -> None:
    """Raise for the first thing in the model that sharding would change.

    Raises:
        ValueError: names the parameter or module, and the remedy.
    """
    if not has_forward(root):
        raise ValueError(
            f"a {type(root).__name__} has no forward, so nothing says when to gather it; put it in a module that calls "
            "it, or shard its members one by one"
        )
    for name, module in names.named_modules(root):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.sparse:
                raise ValueError(f"{name!r} has sparse gradients, which cannot be reduce-scattered; set sparse=False")
            if module.max_norm is not None:
                raise ValueError(
                    f"{name!r} rescales its weight in forward (max_norm), which would be lost with the gathered copy; "
                    "set max_norm=None and rescale after the optimizer's step"
                )
    _refuse_shared_memory(intent, originals)


def _refuse_shared_memory(intent: Intent, originals: Originals) -> None:
    """Two parameters over the same memory are a tie that no one can see: sharding would cut it."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for record, tensor in zip(intent.parameters, originals.parameters, strict=True):
        if type(tensor) is not nn.Parameter or tensor.numel() == 0:
            continue
        extent = 1 + sum(int(n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.itemsize
        span = (start, start + extent * tensor.itemsize, record.name)
        spans.setdefault(_torch.storage_identity(tensor), []).append(span)
    for members in spans.values():
        members.sort()
        for (_, end, one), (start, _, two) in pairwise(members):
            if start < end:
                raise ValueError(
                    f"{one!r} and {two!r} are two parameters over the same memory; sharding would make them "
                    "independent. Assign the same Parameter to both names instead"
                )
