"""Attention as an accelerator computes it, where a CPU would not.

A simulation runs on fake CPU tensors, and torch chooses the kernel by them. The CPU's fused kernel takes neither
dropout nor values of another width than queries, nor a mask that is trained; the scores would then lie in memory, as
they never do on an accelerator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

_ALIGNED = 16
"""Elements of which a mask's rows are a multiple. Source: ``pad_bias`` of ATen/native/transformers/attention.cpp."""
_WIDEST = 256
"""Of a head, in flash attention. Source: ``check_head_dim_size_flash`` of cuda/sdp_utils.cpp."""


@contextlib.contextmanager
def attention_as_on_a_device() -> Iterator[None]:
    """Inside, on fake tensors, ``scaled_dot_product_attention`` takes CUDA's fused kernels where the CPU has none."""
    original = functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        trained = attn_mask is not None and attn_mask.requires_grad
        fused = dropout_p == 0 and query.shape[-1] == value.shape[-1] and not trained
        if fused or query.dim() != 4 or query.dtype == torch.float64:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= _WIDEST:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any) -> torch.Tensor:
    """Takes fewer heads of keys than of queries as they are."""
    dropout, causal, scale = options
    found: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return found


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *options: Any
) -> torch.Tensor:
    """Takes any widths and a mask, and as many heads of keys as of queries."""
    dropout, causal, scale = options
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if mask is not None:
        mask = _bias(mask, query, key)
    trained = any(each is not None and each.requires_grad for each in (query, key, value, mask))
    found: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, trained, dropout, causal, scale=scale
    )[0]
    return found


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as numbers to be added, in rows that are aligned, seen as [batch, heads, queries, keys]."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    if (left := -mask.shape[-1] % _ALIGNED) and mask.shape[-1] == key.shape[-2]:
        mask = functional.pad(mask, (0, left))[..., : key.shape[-2]]
    return mask.expand(*query.shape[:-1], key.shape[-2])
