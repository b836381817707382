"""A pass of a model whose head gives losses in the place of logits.

- The head's own ``forward`` is replaced for the pass, behind whatever hooks the head has: FSDP2 gathers its weight as
  ever, and what the head gives is what the backward begins from.
- A model may do something to its logits (cap or scale them), which would be done to losses instead. So what the model
  returns must be the very tensor that the head gave; if it is not, there is no such loss.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trueshard import names

AtHead = Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]
"""(head, its forward, hidden states [batch, length, features]) → what it gives instead of logits, any shape."""


def heads_of(model: nn.Module) -> list[nn.Module]:
    """What may be the output layer of a transformers model: one module, or its copies where PEFT trains it whole."""
    find = getattr(names.unwrap(model), "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        return []
    head = names.unwrap(head)
    copies, original = getattr(head, "modules_to_save", None), getattr(head, "original_module", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(original, nn.Module):
        return [names.unwrap(each) for each in (original, *copies.values())]
    return [head]


def at_head(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], shape: torch.Size, compute: AtHead
) -> torch.Tensor | None:
    """A pass of ``model`` over ``inputs`` with ``compute`` as its head.

    Args:
        model: of transformers, sharded or not.
        inputs: keyword arguments of its forward.
        shape: [batch, length] of the hidden states; for others the head does what it always does.
        compute: what the head does.

    Returns:
        What ``compute`` gave; None if the model has no one head, or does something to what it gives.
    """
    heads = heads_of(model)
    if not heads:
        return None
    given: list[torch.Tensor] = []

    def instead(head: nn.Module, own: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[:-1] != shape:
            return own(hidden)
        given.append(compute(head, own, hidden))
        return given[-1]

    with _replaced(heads, instead):
        logits = logits_of(model, inputs)
    return given[0] if len(given) == 1 and logits is given[0] else None


def logits_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[batch, length, vocabulary]. The key-value cache is off: with it, transformers tells no documents apart."""
    output = model(**inputs, use_cache=False)
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


@contextlib.contextmanager
def _replaced(heads: Sequence[nn.Module], instead: AtHead) -> Iterator[None]:
    before = [head.__dict__.get("forward") for head in heads]
    for head in heads:
        # The class's own: an instance's is a wrapper that begins a pass, or recomputes, around what is called here.
        own = functools.partial(type(head).forward, head)
        head.__dict__["forward"] = functools.partial(_call, instead, head, own)
    try:
        yield
    finally:
        for head, forward in zip(heads, before, strict=True):
            del head.__dict__["forward"]
            if forward is not None:
                head.__dict__["forward"] = forward


def _call(instead: AtHead, head: nn.Module, own: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return instead(head, functools.partial(own, *args, **kwargs) if not args else own, hidden)
