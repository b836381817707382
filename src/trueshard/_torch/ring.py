"""Ring attention of torch: keys and values go round, each rank keeps its queries.

torch offers it as ``context_parallel``, which replaces attention for the whole process and shards buffers by itself;
its parts, which take one call of attention, are private. They are the only ones that merge blocks by their logarithmic
sums and send gradients back round the ring.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_SEQUENCE = 2


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    scale: float | None = None,
    *,
    balanced: bool = False,
) -> torch.Tensor:
    """Return causal attention of the queries here over all positions of a sequence, in the shape of ``query``.

    Args:
        query: [batch, heads, positions here, head size]; each rank has as many, rank 0 the first; ``balanced``: rank r
            of n has the parts r and 2·n - 1 - r of 2·n.
        key: likewise, with as many heads, as is ``value``.
        value: likewise.
        group: ranks that share the sequence; all of them call it, and go through its backward.
        scale: of the scores; None: one over the root of the head size.
        balanced: as torch's own ``context_parallel`` does: ranks compute equally much, and keys and values are gathered
            at once.

    Raises:
        ValueError: torch has no ring for this device.
    """
    made: torch.Tensor = _Ring.apply(query, key, value, group, scale, balanced)
    return made


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, group: dist.ProcessGroup, scale: float | None, balanced: bool
    ) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        kernels = _kernels(query)
        with _options(query.dtype, balanced):
            out, sums, *rest = _attention._templated_ring_attention(
                group,
                _SEQUENCE,
                kernels.forward,
                query,
                key,
                value,
                is_causal=True,
                scale=scale,
                **kernels.arguments,
            )
        ctx.save_for_backward(
            query, key, value, out, sums, *(value for value in rest if isinstance(value, torch.Tensor))
        )
        ctx.is_saved = [isinstance(value, torch.Tensor) for value in rest]  # CUDA's kernels return None as well
        ctx.rest = [None if saved else value for value, saved in zip(rest, ctx.is_saved, strict=True)]
        ctx.group, ctx.scale, ctx.balanced = group, scale, balanced
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        if torch.is_grad_enabled():
            raise RuntimeError(
                "context: attention in which keys and values go round cannot be differentiated twice "
                "(create_graph=True): choose a context that divides the heads of attention"
            )
        query, key, value, out, sums, *tensors = ctx.saved_tensors
        left = iter(tensors)
        rest = [next(left) if saved else value for value, saved in zip(ctx.rest, ctx.is_saved, strict=True)]
        kernels = _kernels(query)
        more = dict(zip(kernels.kept, rest, strict=False)) | kernels.others
        with _options(query.dtype, ctx.balanced):
            gradients = _attention._templated_ring_attention_backward(
                ctx.group,
                _SEQUENCE,
                kernels.backward,
                slopes[0].contiguous(),
                kernels.slope,
                query,
                key,
                value,
                out,
                sums,
                is_causal=True,
                dropout_p=0.0,
                scale=ctx.scale,
                **more,
            )
        return *gradients[:3], None, None, None


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """An operator of attention that gives logarithmic sums, and its backward."""

    forward: Any
    backward: Any
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the forward."""
    slope: str = "grad_out"
    """Name of the backward's argument for the gradient of the output."""
    kept: tuple[str, ...] = ()
    """Arguments of the backward that are the forward's other results, in order."""
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Its other arguments."""


def _kernels(query: torch.Tensor) -> _Kernels:
    aten = torch.ops.aten
    if query.device.type == "cpu":
        name = "_scaled_dot_product_flash_attention_for_cpu"
        return _Kernels(getattr(aten, name).default, getattr(aten, f"{name}_backward").default)
    if query.device.type != "cuda":
        raise ValueError(
            f"torch has no ring attention for {query.device.type}: choose a context that divides the heads of attention"
        )
    if query.dtype in (torch.bfloat16, torch.float16):
        return _Kernels(
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_backward.default,
            kept=("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
        )
    return _Kernels(
        _efficient,
        _efficient_backward,
        {"attn_bias": None, "compute_log_sumexp": True},
        "grad_out_",
        ("philox_seed", "philox_offset"),
        {"attn_bias": None, "grad_input_mask": [True, True, True, False]},
    )


def _efficient(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the sums of the queries alone, which CUDA's kernel pads to a multiple of 32; torch merges without."""
    out, sums, *rest = torch.ops.aten._scaled_dot_product_efficient_attention.default(query, *args, **kwargs)
    return out, sums[..., : query.shape[_SEQUENCE]], *rest


def _efficient_backward(*args: Any, logsumexp: torch.Tensor, **kwargs: Any) -> Any:
    padded = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % 32), value=torch.inf)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    return kernel(*args, logsumexp=padded, **kwargs)


@contextlib.contextmanager
def _options(dtype: torch.dtype, balanced: bool) -> Iterator[None]:
    """Let the ring know which parts a rank has, and how keys and values travel; add up in float32 at least."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    before = vars(options).copy()
    options.enable_load_balance = balanced
    methods = _attention._RotateMethod
    options.rotate_method = methods.ALL_GATHER if balanced else methods.ALL_TO_ALL
    options.convert_to_f32 = dtype != torch.float64
    try:
        yield
    finally:
        vars(options).update(before)
