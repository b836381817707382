"""An advantage estimator of the user's own: "file.py:function" as the value of ``rl.advantage``.

``function(rewards, lengths) -> advantages``, each [groups, samples]: rewards float64, lengths int64. Rank 0 calls it
for all. It is tried before a model is built, on groups as a run may have them, those of equal rewards among them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trueshard.train.own_code import Wrong, blamed, own
from trueshard.train.rl.policy_losses import Values
from trueshard.train.rl.ranks import on_first_rank


class OwnEstimator:
    """The function of ``words``, "file.py:function", tried on groups of ``samples`` answers. Raises `UserError`."""

    def __init__(self, words: str, samples: int) -> None:
        self._words = words
        self._call = own("rl.advantage", words, "rewards", "lengths")
        spread = np.random.default_rng(0).normal(size=(3, samples))
        for rewards in (spread, spread[:1], np.ones((2, samples)), np.zeros((1, samples))):
            self._estimate(rewards, np.arange(1, rewards.size + 1).reshape(rewards.shape))

    def __call__(self, rewards: Values, lengths: npt.NDArray[np.int64]) -> Values:
        """Return advantages, [groups, samples], the same on every rank. Collective; raises `UserError`."""
        return on_first_rank(lambda: self._estimate(rewards, lengths))

    def _estimate(self, rewards: Values, lengths: npt.NDArray[np.int64]) -> Values:
        with blamed("rl.advantage", self._words):
            with np.errstate(all="ignore"):
                result = np.asarray(self._call(rewards.copy(), lengths.copy()), dtype=np.float64)
            if result.shape != rewards.shape:
                raise Wrong(f"it returned shape {list(result.shape)} for rewards of shape {list(rewards.shape)}")
            if not np.isfinite(result).all():
                row = int(np.argmin(np.isfinite(result).all(1)))
                raise Wrong(f"it returned {result[row].tolist()} for the rewards {rewards[row].tolist()}")
        return result
