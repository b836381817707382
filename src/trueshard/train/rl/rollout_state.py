"""Samples with what the loss needs of them, and their form in a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trueshard.train.rl.samples import Sample

Logs = npt.NDArray[np.float32]
"""Log-probabilities of a sample's tokens, in nats."""


@dataclass
class Scored:
    """A sample, and what the loss needs of it."""

    sample: Sample
    advantage: float = 0.0
    used: bool = True
    """False if its group was left out."""
    old: Logs | None = None
    """Log-probabilities of its tokens before the update; None: those of the update itself."""
    reference: Logs | None = None


@dataclass
class Rollout:
    """The samples of one rollout."""

    step: int
    """The first step that uses it."""
    scored: list[Scored]
    """Group after group; those that are used and those that are left out."""
    refilled: int = 0
    """Prompts answered in place of others."""
    equal: int = 0
    """Groups whose rewards were all equal."""

    def minibatches(self, updates: int, samples: int) -> list[list[Scored]]:
        """Return the samples of each step: whole groups, in their order, as evenly as can be."""
        used = [each for each in self.scored if each.used]
        groups = len(used) // samples
        cuts = [number * groups // updates * samples for number in range(updates + 1)]
        return [used[begin:end] for begin, end in itertools.pairwise(cuts)]


LISTS = {"asked": torch.int64, "tokens": torch.int64, "own": torch.bool, "logprobs": torch.float32}


def packed(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON values and tensors."""
    rows, lists = [], {key: [] for key in (*LISTS, "old", "reference")}  # type: ignore[var-annotated]
    for each in rollout.scored:
        row = asdict(each.sample)
        for key in LISTS:
            lists[key].append(row.pop(key))
        for key in ("old", "reference"):
            value = getattr(each, key)
            lists[key].append([] if value is None else value.tolist())
        rows.append({**row, "advantage": each.advantage, "used": each.used})
    tensors = {}
    for key, values in lists.items():
        tensors[key] = torch.tensor([one for value in values for one in value], dtype=LISTS.get(key, torch.float32))
        tensors[f"{key}_lengths"] = torch.tensor([len(value) for value in values], dtype=torch.int64)
    head = {"step": rollout.step, "refilled": rollout.refilled, "equal": rollout.equal}
    return {**head, "rows": rows, "lists": tensors}


def unpacked(state: Mapping[str, Any]) -> Rollout:
    """Return the rollout that ``packed`` made this of."""
    lists = {
        key: [part.tolist() for part in state["lists"][key].split(state["lists"][f"{key}_lengths"].tolist())]
        for key in (*LISTS, "old", "reference")
    }
    scored = []
    for number, row in enumerate(state["rows"]):
        row = dict(row)
        advantage, used = row.pop("advantage"), row.pop("used")
        old, reference = (
            np.array(lists[key][number], dtype=np.float32) if lists[key][number] else None
            for key in ("old", "reference")
        )
        sample = Sample(**row, **{key: lists[key][number] for key in LISTS})
        scored.append(Scored(sample, advantage, used, old, reference))
    return Rollout(state["step"], scored, state["refilled"], state["equal"])
