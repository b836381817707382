"""From samples to a batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trueshard.train.data.samples import IGNORED, Batch, Ids, Sample


def stack(samples: Sequence[Sample]) -> Batch:
    """Samples of equal lengths: each of their arrays, stacked."""
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


class Pad:
    """Samples with ``input_ids`` and ``targets`` of any length, padded at their ends to the longest.

    Args:
        pad: the token that stands where there is none.
    """

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        rows = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": self._rows(rows, self.pad),
            "targets": self._rows([sample["targets"] for sample in samples], IGNORED),
            "attention_mask": self._rows([np.ones(len(row), dtype=np.int64) for row in rows], 0),
        }

    @staticmethod
    def _rows(rows: Sequence[Ids], fill: int) -> torch.Tensor:
        result = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
        for target, row in zip(result, rows, strict=True):
            target[: len(row)] = row
        return torch.from_numpy(result)


class PadPairs:
    """Samples with a ``chosen`` and a ``rejected`` sample: rows 0 … b-1 are chosen, b … 2b-1 rejected, all padded to
    the longest."""

    def __init__(self, pad: int) -> None:
        self._pad = Pad(pad)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return self._pad([sample[side] for side in ("chosen", "rejected") for sample in samples])
