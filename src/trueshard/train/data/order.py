"""Which sequences make a batch: a pure function of the seed and of how many samples came before.

- The number of ranks does not enter: ranks take slices of one global batch, so every world size sees the same data.
- A resume needs one integer, the samples already taken.
- Each pass over the data is a new permutation, computed an index at a time by a small block cipher (a Feistel
  network over the next power of four, walked until the result is in range): no table in memory however large the
  data, and the same on every machine and version of numpy, which its own shuffles do not promise.
- Of several sources the one whose turn it is follows from exact integer arithmetic (a tree of Beatty sequences): in any
  window of samples a source has its share, give or take one for each level of the tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

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


class Order:
    """Which samples stand where in a run over one or several sources.

    Args:
        seed: of the run.
        lengths: samples of each source; at least 1.
        weights: each source's share of the run, relative to the others'; as many as lengths.
    """

    def __init__(self, seed: int, lengths: Sequence[int], weights: Sequence[float]) -> None:
        self._lengths = list(lengths)
        self._firsts = np.concatenate([[0], np.cumsum(self._lengths)])
        self._seeds = [(seed + number * 0x9E3779B97F4A7C15) % 2**64 for number in range(len(lengths))]
        shares = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in shares))
        self._shares = [int(share * scale) for share in shares]
        self._phases = _mix(np.arange(len(lengths), dtype=np.uint64) + np.uint64(seed % 2**64))

    def turn(self, sample: int) -> tuple[int, int]:
        """The source of a global sample, and how many samples that source has given before it."""
        low, high = 0, len(self._shares)
        while high - low > 1:
            middle = (low + high) // 2
            share, total = sum(self._shares[low:middle]), sum(self._shares[low:high])
            phase = int(self._phases[middle]) * total >> 64
            before = (sample * share + phase) // total
            if ((sample + 1) * share + phase) // total > before:
                sample, high = before, middle
            else:
                sample, low = sample - before, middle
        return low, sample

    def indices(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Int64 `[count]`: what stands at global samples `first` … `first + count - 1`, the sources' samples numbered
        one source after the other."""
        if len(self._lengths) == 1:
            return sequence_indices(self._seeds[0], first, count, self._lengths[0])
        turns = np.array([self.turn(sample) for sample in range(first, first + count)], dtype=np.int64).reshape(-1, 2)
        found = np.empty(count, dtype=np.int64)
        for source, length in enumerate(self._lengths):
            places = turns[:, 0] == source  # a source's turns among consecutive samples are consecutive themselves
            if places.any():
                start = int(turns[places, 1][0])
                inside = sequence_indices(self._seeds[source], start, int(places.sum()), length)
                found[places] = inside + self._firsts[source]
        return found


def draws(seed: int, bound: int) -> Iterator[int]:
    """Numbers from 0 to ``bound - 1`` by chance, without end."""
    first = 0
    while True:
        numbers = np.arange(first, first + 1024, dtype=np.uint64)
        yield from (_mix(numbers + _mix(np.full(1024, seed % 2**64, dtype=np.uint64))) % np.uint64(bound)).tolist()
        first += 1024


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
