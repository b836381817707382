"""The loss of a configuration, and a check that the model keeps packed documents apart.

In a packed sequence ``position_ids`` restart at 0 with each document, and transformers' attention does not look across
these places. Recurrent and convolutional layers do, and some models make masks of their own. So it is tested: one
document is changed, and the output for the next must stay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.distributed import device_of
from trueshard.errors import UserError
from trueshard.model import names
from trueshard.runtime.passes import runtime_of
from trueshard.train.config import Config
from trueshard.train.losses.causal import CausalLoss, Loss, PreferenceLoss
from trueshard.train.losses.head import logits_of
from trueshard.train.models.build import reference
from trueshard.train.models.filling import fill

_LENGTH = 16
"""Tokens of each of two documents."""


def choose_loss(config: Config, settings: Any, model: nn.Module) -> Loss:
    """Return the loss of a run. Collective.

    Args:
        config: of the run.
        settings: transformers configuration of the model.
        model: sharded, with its values. The reference for preferences is sharded by the same plan.

    Raises:
        UserError: documents are packed and the model mixes them; on every rank.
    """
    runtime = runtime_of(names.unwrap(model))
    assert runtime is not None, "the loss is chosen after shard()"
    whole_logits = config.train.whole_logits
    if config.data.format == "preference":
        other = reference(config, settings)
        if other is not None:
            trueshard.shard(other, plan=runtime.plan, mesh=runtime.mesh)
            fill(config, other)
        return PreferenceLoss(other, config.preference.beta, config.preference.label_smoothing, whole_logits)
    if config.data.format == "chat" and config.data.packing:
        check_apart(model, device_of(runtime.mesh))
    return CausalLoss(whole_logits)


def check_apart(model: nn.Module, device: torch.device) -> None:
    """Raise unless a packed document is independent of the document before it. Collective.

    Runs three small forwards in evaluation mode, without gradients and random numbers.

    Args:
        model: a causal language model of transformers, with its values, sharded or not.
        device: of its inputs.

    Raises:
        UserError: it mixes documents, or takes no ``position_ids``; on every rank.
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
    """Return the influence of a first document on the logits of the second, and of the second on the first.

    The latter is noise: a causal model cannot look ahead. Both are relative to the largest logit.
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
