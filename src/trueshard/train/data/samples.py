"""What the parts of the data speak of: documents, samples, and batches of them.

A sample is a mapping from name to array. Where a sequence is learnt from, it has

- ``input_ids``: int64 `[length]`, what the model reads;
- ``targets``: int64 `[length]`, what it should predict at each place: the token after it, or -100 where nothing counts;
- ``position_ids``: int64 `[length]`, only where several documents are packed: it begins at 0 with each.

A batch is a mapping from name to tensor, with a first dimension of samples. Where samples are padded to a common length
it has ``attention_mask``, int64 `[samples, length]`, 1 for what is no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

Sample = Mapping[str, Any]
Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Sample]], Batch]
Ids = npt.NDArray[Any]

IGNORED = -100
"""The target where nothing counts in the loss."""


@runtime_checkable
class Samples(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def where(self, index: int) -> str:
        """Where a sample comes from, for an error: "chat.jsonl, line 17"."""


@runtime_checkable
class Stream(Protocol):
    """Samples one after the other, without end."""

    def begin(self, seed: int) -> Iterator[tuple[Sample, str]]:
        """From the first on: each sample, and where it comes from. Equal seeds give equal samples."""


@dataclass(frozen=True)
class Document:
    """Tokens that belong together, and which of them are to be predicted."""

    ids: Ids
    """Integers `[tokens]`."""
    counted: npt.NDArray[np.bool_]
    """`[tokens]`: whether a token is a target. The first never is: there is nothing to predict it from."""

    def sample(self) -> dict[str, npt.NDArray[np.int64]]:
        """``input_ids`` and ``targets``, `[tokens - 1]`."""
        ids = self.ids.astype(np.int64)
        return {"input_ids": ids[:-1], "targets": np.where(self.counted[1:], ids[1:], IGNORED)}

    def cut(self, length: int) -> Document | None:
        """As much of it as a sequence of ``length`` inputs takes, or None if nothing in that is a target."""
        ids, counted = self.ids[: length + 1], self.counted[: length + 1]
        return Document(ids, counted) if counted[1:].any() else None
