"""Patch torch and transformers so that code runs on fake tensors as it would in training on an accelerator.

A simulation runs on fake CPU tensors, and torch chooses attention's kernel by them. The CPU's fused kernel accepts
neither dropout nor values of another width than queries, nor a trained mask; then the scores would lie in memory, as
they never do on an accelerator.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

_ALIGNED = 16
"""A mask's rows are a multiple of so many elements. Source: ``pad_bias`` of ATen/native/transformers/attention.cpp."""
_WIDEST = 256
"""Largest head of flash attention. Source: ``check_head_dim_size_flash`` of cuda/sdp_utils.cpp."""


@contextlib.contextmanager
def attention_as_on_a_device() -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` use CUDA's fused kernels on fake tensors for which the CPU has none."""
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
        found: torch.Tensor
        if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= _WIDEST:
            found = torch.ops.aten._scaled_dot_product_flash_attention(  # accepts fewer key heads than query heads
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return found
        if (groups := query.shape[-3] // key.shape[-3]) > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_grad = any(each is not None and each.requires_grad for each in (query, key, value, bias))
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return found

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as numbers to add, with aligned rows, expanded to (batch, heads, queries, keys)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    if (missing := -mask.shape[-1] % _ALIGNED) and mask.shape[-1] == key.shape[-2]:
        mask = functional.pad(mask, (0, missing))[..., : key.shape[-2]]
    return mask.expand(*query.shape[:-1], key.shape[-2])


@contextlib.contextmanager
def fake_tensors_look_real() -> Iterator[None]:
    """Let transformers take fake tensors for real ones.

    It materialises attention masks while it is traced; in training it reads their values, and leaves them out where
    attention is causal and nothing is padded.
    """
    imported: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(imported, "is_fake_tensor", None)
    if original is None:
        yield
        return
    imported.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        imported.is_fake_tensor = original


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside, where it would free cycles at arbitrary times."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
