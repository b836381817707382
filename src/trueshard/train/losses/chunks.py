"""Cross entropy of a head's outputs that are never there all at once.

- Where the head is a plain linear layer, the gradient is computed along with the loss, some rows at a time:
  by ``torch.nn.functional.linear_cross_entropy`` in float32. In bfloat16 and float16 that function also returns the
  loss in them, in which a sum over thousands of tokens has two or three digits (or overflows); so there the same is
  done here, with the softmax, the sum and the weight's gradient in float32.
- Any other head (with an adapter, say), and a loss that needs each token by itself, is recomputed in backward, some
  rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trueshard.train.data.samples import IGNORED

_PIECES = 8
"""In how many pieces rows are recomputed: more save little memory, and a gradient is added up in each."""


def is_plain(head: nn.Module) -> bool:
    """Whether ``head`` is a linear layer and nothing else."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def summed(linear: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The summed cross entropy of a plain linear layer's outputs.

    Args:
        linear: with its weight gathered.
        hidden: [rows, features], its input.
        targets: [rows], int64; -100 where nothing counts.

    Returns:
        0-dim; float32, or float64 for such an input. Its backward can be called once.
    """
    weight, bias = linear.weight, linear.bias
    if hidden.dtype in (torch.float32, torch.float64) and hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="sum", ignore_index=IGNORED, options=options
        )
    total: torch.Tensor = _Summed.apply(hidden, weight, bias, targets, torch.is_grad_enabled())
    return total


def each(head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy of each row.

    Args:
        head: [some rows, features] → logits [some rows, vocabulary]; called again in backward.
        hidden: [rows, features].
        targets: [rows], int64; -100 where nothing counts.

    Returns:
        [rows], float32 or wider.
    """

    def piece(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = head(some)
        return F.cross_entropy(_wide(logits), wanted, ignore_index=IGNORED, reduction="none")

    rows = -(-hidden.shape[0] // _PIECES) or 1
    found: list[torch.Tensor] = []
    for some, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        again = torch.is_grad_enabled()
        found.append(checkpoint(piece, some, wanted, use_reentrant=False) if again else piece(some, wanted))
    return torch.cat(found)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _add_product(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """``total += first @ second``, wide where ``second`` is not; on CUDA from factors in the dtype of ``second``."""
    if total.device.type == "cuda" and second.dtype != total.dtype:
        total += torch.mm(first.to(second.dtype), second, out_dtype=total.dtype)
    else:
        total.addmm_(first, second.to(total.dtype))


class _Summed(torch.autograd.Function):
    """The sum of cross entropies, and its gradients, in one go over the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        training: bool,
    ) -> torch.Tensor:
        wanted = [training and needed for needed in ctx.needs_input_grad[:3]]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
        pieces = -(-weight.shape[0] // weight.shape[1])  # then their logits are no larger than ``hidden``
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
