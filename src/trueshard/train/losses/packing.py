"""Whether a model keeps the documents of a packed sequence apart.

Where several documents are in a sequence, ``position_ids`` begin at 0 with each, and transformers' attention sees
nothing across these places. Recurrent and convolutional layers do, and some models make masks of their own. So it is
tried out: a document is changed, and what follows it must stay.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from trueshard import _torch, names
from trueshard.errors import UserError
from trueshard.train.losses.head import logits_of

_LENGTH = 16
"""Tokens of each of two documents."""


def check_apart(model: nn.Module, device: torch.device) -> None:
    """Raise unless what a model gives for a document is independent of the document before it. Collective.

    Three small passes without gradients, in evaluation mode; no random numbers are used.

    Args:
        model: a causal language model of transformers, with its values, sharded or not.
        device: of its inputs.

    Raises:
        UserError: it mixes them, or takes no ``position_ids``; on every rank.
    """
    remedy = "set data.packing = false"
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            leak, noise = _influences(model, device)
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        raise UserError(
            f"data.packing: {_kind(model)} takes no position_ids, so packed documents mix; {remedy}"
        ) from error
    finally:
        model.train(training)
    worst = torch.tensor([leak, noise], device=device)
    if dist.is_initialized():
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    leak, noise = worst.tolist()
    if leak > 4 * (noise + torch.finfo(torch.float32).eps):
        raise UserError(
            f"data.packing: {_kind(model)} lets a document in a packed sequence see those before it; {remedy}"
        )


def _influences(model: nn.Module, device: torch.device) -> tuple[float, float]:
    """How much a first document changes what a model gives for the second, and the second that for the first.

    The latter is noise: a causal model cannot see ahead. Both as a part of the greatest logit.
    """
    vocabulary = int(names.unwrap(model).get_input_embeddings().num_embeddings)  # type: ignore[operator]
    positions = torch.arange(_LENGTH, device=device).repeat(2).unsqueeze(0)

    def logits(first: int, second: int) -> torch.Tensor:
        steps = torch.arange(1, _LENGTH + 1, device=device)
        tokens = torch.cat([steps * first, steps * second]).unsqueeze(0) % vocabulary
        return logits_of(model, {"input_ids": tokens, "position_ids": positions})[0].float()

    def change(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).abs().max() / two.abs().max())

    plain, other_first, other_second = logits(3, 7), logits(5, 7), logits(3, 11)
    return change(other_first[_LENGTH:], plain[_LENGTH:]), change(other_second[:_LENGTH], plain[:_LENGTH])


def _kind(model: nn.Module) -> str:
    root = names.unwrap(model)
    find = getattr(root, "get_base_model", None)
    return _torch.own_class(find() if callable(find) else root).__name__
