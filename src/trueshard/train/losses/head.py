"""Cross entropy at the head of a model, without ever holding all logits.

- For a plain linear head, the gradient is computed along with the loss, some rows at a time: in float32 and float64 by
  ``torch.nn.functional.linear_cross_entropy``. In bfloat16 and float16 that function returns the loss in them, in which
  a sum over thousands of tokens has two or three digits (or overflows); so there the same is done here, with softmax,
  sum and the weight's gradient in float32.
- Any other head (with an adapter, say), and a loss that needs each token separately, is recomputed in backward, some
  rows at a time.
- The head's own ``forward`` is replaced for the pass by one that returns losses, behind any hooks of the head: FSDP2
  gathers its weight as usual. A model that changes its logits (caps or scales them) would do that to losses, so it must
  return the very tensor that the head gave; otherwise there is no such loss.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trueshard.model import names
from trueshard.train.data.samples import IGNORED

Forward = Callable[[torch.Tensor], torch.Tensor]
AtHead = Callable[[nn.Module, Forward, torch.Tensor], torch.Tensor]
"""(head, its forward, hidden states [batch, length, features]) → output in place of logits, any shape."""

_PIECES = 8
"""Number of pieces to recompute rows in: more save little memory, and each adds up a gradient."""


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each row: logits [rows, vocabulary], targets [rows] → [rows], float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="none")


def summed(
    linear: nn.Linear,  # with its weight gathered
    hidden: torch.Tensor,  # [rows, features]
    targets: torch.Tensor,  # [rows], int64; -100 for no loss
) -> torch.Tensor:
    """Return the summed cross entropy of a plain linear head: 0-dim, float32 or wider. Its backward can run once."""
    weight, bias = linear.weight, linear.bias
    if hidden.dtype in (torch.float32, torch.float64) and hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="sum", ignore_index=IGNORED, options=options
        )
    total: torch.Tensor = _Summed.apply(hidden, weight, bias, targets, torch.is_grad_enabled())
    return total


def each(
    head: Forward,  # [some rows, features] → logits [some rows, vocabulary]; called again in backward
    hidden: torch.Tensor,  # [rows, features]
    targets: torch.Tensor,  # [rows], int64; -100 for no loss
) -> torch.Tensor:
    """Return the cross entropy of each row: [rows], float32 or wider."""

    def piece(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return losses_of(head(some), wanted)

    rows = -(-hidden.shape[0] // _PIECES) or 1
    found: list[torch.Tensor] = []
    for some, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        again = torch.is_grad_enabled()
        found.append(checkpoint(piece, some, wanted, use_reentrant=False) if again else piece(some, wanted))
    return torch.cat(found)


class _Summed(torch.autograd.Function):
    """The sum of cross entropies and its gradients, in one pass over the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [rows, features]
        weight: torch.Tensor,  # [vocabulary, features]
        bias: torch.Tensor | None,  # [vocabulary]
        targets: torch.Tensor,  # [rows]
        training: bool,
    ) -> torch.Tensor:
        wanted = [training and needed for needed in ctx.needs_input_grad[:3]]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
        pieces = -(-weight.shape[0] // weight.shape[1])  # so the logits of a piece are no larger than ``hidden``
        rows = -(-hidden.shape[0] // pieces) or 1
        for begin in range(0, hidden.shape[0], rows):
            some, target = hidden[begin : begin + rows], targets[begin : begin + rows]
            counts = target.ne(IGNORED).unsqueeze(1)
            index = target.clamp(min=0).unsqueeze(1)
            logs = F.linear(some, weight, bias).to(wide).log_softmax(dim=1)
            total -= (logs.gather(1, index) * counts).sum()
            if not any(wanted):
                continue
            slope = logs.exp_().scatter_add_(1, index, torch.full_like(index, -1, dtype=wide)).mul_(counts)
            if to_bias is not None:
                to_bias += slope.sum(0)
            if to_weight is not None:
                _add_product(to_weight, slope.t(), some)
            if to_hidden is not None:
                torch.mm(slope.to(hidden.dtype), weight, out=to_hidden[begin : begin + rows])
        ctx.gradients = (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None or bias is None else to_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradient of this loss was taken already; compute the loss again")
        return *(None if grad is None else grad.mul_(slopes[0].to(grad.dtype)) for grad in gradients), None, None


def _add_product(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Add ``first @ second`` to ``total`` in its wider dtype; on CUDA from factors in the dtype of ``second``."""
    if total.device.type == "cuda" and second.dtype != total.dtype:
        total += torch.mm(first.to(second.dtype), second, out_dtype=total.dtype)
    else:
        total.addmm_(first, second.to(total.dtype))


def at_head(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], shape: torch.Size, compute: AtHead
) -> torch.Tensor | None:
    """Run ``model`` on ``inputs`` with ``compute`` as its head, for hidden states of ``shape``, [batch, length].

    Returns the output of ``compute``; None if the model has no single head, or changes its output.
    """
    heads = _heads_of(model)
    if not heads:
        return None
    given: list[torch.Tensor] = []

    def instead(head: nn.Module, own: Forward, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if hidden.shape[:-1] != shape:
            return own(hidden, **kwargs)
        given.append(compute(head, functools.partial(own, **kwargs), hidden))
        return given[-1]

    with _replaced(heads, instead):
        logits = logits_of(model, inputs)
    return given[0] if len(given) == 1 and logits is given[0] else None


def logits_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return logits [batch, length, vocabulary], without key-value cache: it makes transformers mix documents."""
    output = model(**inputs, use_cache=False)
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


def _heads_of(model: nn.Module) -> list[nn.Module]:
    """Return the output layer of a transformers model, or its copies if PEFT trains it whole."""
    find = getattr(names.unwrap(model), "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        return []
    head = names.unwrap(head)
    copies, original = getattr(head, "modules_to_save", None), getattr(head, "original_module", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(original, nn.Module):
        return [names.unwrap(each) for each in (original, *copies.values())]
    return [head]


@contextlib.contextmanager
def _replaced(heads: Sequence[nn.Module], instead: Callable[..., torch.Tensor]) -> Iterator[None]:
    before = [head.__dict__.get("forward") for head in heads]
    for head in heads:
        # The class's own: an instance's is a wrapper that begins a pass, or recomputes, around it.
        own = functools.partial(type(head).forward, head)
        head.__dict__["forward"] = functools.partial(instead, head, own)
    try:
        yield
    finally:
        for head, forward in zip(heads, before, strict=True):
            del head.__dict__["forward"]
            if forward is not None:
                head.__dict__["forward"] = forward
