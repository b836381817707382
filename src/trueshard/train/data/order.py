"""The order of samples is a pure function of the seed and of the number of samples taken before, at any world size:

- Each pass over the data is a new permutation, computed index by index with a small block cipher (a Feistel network
  over the next power of four, walked until the result is in range): no table in memory however large the data, and
  the same on every machine and numpy version, which numpy's own shuffles do not promise.
- Several sources take turns by exact integer arithmetic (a tree of Beatty sequences): in any window of samples each
  source has its share, within one sample for each level of the tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import count

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint64]

ROUNDS = 6
"""Rounds of the block cipher."""
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, the increment of SplitMix64."""


def sequence_indices(seed: int, first_sample: int, count: int, sequences: int) -> npt.NDArray[np.int64]:
    """Return the sequences at global samples ``first_sample`` … ``first_sample + count - 1``.

    Returns:
        int64 [count], each below ``sequences``. Each pass of ``sequences`` samples takes every sequence once.
    """
    samples = np.arange(first_sample, first_sample + count, dtype=np.uint64)
    passes, places = samples // np.uint64(sequences), samples % np.uint64(sequences)
    half_bits = max(1, (int(sequences - 1).bit_length() + 1) // 2)
    keys = mix(np.uint64(seed) + mix(passes))
    result = _permute(places, keys, half_bits)
    outside = result >= sequences
    while outside.any():
        result[outside] = _permute(result[outside], keys[outside], half_bits)
        outside = result >= sequences
    return result.astype(np.int64)


class Order:
    """The order of samples over sources of ``lengths`` samples, with shares in proportion to ``weights``."""

    def __init__(self, seed: int, lengths: Sequence[int], weights: Sequence[float]) -> None:
        self._lengths = list(lengths)
        self._firsts = np.concatenate([[0], np.cumsum(self._lengths)])
        self._seeds = [(seed + number * GOLDEN) % 2**64 for number in range(len(lengths))]
        shares = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in shares))
        self._shares = [int(share * scale) for share in shares]
        self._phases = mix(np.arange(len(lengths), dtype=np.uint64) + np.uint64(seed % 2**64))

    def turn(self, sample: int) -> tuple[int, int]:
        """Return the source of a global sample, and the number of samples that this source gave before."""
        low, high = 0, len(self._shares)
        while high - low > 1:
            middle, before = self._split(low, high, sample)
            if self._split(low, high, sample + 1)[1] > before:
                sample, high = before, middle
            else:
                sample, low = sample - before, middle
        return low, sample

    def given(self, samples: int, low: int = 0, high: int | None = None) -> list[int]:
        """Return how many of the first global samples each source gives (those from ``low`` to ``high``)."""
        high = len(self._shares) if high is None else high
        if high - low == 1:
            return [samples]
        middle, before = self._split(low, high, samples)
        return self.given(before, low, middle) + self.given(samples - before, middle, high)

    def _split(self, low: int, high: int, samples: int) -> tuple[int, int]:
        """Return the middle of some sources, and how many of their first samples are from those before it."""
        middle = (low + high) // 2
        share, total = sum(self._shares[low:middle]), sum(self._shares[low:high])
        phase = int(self._phases[middle]) * total >> 64
        return middle, (samples * share + phase) // total

    def indices(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the samples from global position ``first`` on: int64 [count], numbered one source after the other."""
        turns = np.array([self.turn(sample) for sample in range(first, first + count)], dtype=np.int64).reshape(-1, 2)
        result = np.empty(count, dtype=np.int64)
        for source, length in enumerate(self._lengths):
            places = turns[:, 0] == source  # among consecutive samples, the turns of a source are consecutive
            if places.any():
                start = int(turns[places, 1][0])
                inside = sequence_indices(self._seeds[source], start, int(places.sum()), length)
                result[places] = inside + self._firsts[source]
        return result


def draws(seed: int, bound: int) -> Iterator[int]:
    """Yield pseudorandom integers from 0 to ``bound - 1`` forever."""
    key = mix(np.full(1024, seed % 2**64, dtype=np.uint64))
    for first in count(0, 1024):
        numbers = np.arange(first, first + 1024, dtype=np.uint64)
        yield from (mix(numbers + key) % np.uint64(bound)).tolist()


def _permute(values: Indices, keys: Indices, half_bits: int) -> Indices:
    """Apply a bijection on integers of 2 × ``half_bits`` bits; each key selects one."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (mix(right + mix(keys + np.uint64(number))) & mask)
    return (left << shift) | right


def mix(values: Indices) -> Indices:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = (values + np.uint64(GOLDEN)).astype(np.uint64)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
