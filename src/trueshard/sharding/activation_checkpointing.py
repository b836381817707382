"""Recompute a unit's activations in backward: activation checkpointing, in place.

- It replaces a module's own ``forward``: a wrapper module would put its attribute into every name below it. A
  transformers layer has a switch of its own, which also keeps its key-value cache out of the recomputation.
- What a forward writes to buffers and attributes (running statistics, counters, lists) is written once: recomputation
  begins with the buffers of then, and leaves those of now.
- ``selective`` keeps the outputs of attention and of every second matrix product, and recomputes the rest (as
  TorchTitan's per-operation mode does).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trueshard import _torch
from trueshard.parallel.sequence import Parts, Pass

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_TORCH = vars(nn.Module()).keys()
"""Attributes of any module that are torch's: parameters come and go with gathering."""
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)


def recompute(module: nn.Module, mode: str, *, shared: bool = False, parts: Parts | None = None) -> None:
    """Make ``module`` recompute its forward in backward, in place.

    ``"full"`` keeps only the inputs for backward; ``"selective"`` also the costly operations' outputs. ``shared``: the
    module's matrices, by ranks. ``parts``: what of the model is given parts of sequences.
    """
    function = _checkpointed(module, mode, shared, parts)
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


def _checkpointed(module: nn.Module, mode: str, shared: bool, parts: Parts | None) -> Callable[..., Any]:
    """Return (function, *args) → its outputs, recomputed in backward."""
    contexts = _selective_contexts if mode == "selective" else None
    compiled = _checkpoint_in(contexts or (_traced_contexts if shared else None))
    eager = _checkpoint_in(functools.partial(_writing_once, module, contexts, parts.state if parts else Pass()))

    def function(*args: Any) -> Any:
        # A compiler traces the recomputation along with the forward: at the same length, and in no context of ours.
        return (compiled if torch.compiler.is_compiling() else eager)(*args)

    return function


class _Anew(contextlib.AbstractContextManager[None]):
    """Enters a context that is made each time: a gradient of a gradient recomputes again."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._made = self._make()
        self._made.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._made.__exit__(*exception)


def _writing_once(module: nn.Module, contexts: Callable[[], Any] | None, state: Pass) -> tuple[Any, Any]:
    """Return the contexts of a forward of ``module`` and of its recomputation, inside which are those of ``contexts``.

    Values are copied by ``data``, whose version is its own: the recomputed graph may hold the buffers.
    """
    forward, recomputation = contexts() if contexts else (contextlib.nullcontext(), contextlib.nullcontext())
    total = state.total
    before = values_of_buffers(module)  # kernels of batch norm bump no version that would tell what changes

    @contextlib.contextmanager
    def recompute() -> Iterator[None]:
        now = values_of_buffers(module)
        write_buffers(before)
        try:
            with _same_attributes(module), state.of_length(total), recomputation:
                yield
        finally:
            write_buffers(now)

    return forward, _Anew(recompute)


def values_of_buffers(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
    """Return (owner's table, name, buffer, copy of its values) of each; a forward may replace a buffer by another."""
    tables = [_torch.own_buffers(inner) for inner in module.modules()]
    buffers = [(table, name, buffer) for table in tables for name, buffer in table.items()]
    return [(table, name, buffer, buffer.detach().clone()) for table, name, buffer in buffers if buffer is not None]


def write_buffers(buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]) -> None:
    for table, name, buffer, values in buffers:
        table[name] = buffer
        buffer.data.copy_(values)


@contextlib.contextmanager
def _same_attributes(module: nn.Module) -> Iterator[None]:
    """Give the attributes of all modules at and below ``module`` back what they were, lists and dicts their content."""
    before = [(vars(inner), {k: v for k, v in vars(inner).items() if k not in _TORCH}) for inner in module.modules()]
    held = [value for _, attributes in before for value in attributes.values() if isinstance(value, (list, dict, set))]
    contents = [value.copy() for value in held]
    try:
        yield
    finally:
        for attributes, values in before:
            for name in attributes.keys() - values.keys() - _TORCH:
                del attributes[name]
            attributes.update(values)
        for value, content in zip(held, contents, strict=True):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)


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
