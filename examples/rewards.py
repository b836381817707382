"""Rewards for examples of reinforcement learning: functions that judge an answer."""

from __future__ import annotations

from typing import Any

import trueshard


def sort(completion: str, record: dict[str, Any], sample: trueshard.rl.Sample) -> dict[str, float]:
    """Judge {"prompt": "sort 5 3 1 ->", "answer": "1 3 5"}: the share of places with the right digit."""
    given, wanted = completion.split(), record["answer"].split()
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return {"reward": right / max(len(given), len(wanted)), "exact": float(given == wanted)}


def colour(completion: str, record: dict[str, Any], sample: trueshard.rl.Sample) -> dict[str, float]:
    """Judge {"prompt": …, "images": …, "answer": "r"}: the right letter, another colour's, or at least a letter."""
    right = completion == record["answer"]
    reward = 1.0 if right else 0.3 if completion in ("r", "g", "b", "y") else 0.1 * completion.islower()
    return {"reward": reward, "right": float(right)}
