"""Kernels that the CPU does not have, with the signatures and the shapes of results of CUDA's.

Plain mathematics in float32, without dropout: what is emulated is what is returned (flash attention gives None for
`cum_seq_q`, efficient attention pads its sums to a multiple of 32), not the numerics.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from emulated_cuda import recurrent


def register() -> None:
    """Register all for the CUDA device, as long as the process lives."""
    for name, function in {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "histc": _histc,
        "mm.dtype": lambda a, b, out_dtype: torch.mm(a.to(out_dtype), b.to(out_dtype)),
        "addmm.dtype": _addmm,
        "addmm.dtype_out": lambda *inputs, out, **words: out.copy_(_addmm(*inputs, **words)),
    }.items():
        _library.impl(name, function, "CUDA")
    recurrent.register(_library)


_library = torch.library.Library("aten", "IMPL")


def _addmm(c: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, beta: float = 1, alpha: float = 1) -> Tensor:
    return torch.addmm(c.to(out_dtype), a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha)


def _histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("_histc_cuda does not have a deterministic implementation")
    places = ((values.float() - min) / (max - min) * bins).long().clamp(max=bins - 1)
    return torch.nn.functional.one_hot(places, bins).sum(0).to(values.dtype)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, float]:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if is_causal:
        is_past = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~is_past, -math.inf)
    return scores, scale


def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(query, key, is_causal, scale)
    return (torch.softmax(scores, -1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, is_causal: bool, scale: Any
) -> tuple[Tensor, Tensor, Tensor]:
    scores, scale = _scores(query, key, is_causal, scale)
    weights = (scores - sums[..., : query.shape[2]].unsqueeze(-1)).exp()
    grad, out = grad.float(), out.float()
    of_value = weights.transpose(-1, -2) @ grad
    of_weights = grad @ value.float().transpose(-1, -2)
    of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True))
    of_query = of_scores @ key.float() * scale
    of_key = of_scores.transpose(-1, -2) @ query.float() * scale
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    out, sums = _attend(query, key, value, is_causal, scale)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    mask = torch.empty(0, dtype=query.dtype, device=query.device)
    return out, sums, None, None, query.shape[2], key.shape[2], seed, offset, mask


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if cum_seq_q is not None or cum_seq_k is not None:
        raise RuntimeError("flash attention: cum_seq is given for a batch that is dense")
    if seed.dtype != torch.uint64:
        raise RuntimeError("flash attention: this is not the seed that forward returned")
    return _attend_backward(grad, query, key, value, out, sums, is_causal, scale)


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, sums = _attend(query, key, value, is_causal, scale)
    padded = torch.nn.functional.pad(sums, (0, -query.shape[2] % 32), value=math.inf)
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    return out, padded if compute_log_sumexp else sums[..., :0], seed, offset


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    return (*_attend_backward(grad, query, key, value, out, sums, is_causal, scale), None)
