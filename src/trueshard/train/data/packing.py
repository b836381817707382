"""Several documents in a sequence, none of which sees another.

- First fit, longest first: each document goes into the first sequence that has room, so little is padding, and the
  result is the same on every machine.
- ``position_ids`` begin at 0 with each document: from these a transformers model makes its attention block-diagonal.
- Nothing is predicted across documents: a document's last token is a target only, its first an input only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trueshard.train.data.samples import IGNORED, Document

Numbers = npt.NDArray[np.int64]


def pack(lengths: Sequence[int] | Numbers, room: int) -> list[list[int]]:
    """Which documents share a sequence.

    Args:
        lengths: of the documents, each from 1 to ``room``.
        room: of a sequence.

    Returns:
        A list of document numbers for each sequence; each document once, each list in ascending order.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    longest_first = np.argsort(-sizes, kind="stable")
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    # A tree over the sequences: each node holds the most room that a sequence below it has left.
    most = [room] * (2 * leaves)
    sequences: list[list[int]] = []
    for number in longest_first.tolist():
        size, node = int(sizes[number]), 1
        while node < leaves:
            node = 2 * node if most[2 * node] >= size else 2 * node + 1
        if node - leaves == len(sequences):
            sequences.append([])
        sequences[node - leaves].append(number)
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return [sorted(each) for each in sequences]


def packed(documents: Sequence[Document], length: int, pad: int) -> dict[str, Numbers]:
    """A sample of exactly ``length`` inputs from documents that fit in it; what is left is padding, a document of its
    own without targets."""
    inputs, targets = np.full(length, pad, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64)
    positions, first = np.empty(length, dtype=np.int64), 0
    for document in documents:
        sample = document.sample()
        last = first + len(sample["input_ids"])
        inputs[first:last], targets[first:last] = sample["input_ids"], sample["targets"]
        positions[first:last] = np.arange(last - first)
        first = last
    positions[first:] = np.arange(length - first)
    return {"input_ids": inputs, "targets": targets, "position_ids": positions}
