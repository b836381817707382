"""Advantages of the answers of groups, from their rewards: pure functions, in float64.

A group is the answers to one prompt. Standard deviations are unbiased (n - 1), and get 1e-6 added, as in the peers.

- ``group`` (GRPO, Shao et al. 2024): (r - mean) / standard deviation, both of the group.
- ``centred`` (Dr. GRPO, Liu et al. 2025): r - mean of the group.
- ``leave_one_out`` (RLOO, Ahmadian et al. 2024): r - mean of the others of the group.
- ``batch`` (REINFORCE++, Hu 2025): (r - mean) / standard deviation over all tokens of the rollout, each with the reward
  of its answer.
- ``greedy`` (ReMax, Li et al. 2023): r - reward of the likeliest answer to the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

TINY = 1e-6


def advantages(
    kind: str,
    rewards: Values,  # [groups, samples]
    lengths: npt.NDArray[np.int64],  # [groups, samples]: tokens of each answer
    baselines: Values | None = None,  # [groups]: for "greedy", the reward of the likeliest answer
) -> Values:
    """Return the advantage of each answer, [groups, samples]."""
    if kind == "batch":
        return _standardised(rewards, lengths)
    if kind == "greedy":
        assert baselines is not None
        return rewards - baselines[:, None]
    return _IN_GROUP[kind](rewards)


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


def _centred(rewards: Values) -> Values:
    result: Values = rewards - rewards.mean(1, keepdims=True)
    return result


def _grouped(rewards: Values) -> Values:
    result: Values = _centred(rewards) / (rewards.std(1, ddof=1, keepdims=True) + TINY)
    return result


def _leave_one_out(rewards: Values) -> Values:
    others = rewards.shape[1] - 1
    result: Values = rewards - (rewards.sum(1, keepdims=True) - rewards) / others
    return result


def _standardised(rewards: Values, lengths: npt.NDArray[np.int64]) -> Values:
    total = lengths.sum()
    mean = (rewards * lengths).sum() / total
    variance = (lengths * (rewards - mean) ** 2).sum() / max(1, total - 1)
    result: Values = (rewards - mean) / (np.sqrt(variance) + TINY)
    return result


_IN_GROUP: dict[str, Callable[[Values], Values]] = {
    "group": _grouped,
    "centred": _centred,
    "leave_one_out": _leave_one_out,
}
