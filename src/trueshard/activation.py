"""Activation checkpointing in place: a module is recomputed in backward, and no name changes.

- A wrapper module would put its attribute into every name below it, so the module's own ``forward`` is replaced.
- A transformers layer has a switch of its own, which also keeps its key-value cache out of the recomputation: it is
  turned on instead.
- ``selective`` recomputes cheap operations only: outputs of attention and of every second matrix product are kept
  (the choice of TorchTitan's per-operation mode).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)


def recompute(module: nn.Module, mode: str) -> None:
    """Make ``module`` recompute its forward in backward, in place.

    Args:
        module: any module with a forward; with ``mode="full"`` only its inputs are kept for backward.
        mode: ``"full"`` or ``"selective"``.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = _selective_contexts
    if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__):
        module.gradient_checkpointing = True  # type: ignore[assignment]
        module._gradient_checkpointing_func = functools.partial(checkpoint, **options)  # type: ignore[assignment]
        return
    forward: Callable[..., Any] = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(functools.partial(forward, **kwargs), *args, **options)

    module.__dict__["forward"] = recomputed


def _selective_contexts() -> Any:
    products = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operation in _PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
