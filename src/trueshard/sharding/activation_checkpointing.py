"""Recompute a unit's activations in backward: activation checkpointing, in place.

- It replaces a module's own ``forward``: a wrapper module would put its attribute into every name below it. A
  transformers layer has a switch of its own, which also keeps its key-value cache out of the recomputation.
- ``selective`` keeps the outputs of attention and of every second matrix product, and recomputes the rest (as
  TorchTitan's per-operation mode does).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trueshard.parallel.sequence import Parts, recomputing

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)


def recompute(module: nn.Module, mode: str, *, shared: bool = False, parts: Parts | None = None) -> None:
    """Make ``module`` recompute its forward in backward, in place.

    ``"full"`` keeps only the inputs for backward; ``"selective"`` also the costly operations' outputs. ``shared``: the
    module's matrices, by ranks. ``parts``: what of the model is given parts of sequences.
    """
    function = _checkpointed(mode, shared, parts)
    if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__):
        module.gradient_checkpointing = True  # type: ignore[assignment]
        module._gradient_checkpointing_func = function  # type: ignore[assignment]
        return
    forward: Callable[..., Any] = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return function(functools.partial(forward, **kwargs), *args)

    module.__dict__["forward"] = recomputed


def _checkpointed(mode: str, shared: bool, parts: Parts | None) -> Callable[..., Any]:
    """Return (function, *args) → its outputs, recomputed in backward."""
    contexts = _selective_contexts if mode == "selective" else None
    plain = _checkpoint_in(contexts)
    if not shared:
        return plain
    compiled = _checkpoint_in(contexts or _traced_contexts)
    eager = plain if parts is None else _checkpoint_in(functools.partial(recomputing, parts.state, contexts))

    def function(*args: Any) -> Any:
        # A compiler traces the recomputation along with the forward: at the same length, and in no context of ours.
        return (compiled if torch.compiler.is_compiling() else eager)(*args)

    return function


def _checkpoint_in(contexts: Callable[[], Any] | None) -> Callable[..., Any]:
    """Return torch's checkpoint, with contexts of a forward and of its recomputation if there are any."""
    options: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    return functools.partial(checkpoint, use_reentrant=False, **options)


def _traced_contexts() -> Any:
    """Keep attention's output on CPUs, where it is a seeded operation.

    Beside DTensors, torch 2.13 saves its seed where a mesh is expected.
    """

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        on_cpu = operation is _aten._scaled_dot_product_flash_attention_for_cpu.default
        return CheckpointPolicy.MUST_SAVE if on_cpu else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


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
