"""What the parts of the data speak of: samples, and batches of them.

A sample is a mapping from name to array. Where a sequence is learnt from, it has

- ``input_ids``: int64 `[length]`, what the model reads;
- ``targets``: int64 `[length]`, what it should predict at each place: the token after it, or -100 where nothing counts;
- ``position_ids``: int64 `[length]`, only where several documents are packed: it begins at 0 with each.

A batch is a mapping from name to tensor, with a first dimension of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

Sample = Mapping[str, Any]
Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Sample]], Batch]

IGNORED = -100
"""The target where nothing counts in the loss."""


class Samples(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def where(self, index: int) -> str:
        """Where a sample comes from, for an error: "chat.jsonl, line 17"."""
