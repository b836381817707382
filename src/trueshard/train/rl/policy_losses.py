"""Advantages of answers from their rewards, and the losses of one token: pure functions, without a model.

A group is the answers to one prompt. Standard deviations are unbiased (n - 1), and get 1e-6 added, as in the peers.

- ``group`` (GRPO, Shao et al. 2024): (r - mean) / standard deviation, both of the group.
- ``centred`` (Dr. GRPO, Liu et al. 2025): r - mean of the group.
- ``leave_one_out`` (RLOO, Ahmadian et al. 2024): r - mean of the others of the group.
- ``batch`` (REINFORCE++, Hu 2025): (r - mean) / standard deviation over all tokens of the rollout, each with the reward
  of its answer.
- ``greedy`` (ReMax, Li et al. 2023): r - reward of the likeliest answer to the same prompt.

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

import numpy as np
import numpy.typing as npt
import torch

Values = npt.NDArray[np.float64]

LIMIT = 20.0
"""Largest |log r|: e^20 is finite in every dtype with the exponent of float32, and so is its gradient."""


@dataclass(frozen=True)
class LossInputs:
    """A microbatch of answers, and the constants of the losses."""

    trainer_logprobs: torch.Tensor  # (rows, length), with a gradient
    old_logprobs: torch.Tensor  # (rows, length), log π_old
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


ADVANTAGES = ("group", "centred", "leave_one_out", "batch", "greedy")  # words of ``rl.advantage``


def advantages(
    kind: str,
    rewards: Values,  # [groups, samples]
    lengths: npt.NDArray[np.int64],  # [groups, samples]: tokens of each answer
    baselines: Values | None = None,  # [groups]: for "greedy", the reward of the likeliest answer
) -> Values:
    """Return the advantage of each answer, [groups, samples]."""
    if kind == "greedy":
        assert baselines is not None
        return rewards - baselines[:, None]
    if kind == "batch":
        total = lengths.sum()
        centred = rewards - (rewards * lengths).sum() / total
        spread = np.sqrt((lengths * centred**2).sum() / max(1, total - 1))
    elif kind == "leave_one_out":
        return rewards - (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    else:
        centred = rewards - rewards.mean(1, keepdims=True)
        if kind == "centred":
            return centred
        spread = rewards.std(1, ddof=1, keepdims=True)
    return centred / (spread + 1e-6)


def is_equal(rewards: Values) -> npt.NDArray[np.bool_]:
    """Return which groups have equal rewards: [groups, samples] → [groups]."""
    result: npt.NDArray[np.bool_] = rewards.max(1) == rewards.min(1)
    return result


def too_long(
    lengths: npt.NDArray[np.int64],  # tokens of answers, any shape
    first: int,  # tokens from which on the reward falls
    most: int,  # tokens at which it has fallen by 1
) -> Values:
    """Return what is added to the reward of answers, 0 to -1: the soft punishment of DAPO (Yu et al. 2025, eq. 13)."""
    return -np.clip((lengths - first) / (most - first), 0.0, 1.0)
