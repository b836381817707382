"""Patch torch and transformers while a step is simulated, so that programs run on fake tensors as on real ones.

torch chooses the kernel of attention by fake CPU tensors, and the fused one of a CPU accepts neither dropout nor values
of another width than queries, nor a trained mask: the scores would lie in memory, as they never do on an accelerator.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from trueshard import _torch
from trueshard.machine import garbage_collection_paused

_ALIGNED = 16
"""A mask's rows are a multiple of so many elements. Source: ``pad_bias`` of ATen/native/transformers/attention.cpp."""
_WIDEST = 256
"""Largest head of flash attention. Source: ``check_head_dim_size_flash`` of cuda/sdp_utils.cpp."""


def attention_as_on_a_device() -> AbstractContextManager[Any]:
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
        if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= _WIDEST:
            return torch.ops.aten._scaled_dot_product_flash_attention(  # accepts fewer key heads than query heads
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if (groups := query.shape[-3] // key.shape[-3]) > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_grad = any(tensor is not None and tensor.requires_grad for tensor in (query, key, value, bias))
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]

    return mock.patch.object(functional, "scaled_dot_product_attention", attention)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as numbers to add, with aligned rows, expanded to (batch, heads, queries, keys)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    if (missing := -mask.shape[-1] % _ALIGNED) and mask.shape[-1] == key.shape[-2]:
        mask = functional.pad(mask, (0, missing))[..., : key.shape[-2]]
    return mask.expand(*query.shape[:-1], key.shape[-2])


# What reads values

_ARRAY, _FORMAT, _TENSOR = torch.Tensor.numpy, torch.Tensor.__format__, torch.tensor
_MANY = 4096
"""Elements of the largest tensor that is read one by one."""


@contextlib.contextmanager
def fake_tensors_look_real() -> Iterator[None]:
    """Let transformers take fake tensors for real ones, and let numpy and strings have their values.

    transformers materialises attention masks while it is traced; in training it reads their values, and leaves them out
    where attention is causal and nothing is padded. Labels for a profiler, several at each unit, are left out: they
    take time, and record nothing.
    """
    imported = sys.modules.get("transformers.utils.import_utils")
    patches: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "numpy", _values_as_array),
        (torch.Tensor, "__format__", _value_as_text),
        (torch, "tensor", _tensor_of_values),
        (torch.profiler.record_function, "__enter__", lambda label: label),
        (torch.profiler.record_function, "__exit__", lambda label, *error: None),
    ]
    if hasattr(imported, "is_fake_tensor"):
        patches.append((imported, "is_fake_tensor", lambda tensor: False))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def _values_as_array(tensor: torch.Tensor, **options: Any) -> Any:
    """Return ``tensor.numpy()``; of a fake tensor with its values as ``item`` gives them, zeros if it is large."""
    if not _torch.is_fake(tensor):
        return _ARRAY(tensor, **options)
    with _torch.real_tensors():
        shaped = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.numel() > _MANY:
        tensor.flatten()[0].item()  # to count as a guess
        return _ARRAY(shaped)
    listed = tensor.tolist()
    with _torch.real_tensors():
        return _ARRAY(torch.tensor(listed, dtype=tensor.dtype).reshape(shaped.shape))


def _tensor_of_values(data: Any, **options: Any) -> torch.Tensor:
    """Return ``torch.tensor(data)``, where lists may hold fake tensors: their values are as ``item`` gives them."""
    if isinstance(data, (list, tuple)) and any(map(_torch.is_fake, _torch.tensors_in(data))):
        data = _torch.mapped(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, data)
    return _TENSOR(data, **options)


def _value_as_text(tensor: torch.Tensor, spec: str) -> str:
    """Return ``format(tensor, spec)``; of a fake number with its value as ``item`` gives it."""
    return format(tensor.item(), spec) if _torch.is_fake(tensor) and not tensor.ndim else _FORMAT(tensor, spec)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside, where it would free cycles at arbitrary times.

    What has survived two collections is left alone: it is much, and what a simulation leaves behind is younger.
    """
    gc.collect(1)
    with garbage_collection_paused():
        yield
