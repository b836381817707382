"""Documents, samples and batches, the steps from one to the next, and the order of samples.

A sample maps names to arrays. A sequence to learn from has

- ``input_ids``: int64 [length], the input of the model;
- ``targets``: int64 [length], the next token at each position, or -100 where no loss is computed;
- ``position_ids``: int64 [length], only in packed sequences; it restarts at 0 with each document.

A batch maps names to tensors whose first dimension is the sample. Padded batches have ``attention_mask``, int64
[samples, length]: 1 on tokens, 0 on padding.

Packing puts several documents into a sequence, the longest first, each where it fits best. From ``position_ids``
transformers derives a block-diagonal attention mask; no loss crosses documents.

The order of samples is a pure function of the seed and of the number of samples taken before, at any world size:

- Each pass over the data is a new permutation, computed index by index with a small block cipher (a Feistel network
  over the next power of four, walked until the result is in range): no table in memory however large the data, and
  the same on every machine and numpy version, which numpy's own shuffles do not promise.
- Several sources take turns by exact integer arithmetic (a tree of Beatty sequences): in any window of samples each
  source has its share, within one sample for each level of the tree.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

Sample = Mapping[str, Any]
Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Sample]], Batch]
Ids = npt.NDArray[Any]
Indices = npt.NDArray[np.uint64]

ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15

IGNORED = -100
"""Target of a position without loss."""


@runtime_checkable
class Samples(Protocol):
    """Samples with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def where(self, index: int) -> str:
        """Return the origin of a sample, for error messages: "chat.jsonl, line 17"."""


@runtime_checkable
class Stream(Protocol):
    """An endless sequence of samples."""

    def begin(self, seed: int) -> Iterator[tuple[Sample, str]]:
        """Iterate from the first sample: (sample, its origin). Equal seeds give equal samples."""


@dataclass(frozen=True)
class Document:
    """Consecutive tokens, and which of them are targets."""

    ids: Ids
    """Integers [tokens]."""
    counted: npt.NDArray[np.bool_]
    """[tokens]: True for targets. The first entry has no effect: nothing precedes it."""

    def sample(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return ``input_ids`` and ``targets``, [tokens - 1]."""
        ids = self.ids.astype(np.int64)
        return {"input_ids": ids[:-1], "targets": np.where(self.counted[1:], ids[1:], IGNORED)}


def whole(ids: Ids) -> Document:
    """Return a document whose tokens are all targets."""
    return Document(ids, np.ones(len(ids), dtype=np.bool_))


def json_document(value: Any) -> Document:
    """Return a document of the bytes of a JSON value, for records that become tokens with their batch."""
    return whole(np.frombuffer(json.dumps(value).encode(), dtype=np.uint8))


def truncate(documents: Sequence[Document], length: int) -> tuple[Document, ...]:
    """Cut the documents of a record to sequences of ``length`` inputs; return () if one has no target left."""
    short = [Document(each.ids[: length + 1], each.counted[: length + 1]) for each in documents]
    return tuple(short) if all(each.counted[1:].any() for each in short) else ()


def sequence(tokens: Ids, start: int, length: int) -> dict[str, Ids]:
    """Return the sample of ``length`` inputs from ``tokens[start]`` on; every token is a target."""
    piece = np.asarray(tokens[start : start + length + 1], dtype=np.int64)
    return {"input_ids": piece[:-1], "targets": piece[1:]}


def span(places: Sequence[str]) -> str:
    """Join the origins of consecutive documents; of more than four, name the first and the last."""
    found = list(dict.fromkeys(places))
    return " and ".join(found) if len(found) < 5 else f"{found[0]} to {found[-1]}"


def stack(samples: Sequence[Sample]) -> Batch:
    """Stack the arrays of samples of equal length."""
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


def pad_ends(pad_id: int, samples: Sequence[Sample]) -> Batch:
    """Pad ``input_ids`` (with ``pad_id``) and ``targets`` at their ends to the longest sample."""
    inputs, targets = ([torch.from_numpy(sample[key]) for sample in samples] for key in ("input_ids", "targets"))
    return {
        "input_ids": pad_sequence(inputs, batch_first=True, padding_value=pad_id),
        "targets": pad_sequence(targets, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True),
    }


def pad_pairs(pad_id: int, samples: Sequence[Sample]) -> Batch:
    """Pad pairs to [2 × pairs, length]: the ``chosen`` sides, then the ``rejected`` ones in the same order."""
    return pad_ends(pad_id, [sample[side] for side in ("chosen", "rejected") for sample in samples])


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Distribute documents of ``lengths`` inputs, 1 to ``room`` each, over sequences of ``room`` inputs.

    Returns:
        Document numbers of each sequence, ascending; each document once.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    sequences: list[list[int]] = []
    by_room: list[list[list[int]]] = [[] for _ in range(room + 1)]  # the sequences that have so much room left
    has_any = np.zeros(room + 1, dtype=np.bool_)
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        left = size + int(has_any[size:].argmax())
        if has_any[left]:
            members = by_room[left].pop()
            has_any[left] = bool(by_room[left])
        else:
            left, members = room, []
            sequences.append(members)
        members.append(number)
        by_room[left - size].append(members)
        has_any[left - size] = True
    return [sorted(each) for each in sequences]


def packed(documents: Sequence[Document], length: int, pad: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return a sample of exactly ``length`` inputs from documents that fit; padding is a document without targets."""
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


# The order of samples


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
        """Return the samples from global position ``first`` on: int64 [count], numbered one source after the other."""
        turns = np.array([self.turn(sample) for sample in range(first, first + count)], dtype=np.int64).reshape(-1, 2)
        found = np.empty(count, dtype=np.int64)
        for source, length in enumerate(self._lengths):
            places = turns[:, 0] == source  # among consecutive samples, the turns of a source are consecutive
            if places.any():
                start = int(turns[places, 1][0])
                inside = sequence_indices(self._seeds[source], start, int(places.sum()), length)
                found[places] = inside + self._firsts[source]
        return found


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


class Mixture:
    """``Samples`` of several sources, numbered one after the other; each has a weight, and at least one sample."""

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self._sources, self._weights = list(sources), list(weights)
        self._ends = list(accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        source, inside = self._find(index)
        return source[inside]

    def where(self, index: int) -> str:
        source, inside = self._find(index)
        return source.where(inside)

    def order(self, seed: int) -> Order:
        """Return the order in which a run takes the samples."""
        return Order(seed, [len(source) for source in self._sources], self._weights)

    def _find(self, index: int) -> tuple[Samples, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = bisect.bisect_right(self._ends, index)
        return self._sources[source], index - (self._ends[source - 1] if source else 0)


class StreamMixture:
    """A ``Stream`` of several streams, which take turns by weight, seed and global sample index."""

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]) -> None:
        self._streams, self._weights = list(streams), list(weights)

    def begin(self, seed: int) -> Iterator[tuple[Sample, str]]:
        order = Order(seed, [1] * len(self._streams), self._weights)
        begun = [stream.begin(seed) for stream in self._streams]
        for sample in count():
            source, _ = order.turn(sample)
            yield next(begun[source])
