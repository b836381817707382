"""What kernels take for themselves on a CPU: attention, convolutions, normalisation, embeddings, copies.

Each rule names the place in ATen (aten/src/ATen/native) that explains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trueshard.planner.simulation.scripts import (
    SMALL,
    Result,
    Rule,
    Script,
    accumulated,
    every,
    size_of,
    summed_apart,
    within,
)


def _blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Queries and keys that flash attention on a CPU takes at once."""
    queries, keys = int(query.shape[-2]), int(key.shape[-2])
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _attention(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Scores, their maxima and sums, and the result of one block of queries, for each thread.

    Source: ``cpu_flash_attention`` of cpu/FlashAttentionKernel.cpp.
    """
    query, key = args[0], args[1]
    (rows, columns), threads = _blocks(query, key), torch.get_num_threads()
    taken = [threads * (rows * columns + 2 * rows + rows * int(query.shape[-1])) * accumulated(query)]
    if query.dtype in SMALL:
        taken.append(threads * rows * columns * query.itemsize)
    return [*every(results), *within(taken, [])]


def _attention_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Scores and their gradients of one block, for each thread; the sums of its rows.

    Source: ``cpu_flash_attention_backward`` of cpu/FlashAttentionKernel.cpp.
    """
    gradient, query, key = args[0], args[1], args[2]
    (rows, columns), threads = _blocks(query, key), torch.get_num_threads()
    taken = [] if gradient.transpose(1, 2).is_contiguous() else [size_of(gradient)]
    taken.append(threads * 2 * rows * columns * accumulated(query))
    if query.dtype in SMALL:
        taken.append(threads * 2 * rows * columns * query.itemsize)
    return [*every(results), *within([*taken, rows * accumulated(query)], [])]


def _layer_norm_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Sums of each thread for weight and bias. Source: ``LayerNormBackwardKernelImplInternal``."""
    weight, wanted = args[5], args[7]
    if not any(wanted[1:]):
        return every(results)
    dtype = args[1].dtype if weight is None else weight.dtype
    return [*every(results), *within([2 * torch.get_num_threads() * math.prod(args[2]) * dtype.itemsize], [])]


def _turned(made: torch.Tensor, source: torch.Tensor) -> list[int]:
    """A large matrix is transposed block by block. Source: ``copy_same_type_transpose_`` of Copy.cpp."""
    valid = source.dim() == 2 and source.dtype == made.dtype and made.numel() >= 60 * 60 and made.shape == source.shape
    side = 120 if made.itemsize == 1 else 60
    if valid and source.stride() == (1, source.shape[0]) and made.is_contiguous():
        return [side * side * made.itemsize]
    return []


def _copy(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    return [*every(results), *within(_turned(args[0], args[1]), [])]


def _clone(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    return [*every(results), *within(_turned(results[0], args[0]), [])]


def _columns(images: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> list[int]:
    """Bytes of the patches under a kernel, side by side. Source: ``compute_columns2d`` of ConvolutionMM2d.cpp."""
    window, places = math.prod(weight.shape[2:]), math.prod(made.shape[2:])
    if window == 1 and places == math.prod(images.shape[2:]):
        return []
    return [int(images.shape[0] * images.shape[1]) * window * places * images.itemsize]


def _is_plain_convolution(weight: torch.Tensor, dilation: Any, transposed: bool, groups: int) -> bool:
    return weight.dim() <= 4 and not transposed and groups == 1 and all(each == 1 for each in dilation)


def _convolution(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Source: ``slow_conv2d_forward_out_cpu`` of ConvolutionMM2d.cpp. oneDNN, where it is on, has ways of its own."""
    if not _is_plain_convolution(args[1], args[5], args[6], args[8]):
        return every(results)
    return within(_columns(args[0], args[1], results[0]), every(results))


def _convolution_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Of the input, the bias, the weight in turn. Source: ``slow_conv2d_backward_cpu`` of ConvolutionMM2d.cpp."""
    gradient, images, weight, wanted = args[0], args[1], args[2], args[10]
    if not _is_plain_convolution(weight, args[6], args[7], args[9]):
        return every(results)
    whole = [] if gradient.is_contiguous() else [size_of(gradient)]
    script: Script = within(whole, [Result(0)]) if wanted[0] else []
    if wanted[2]:
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        script += [Result(len(results) - 1), *summed_apart(gradient, dims, results[-1])]
    if wanted[1]:
        columns = within([*whole, *_columns(images, weight, gradient)], [])
        script += [Result(int(wanted[0])), *columns]
    return script


def _group_norm_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Sums of each sample and channel. Source: ``GroupNormBackwardKernelImplInternal``."""
    size = int(args[1].shape[0]) * int(args[1].shape[1]) * accumulated(args[1])
    return [*every(results), *within([size, size], [])]


def _safe_softmax(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Looks for rows that are masked altogether. Source: ``_safe_softmax`` of transformers/attention.cpp."""
    made = results[0]
    numbers = int(made.numel())
    return [*every(results), *within([numbers, numbers // made.shape[args[1]], made.itemsize], [])]


def _embedding(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Indices that lie apart are gathered first. Source: ``embedding`` of Embedding.cpp."""
    indices = args[1]
    copied = indices.dim() > 1 and not indices.is_contiguous()
    return within([size_of(indices)] if copied else [], every(results))


def _embedding_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Gradients and indices that lie apart are gathered. Source: ``embedding_dense_backward_cpu`` of Embedding.cpp."""
    apart = [size_of(each) for each in (args[1], args[0]) if not each.is_contiguous()]
    return [*every(results), *within(apart, [])]


def _cat(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """What is of another dtype is copied first. Source: ``cat_out_cpu`` of TensorShape.cpp."""
    script = every(results)
    for each in args[0]:
        if each.dtype != results[0].dtype and each.numel():
            script += [size_of(each), -size_of(each)]
    return script


def _chunk_cat(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """What does not divide into chunks is padded first. Source: ``_chunk_cat`` of TensorShape.cpp."""
    tensors, dim, chunks = args[:3]
    out = kwargs.get("out", args[3] if len(args) > 3 else None)
    dtype = (results[0] if out is None else out).dtype
    padded, casts = [], []
    for each in tensors:
        rows = int(each.shape[dim])
        size = size_of(each) // max(1, rows) * math.ceil(rows / chunks) * chunks
        if size and rows % chunks:
            padded.append(size)
        if size and each.dtype != dtype:
            casts += [size, -size]
    return [*padded, *(every(results) if out is None else []), *casts, *(-size for size in padded)]


KERNELS: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "copy": _copy,
    "clone": _clone,
    "addmm": _clone,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_safe_softmax": _safe_softmax,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "cat": _cat,
    "_chunk_cat": _chunk_cat,
    "chunk_cat": _chunk_cat,
}
"""By the operator's name, without the underscore of what works in place."""
