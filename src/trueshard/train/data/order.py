"""Which sequences make a batch: a pure function of the seed and of how many samples came before.

- The number of ranks does not enter: ranks take slices of one global batch, so every world size sees the same data.
- A resume needs one integer, the samples already taken.
- Each pass over the data is a new permutation, computed an index at a time by a small block cipher (a Feistel
  network over the next power of four, walked until the result is in range): no table in memory however large the
  data, and the same on every machine and version of numpy, which its own shuffles do not promise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 6

Indices = npt.NDArray[np.uint64]


def sequence_indices(seed: int, first_sample: int, count: int, sequences: int) -> npt.NDArray[np.int64]:
    """Which of `sequences` stand at global samples `first_sample` … `first_sample + count - 1`.

    Returns int64 `[count]`. Every run of `sequences` samples that starts at a multiple of it takes each once.
    """
    samples = np.arange(first_sample, first_sample + count, dtype=np.uint64)
    passes, places = samples // np.uint64(sequences), samples % np.uint64(sequences)
    half_bits = max(1, (int(sequences - 1).bit_length() + 1) // 2)
    keys = _mix(np.uint64(seed) + _mix(passes))
    result = _permute(places, keys, half_bits)
    outside = result >= sequences
    while outside.any():
        result[outside] = _permute(result[outside], keys[outside], half_bits)
        outside = result >= sequences
    return result.astype(np.int64)


def _permute(values: Indices, keys: Indices, half_bits: int) -> Indices:
    """A bijection on the numbers of 2 × `half_bits` bits, one for each key."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mix(right + _mix(keys + np.uint64(number))) & mask)
    return (left << shift) | right


def _mix(values: Indices) -> Indices:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
