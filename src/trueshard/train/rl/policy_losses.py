"""The losses of one token, and the table of their words in ``rl.loss``.

With the ratio r = π / π_old of a token's probabilities, the advantage A of its answer, and clip = (low, high), the loss
of a token is

- ``clip`` (PPO, Schulman et al. 2017; GRPO): max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 with ``dual_clip``
  c at most -A c (Ye et al. 2020);
- ``sequence`` (GSPO, Zheng et al. 2025): the same with the geometric mean of the answer's ratios in place of r;
- ``weight`` (CISPO, MiniMax 2025): -A log π times clip(r, …), which has no gradient itself;
- ``soft`` (SAPO, Gao et al. 2025): -A (4 / τ) sigmoid(τ (r - 1)), with one τ for A >= 0 and one for A < 0.

A new loss is a function here and its line in ``LOSSES``. Averages, the divergence from a reference, the correction for
the engine and the measures are applied to each of them in ``policy``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LIMIT = 20.0
"""Largest |log r|: e^20 is finite in every dtype with the exponent of float32, and so is its gradient."""


@dataclass(frozen=True)
class LossInputs:
    """A microbatch of answers, and the constants of the losses."""

    trainer_logprobs: torch.Tensor  # (rows, length), with a gradient
    old_logprobs: torch.Tensor  # (rows, length), log π_old
    inference_logprobs: torch.Tensor | None  # (rows, length), of the engine that sampled the answers, if known
    advantages: torch.Tensor  # (rows, 1)
    loss_mask: torch.Tensor  # (rows, length), bool: True at tokens that the model sampled
    clip: tuple[float, float]
    dual_clip: float | None
    soft: tuple[float, float]  # τ for A >= 0 and for A < 0


@dataclass(frozen=True)
class LossOutputs:
    """The loss of each token, and the ratio that it was made from."""

    loss: torch.Tensor  # (rows, length)
    ratio: torch.Tensor  # (rows, length), or (rows, 1) if one ratio counts for an answer


def token_ratio(inputs: LossInputs) -> torch.Tensor:  # (rows, length)
    """Return π / π_old of each token."""
    return _log_ratio(inputs).clamp(-LIMIT, LIMIT).exp()


def sequence_ratio(inputs: LossInputs) -> torch.Tensor:  # (rows, 1)
    """Return the geometric mean of the ratios of each answer."""
    count = inputs.loss_mask.sum(1, keepdim=True).clamp(min=1)
    return (_log_ratio(inputs).sum(1, keepdim=True) / count).clamp(-LIMIT, LIMIT).exp()


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    return torch.where(inputs.loss_mask, inputs.trainer_logprobs - inputs.old_logprobs, 0.0)


def _clipped(inputs: LossInputs, ratio: torch.Tensor) -> LossOutputs:
    advantages, (low, high) = inputs.advantages, inputs.clip
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if inputs.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * inputs.dual_clip), loss)
    return LossOutputs(loss, ratio)


def clip(inputs: LossInputs) -> LossOutputs:
    """Return the loss of PPO and GRPO."""
    return _clipped(inputs, token_ratio(inputs))


def sequence(inputs: LossInputs) -> LossOutputs:
    """Return the loss of GSPO."""
    return _clipped(inputs, sequence_ratio(inputs))


def weight(inputs: LossInputs) -> LossOutputs:
    """Return the loss of CISPO."""
    ratio, (low, high) = token_ratio(inputs), inputs.clip
    factor = ratio.detach().clamp(1 - low, 1 + high)
    return LossOutputs(-inputs.advantages * inputs.trainer_logprobs * factor, ratio)


def soft(inputs: LossInputs) -> LossOutputs:
    """Return the loss of SAPO."""
    ratio, (above, below) = token_ratio(inputs), inputs.soft
    heat = torch.where(inputs.advantages >= 0, torch.full_like(inputs.advantages, above), below)
    return LossOutputs(-inputs.advantages * (4 / heat) * torch.sigmoid(heat * (ratio - 1)), ratio)


@dataclass(frozen=True)
class TokenLoss:
    """A loss of the table."""

    function: Callable[[LossInputs], LossOutputs]
    method: str
    """Name of the method in the literature, for the documents."""


LOSSES = {
    "clip": TokenLoss(clip, "PPO"),
    "sequence": TokenLoss(sequence, "GSPO"),
    "weight": TokenLoss(weight, "CISPO"),
    "soft": TokenLoss(soft, "SAPO"),
}
"""``rl.loss`` → loss. The configuration, its documents and errors, and the tests take the words from here."""
